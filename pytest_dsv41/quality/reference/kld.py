"""`radiance-kld-1`: a KL reference in a folder of five files (FORMATS), read and written.

`logp.f16` holds every row's float16 log-probabilities, `top.bin` the 16 likeliest tokens with
exact float32 values, `rows.f32` the next token's negative log-likelihood and the entropy,
`tokens.i32` the documents; `kld.json` is written last and never overwritten: a folder without it
is an unfinished recording.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.durable import create_exclusive, fsync_folder, sweep
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.reference.dense import (
    LOGP_MAX,
    LOWEST,
    Block,
    Codes,
    Dense,
    Floats32,
    Floats64,
    Reader,
    read_exact,
)
from pytest_dsv41.quality.reference.manifest import Manifest, lay_out, whole
from pytest_dsv41.quality.reference.recording import read_items, sized

__all__ = ["FORMAT", "TOP", "KldRecording", "KldWriter", "top_entries"]

FORMAT: Final = "radiance-kld-1"
TOP: Final = 16
TOP_DTYPE: Final = np.dtype([("id", "<i4"), ("logp", "<f4")])
_MINUS_INFINITY: Final = 0xFC00 - (1 << 16)
"""Of all negative float16 but NaN the largest, as a signed integer."""
_F16_SCALE: Final = np.float32(-(2.0 ** (127 - 15 - 32)))
"""The exponents' biases differ by 127 - 15; the sign bit adds 32 to an exponent."""
_DATA: Final = ("tokens.i32", "logp.f16", "top.bin", "rows.f32")
_MANIFEST: Final = "kld.json"
_SLACK: Final = (0.01, 0.01)
"""float16 keeps 11 bits: between -16 and 0 a probability is off by at most 0.4 %, and the tokens
below -16 hold little; 1 % is beyond what rounding leaves, at any vocabulary in use."""


class KldRecording(Dense):
    """A finished `radiance-kld-1` folder.

    Raises:
        MeasurementRefused: the manifest's kinds (see `Manifest.read`), `vocabulary` (smaller than
            the 16 tokens kept, or no 16), `missing`, `size` (a file is short or long), `tokens`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / _MANIFEST, FORMAT)
        where = str(path / _MANIFEST)
        self.n_vocab = whole(self.manifest.fields, "n_vocab", where, 1)
        if whole(self.manifest.fields, "top", where, 1) != TOP:
            raise MeasurementRefused(
                "manifest", f"{where}: top: {self.manifest.fields['top']}; {FORMAT} keeps {TOP}"
            )
        if self.n_vocab < TOP:
            raise MeasurementRefused(
                "vocabulary", f"{where}: n_vocab: {self.n_vocab}; fewer than the {TOP} kept"
            )
        self.model = self.manifest.model
        self.corpus = self.manifest.corpus
        self.rows = self.manifest.rows
        self.documents = self.manifest.documents
        self.row_bytes = 2 * self.n_vocab
        self.slack = _SLACK
        tokens, rows = self.manifest.tokens, self.rows
        for name, size, what in (
            ("tokens.i32", 4 * tokens, f"{tokens} tokens"),
            ("logp.f16", rows * self.row_bytes, f"{rows} rows of {self.n_vocab} tokens"),
            ("top.bin", rows * TOP * TOP_DTYPE.itemsize, f"{rows} rows of {TOP} tokens"),
            ("rows.f32", rows * 8, f"{rows} rows"),
        ):
            sized(path / name, size, what)
        self.tokens = read_items(path / "tokens.i32", "<i4", tokens)
        self.check_tokens(path / "tokens.i32")

    def reader(self) -> Reader:
        """See `Dense.reader`."""
        return _KldReader(self)

    def stored_rows(self, row0: int, count: int) -> NDArray[np.float32]:
        """Return rows of `rows.f32`, shape (count, 2): the next token's NLL, the entropy."""
        return read_items(self.path / "rows.f32", "<f4", 2 * count, 2 * row0).reshape(-1, 2)

    def stored_top(self, row0: int, count: int) -> NDArray[np.void]:
        """Return rows of `top.bin`, shape (count, 16), fields `id` and `logp`."""
        entries = read_items(self.path / "top.bin", TOP_DTYPE, TOP * count, TOP * row0)
        return entries.reshape(-1, TOP)


