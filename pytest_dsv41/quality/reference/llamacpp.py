"""The base file of `llama-perplexity --kl-divergence-base`: a dense recording of one text.

The file holds chunks of `n_ctx` tokens; of each chunk the second half is scored. A row is two
float32 (scale, minimum) and `n_vocab` uint16: log-probability = scale × value + minimum. Values
reach 16 below the row's largest log-probability; the value 0 stands for all below (FORMATS).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.dense import (
    LOGP_MAX,
    Block,
    Codes,
    Dense,
    Floats32,
    Floats64,
    Reader,
    read_exact,
)
from pytest_dsv41.quality.reference.manifest import lay_out

__all__ = ["MAGIC", "BaseFile"]

MAGIC: Final = b"_logits_"
_HEAD: Final = struct.Struct("<8siii")
_REACH: Final = 15.999
"""From this reach of a row on, its value 0 is the floor: float32 leaves 16 a little short."""
_ROW_HEAD: Final = 8
_MOST: Final = 65535
"""The largest 16-bit value."""


class BaseFile(Dense):
    """A base file as a recording: each chunk is a document scored from its middle on.

    `model` and `source` name what the file does not say. A row of an odd vocabulary is padded to
    an even count of values by the program that writes it; a file without the padding is read too.

    Raises:
        MeasurementRefused: kinds `missing`, `format` (no base file), `manifest` (its sizes make no
            sense), `size` (short, or long), `tokens`.
    """

    def __init__(self, path: Path, *, model: str = "", source: str = "") -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise MeasurementRefused("format", f"{path}: not a regular file: no base file")
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD.size)
                size = os.fstat(file.fileno()).st_size
                if head[: len(MAGIC)] != MAGIC:
                    raise MeasurementRefused(
                        "format", f"{path}: does not begin with {MAGIC.decode()}: no base file"
                    )
                if len(head) < _HEAD.size:
                    raise MeasurementRefused("size", f"{path}: {size} bytes, too short: no header")
                _, n_ctx, n_vocab, chunks = _HEAD.unpack(head)
                if n_ctx < 3 or n_vocab < 1 or chunks < 1:
                    raise MeasurementRefused(
                        "manifest",
                        f"{path}: a context of {n_ctx}, {n_vocab} tokens and {chunks} chunks: "
                        "at least 3, 1 and 1 are needed",
                    )
                first = n_ctx // 2
                self.rows = chunks * (n_ctx - 1 - first)
                self.start = _HEAD.size + 4 * n_ctx * chunks
                self.row_bytes = _row_bytes(path, size, n_vocab, self.start, self.rows)
                self.tokens = np.fromfile(file, "<i4", n_ctx * chunks)
        except FileNotFoundError:
            raise MeasurementRefused("missing", f"{path}: is missing") from None
        self.model = model or path.stem
        self.corpus = ""
        self.n_vocab = n_vocab
        self.documents = lay_out((source, n_ctx, first) for _ in range(chunks))
        # What the floor hides is left out, and each value is rounded to half a scale.
        self.slack = (0.01 + n_vocab * float(np.exp(-16.0)), 0.01)
        self.check_tokens(path)
        self.following = self.next_tokens()

    def reader(self) -> Reader:
        """See `Dense.reader`."""
        return _BaseReader(self)


def _row_bytes(path: Path, size: int, n_vocab: int, start: int, rows: int) -> int:
    """What a row takes in a file of `size` bytes; before anything is read that a header claims."""
    widths = {n_vocab + n_vocab % 2, n_vocab}
    sizes = {start + rows * (_ROW_HEAD + 2 * width): width for width in widths}
    if size not in sizes:
        how = "short" if size < min(sizes) else "long"
        raise MeasurementRefused(
            "size",
            f"{path}: {size} bytes, too {how}: {rows} rows of {n_vocab} tokens make {max(sizes)}",
        )
    return _ROW_HEAD + 2 * sizes[size]


@dataclass(frozen=True)
class _BaseBlock(Block):
    peak: Codes
    """The largest code of each row."""
    scale: Floats64
    lowest: Floats64
    """The two numbers of each row: log-probability = scale × code + lowest."""
    floored: NDArray[np.bool_]
    """Whether a row's code 0 stands for all below its floor."""

    def decode(self, row: int, first: int, logp: Floats32, mass: Floats32) -> None:
        """See `Block.decode`."""
        codes = self.codes[row, first : first + len(logp)]
        scale, peak = self.scale[row], int(self.peak[row])
        # Counted down from the likeliest: float32 then rounds least where most of the mass is.
        np.copyto(logp, codes)
        np.subtract(logp, np.float32(peak), out=logp)
        np.multiply(logp, np.float32(scale), out=logp)
        np.add(logp, np.float32(scale * peak + self.lowest[row]), out=logp)
        np.exp(logp, out=mass)
        if self.floored[row]:
            np.multiply(mass, codes != 0, out=mass)

    def stored(self, ids: NDArray[np.integer]) -> tuple[Floats64, Floats64]:
        """See `Block.stored`."""
        codes = self.codes_of(ids)
        logp = self.scale[:, None] * codes + self.lowest[:, None]
        return logp, np.where((codes == 0) & self.floored[:, None], 0.0, np.exp(logp))

    def fault(self, row: int) -> str | None:
        """See `Block.fault`."""
        largest = self.scale[row] * int(self.peak[row]) + self.lowest[row]
        if largest <= LOGP_MAX:
            return None
        return f"token {self.top1[row]} has the log-probability {largest:g}: above 0"


class _BaseReader(Reader):
    def __init__(self, recording: BaseFile) -> None:
        self._recording = recording
        self._buffer = bytearray()
        self._fd = os.open(recording.path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, row0: int, count: int) -> Block:
        """See `Reader.read`."""
        recording = self._recording
        need = count * recording.row_bytes
        if len(self._buffer) < need:
            self._buffer = bytearray(need)
        view = memoryview(self._buffer)[:need]
        read_exact(self._fd, view, recording.start + row0 * recording.row_bytes, recording.path)
        words = np.frombuffer(view, "<u2").reshape(count, recording.row_bytes // 2)
        # A signalling NaN is named as any other number that is none, without a warning.
        with np.errstate(invalid="ignore"):
            heads = words[:, :4].copy().view("<f4").astype(np.float64)
        for row, (scale, lowest) in enumerate(heads):
            if not (0 <= scale <= 1 and np.isfinite(lowest)):
                raise MeasurementRefused(
                    "logprob",
                    f"{recording.path}: {recording.where(row0 + row)}: scale {scale:g} and minimum "
                    f"{lowest:g} are no log-probabilities",
                )
        codes = words[:, 4 : 4 + recording.n_vocab]
        rows = np.arange(count)
        scale, lowest = heads.T
        top1 = codes.argmax(axis=1).astype(np.int32)
        values = codes[rows, recording.following[row0 : row0 + count]].astype(np.float64)
        return _BaseBlock(
            codes=codes,
            top_ids=np.empty((count, 0), np.int32),
            top_logp=np.empty((count, 0)),
            top1=top1,
            nll=-(scale * values + lowest),
            peak=codes[rows, top1],
            scale=scale,
            lowest=lowest,
            floored=scale * _MOST >= _REACH,
        )

    def will_need(self, row0: int, count: int) -> None:
        """See `Reader.will_need`."""
        size = self._recording.row_bytes
        start = self._recording.start + row0 * size
        os.posix_fadvise(self._fd, start, count * size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `Reader.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