@dataclass(frozen=True)
class _KldBlock(Block):
    largest: NDArray[np.int16]
    """The largest code of each row as a signed integer: minus infinity where all are sound and one
    is 0, more where one is NaN, or positive by its sign."""

    def decode(self, row: int, first: int, logp: Floats32, mass: Floats32) -> None:
        """See `Block.decode`."""
        # A float16's exponent and mantissa where a float32 has its own, and its sign, set for all
        # below 0, in the exponent: together they are off by one factor. Minus infinity becomes
        # -65536, whose exponential is 0. What is 0, above it by rounding, or nearer than the
        # smallest exponent's 6e-5 is off by no more than that: the likeliest token, whose exact
        # value counts in its place.
        bits = logp.view(np.uint32)
        np.copyto(bits, self.codes[row, first : first + len(bits)])
        np.left_shift(bits, 13, out=bits)
        np.multiply(logp, _F16_SCALE, out=logp)
        np.exp(logp, out=mass)

    def stored(self, ids: NDArray[np.integer]) -> tuple[Floats64, Floats64]:
        """See `Block.stored`."""
        values = self.codes_of(ids).view(np.float16).astype(np.float64)
        # No log-probability is NaN: `fault` names it, and no comparison before that does.
        logp = np.where(values > LOGP_MAX, np.nan, np.maximum(values, LOWEST))
        return logp, np.exp(logp)

    def fault(self, row: int) -> str | None:
        """See `Block.fault`."""
        if self.largest[row] <= _MINUS_INFINITY:
            return None
        values = self.codes[row].view(np.float16).astype(np.float64)
        wrong = ~(values <= LOGP_MAX)
        if not wrong.any():
            return None
        token = int(np.argmax(wrong))
        value = float(values[token])
        shown = "NaN" if np.isnan(value) else f"{value:g}: above 0"
        return f"token {token} has the log-probability {shown}"

    def zeros(self, row: int) -> NDArray[np.bool_] | None:
        """See `Block.zeros`."""
        if self.largest[row] < _MINUS_INFINITY:
            return None
        found: NDArray[np.bool_] = self.codes[row].view(np.int16) == _MINUS_INFINITY
        return found if found.any() else None


class _KldReader(Reader):
    def __init__(self, recording: KldRecording) -> None:
        self._recording = recording
        self._buffer = bytearray()
        self._fd = os.open(recording.path / "logp.f16", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, row0: int, count: int) -> Block:
        """See `Reader.read`."""
        recording = self._recording
        need = count * recording.row_bytes
        if len(self._buffer) < need:
            self._buffer = bytearray(need)
        view = memoryview(self._buffer)[:need]
        read_exact(self._fd, view, row0 * recording.row_bytes, recording.path / "logp.f16")
        codes = np.frombuffer(view, "<u2").reshape(count, recording.n_vocab)
        top = recording.stored_top(row0, count)
        ids = top["id"]
        self._check_ids(row0, ids)
        # A damaged number may be a signalling NaN: it is named as any other, without a warning.
        with np.errstate(invalid="ignore"):
            block = _KldBlock(
                codes=codes,
                top_ids=ids,
                top_logp=top["logp"].astype(np.float64),
                top1=ids[:, 0],
                nll=recording.stored_rows(row0, count)[:, 0].astype(np.float64),
                largest=codes.view(np.int16).max(axis=1),
            )
            self._check_values(row0, block)
        return block

    def _check_ids(self, row0: int, ids: NDArray[np.int32]) -> None:
        ordered = np.sort(ids, axis=1)
        outside = (ordered[:, 0] < 0) | (ordered[:, -1] >= self._recording.n_vocab)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if (outside | twice).any():
            row = int(np.argmax(outside | twice))
            what = "outside the vocabulary" if outside[row] else "listed twice"
            raise self._fault(row0 + row, f"a token id {what}")

    def _check_values(self, row0: int, block: Block) -> None:
        """The exact values are those that the row rounds; else one of the files is another's."""
        exact = np.maximum(block.top_logp, LOWEST)
        stored, _ = block.stored(block.top_ids)
        # NaN is left to the sums, which name the token.
        off = np.abs(stored - exact) > 1e-3 - exact * 2.0**-10
        if off.any():
            row, at = np.unravel_index(int(np.argmax(off)), off.shape)
            raise self._fault(
                row0 + int(row),
                f"token {block.top_ids[row, at]} has {exact[row, at]:g}, and {stored[row, at]:g} "
                "in logp.f16",
            )

    def _fault(self, row: int, what: str) -> MeasurementRefused:
        where = f"{self._recording.path / 'top.bin'}: {self._recording.where(row)}"
        return MeasurementRefused("top", f"{where}: {what}")

    def will_need(self, row0: int, count: int) -> None:
        """See `Reader.will_need`."""
        size = self._recording.row_bytes
        os.posix_fadvise(self._fd, row0 * size, count * size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `Reader.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def top_entries(
    logp: NDArray[np.float32], count: int = TOP
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return ids and values of a row's `count` largest log-probabilities.

    The likeliest comes first; of a tie the lower id comes first, and stays at the end of the list.
    """
    edge = np.partition(logp, len(logp) - count)[len(logp) - count]
    ids = np.flatnonzero(logp >= edge)
    ids = ids[np.argsort(-logp[ids], kind="stable")][:count]
    return ids, logp[ids]


class KldWriter:
    """Records a reference row by row; a context manager.

    Leaving it without `finish` leaves an unfinished recording, which the next one may overwrite; a
    finished one never is. Rows come in the documents' order.

    Args:
        folder: made where missing.
        model, corpus, corpus_fnv1a64, created: for the manifest; the time is now by default.
        n_vocab: tokens of the vocabulary, at least 16.
        documents: (source, token ids, score_from) of each.

    Raises:
        UsageError: the folder holds a reference or something else, or the disk has no room.
        MeasurementRefused: kinds `documents`, `tokens`, `vocabulary`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        corpus: str,
        corpus_fnv1a64: str,
        n_vocab: int,
        documents: Sequence[tuple[str, Sequence[int] | NDArray[np.int32], int]],
        created: str | None = None,
    ) -> None:
        if n_vocab < TOP:
            raise MeasurementRefused(
                "vocabulary", f"{n_vocab} tokens; a reference keeps the {TOP} likeliest"
            )
        placed = lay_out((source, len(ids), start) for source, ids, start in documents)
        tokens = np.concatenate([np.asarray(ids, "<i4") for _, ids, _ in documents])
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise MeasurementRefused(
                "tokens", f"a token id outside the {n_vocab} of the vocabulary"
            )
        self.folder = folder
        self.manifest = Manifest.build(
            model=model,
            corpus=corpus,
            corpus_fnv1a64=corpus_fnv1a64,
            documents=placed,
            shape={"n_vocab": n_vocab, "top": TOP},
            format_name=FORMAT,
            created=created,
        )
        self._n_vocab = n_vocab
        self._rows = self.manifest.rows
        self._written = 0
        self._next = iter(_next_tokens(documents))
        size = self._rows * (2 * n_vocab + 8 * TOP + 8)
        with contextlib.ExitStack() as stack:
            stack.enter_context(own_folder(folder, _MANIFEST, _DATA, size))
            self._files = {name: stack.enter_context((folder / name).open("wb")) for name in _DATA}
            self._stack = stack.pop_all()
        self._files["tokens.i32"].write(tokens.tobytes())

    def append(self, logp: NDArray[np.float32], *, nll: float | None = None) -> None:
        """Record one row: natural log-probabilities, float32, shape (n_vocab,).

        `nll` is the next token's negative log-likelihood where the row itself gives it the
        probability 0 and more is known; by default it is the row's.

        Raises:
            MeasurementRefused: kinds `vocabulary` (another length), `logprob` (NaN, or above
                0.001), `rows` (more than the documents have).
        """
        if logp.shape != (self._n_vocab,):
            raise MeasurementRefused(
                "vocabulary", f"a row of {logp.size} tokens; the vocabulary has {self._n_vocab}"
            )
        if not bool((logp <= 0.001).all()):
            raise MeasurementRefused(
                "logprob", f"row {self._written}: holds NaN or a log-probability above 0"
            )
        following = next(self._next, None)
        if following is None:
            raise MeasurementRefused("rows", f"more than the documents' {self._rows} rows")
        with np.errstate(over="ignore"):
            codes = logp.astype("<f2")
        ids, values = top_entries(logp)
        top = np.empty(TOP, TOP_DTYPE)
        top["id"], top["logp"] = ids, values
        exact = np.maximum(logp, LOWEST).astype(np.float64)
        entropy = -float(np.sum(np.exp(exact) * exact))
        rows = np.array([-logp[following] if nll is None else nll, entropy], "<f4")
        self.append_encoded(codes.view("<u2"), top, rows)

    def append_encoded(
        self, codes: Codes, top: NDArray[np.void], rows: NDArray[np.float32]
    ) -> None:
        """Record rows as they lie in another recording of the same documents."""
        self._files["logp.f16"].write(np.ascontiguousarray(codes).data)
        self._files["top.bin"].write(np.ascontiguousarray(top).tobytes())
        self._files["rows.f32"].write(np.ascontiguousarray(rows).tobytes())
        self._written += codes.size // self._n_vocab

    def finish(self) -> Manifest:
        """Sync the data, then write the manifest, whose presence says that all is there.

        Raises:
            MeasurementRefused: kind `rows`: not every row was recorded.
            UsageError: the folder has got a manifest meanwhile.
        """
        if self._written != self._rows:
            raise MeasurementRefused(
                "rows", f"{self._written} rows recorded; the documents have {self._rows}"
            )
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        finish_folder(self.folder / _MANIFEST, self.manifest)
        self.close()
        return self.manifest

    def close(self) -> None:
        """Close the files; without `finish` the recording stays unfinished."""
        self._stack.close()

    def __enter__(self) -> KldWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def own_folder(folder: Path, manifest: str, data: Sequence[str], size: int) -> Iterator[None]:
    """Make a recording's folder, or take over an unfinished one's; nobody else does meanwhile.

    Raises:
        UsageError: it holds a finished recording, or files of something else; another process
            records into it; there is no room for `size` bytes; its place is taken by a file.
    """
    if (folder / manifest).exists():
        raise UsageError(f"{folder}: already holds a reference, which is never overwritten")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{folder}: is no folder") from None
    known = {manifest, *data}
    other = sorted(
        path.name for path in folder.iterdir() if path.name not in known and path.suffix != ".tmp"
    )
    if other:
        raise UsageError(f"{folder}: holds other files, such as {other[0]}; name a new folder")
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UsageError(f"{folder}: {size} bytes are needed, {free} are free on this disk")
    # The kernel gives the lock back when its holder dies: an unfinished recording is free again.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(folder / data[0], flags, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another process records into it now") from None
        if (folder / manifest).exists():
            raise UsageError(f"{folder}: already holds a reference, which is never overwritten")
        for name in data[1:]:
            # Whatever lies there, a link among it: the new file is this recording's own.
            (folder / name).unlink(missing_ok=True)
        sweep(folder)
        yield
    finally:
        os.close(fd)


def finish_folder(path: Path, manifest: Manifest) -> None:
    """Write the manifest of a recording whose data is synced."""
    fsync_folder(path.parent)
    try:
        create_exclusive(path, manifest.to_bytes())
    except FileExistsError:
        raise UsageError(
            f"{path}: somebody has put a manifest there meanwhile; it is not this recording's"
        ) from None


def _next_tokens(
    documents: Iterable[tuple[str, Sequence[int] | NDArray[np.int32], int]],
) -> Iterable[int]:
    for _, ids, score_from in documents:
        for token in ids[score_from + 1 :]:
            yield int(token)
