"""`dsv41-topk-1`: a reference of the likeliest tokens alone, which any server with logprobs gives.

What it cannot see it says of itself: the mass below its lists, the next token's likelihood where
the token is in no list, and so only a lower bound of the KL (RULES section 4).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.kl import COMMON_MASS, Vector, checked_vector, top20_kl
from pytest_dsv41.quality.reference.kld import (
    TOP,
    TOP_DTYPE,
    KldRecording,
    finish_folder,
    own_folder,
)
from pytest_dsv41.quality.reference.manifest import Manifest, lay_out, whole
from pytest_dsv41.quality.reference.recording import Recording, check_same, read_items, sized
from pytest_dsv41.quality.reference.score import Scores

__all__ = [
    "FORMAT",
    "NO_ID",
    "TopkRecording",
    "TopkScores",
    "TopkWriter",
    "cannot_see",
    "score_topk",
]

FORMAT: Final = "dsv41-topk-1"
_MANIFEST: Final = "topk.json"
_DATA: Final = ("tokens.i32", "top.bin", "rows.f32")
_BLOCK: Final = 4096
NO_ID: Final = -1


def cannot_see(top_n: int, rows: int, seen: int, mass: float) -> list[str]:
    """Return in words what lists of `top_n` tokens leave out; `mass` is what they hold on average.

    Args:
        top_n: entries of a list.
        rows: positions.
        seen: positions whose next token is in its list.
        mass: mean probability mass of a list, 0 to 1.
    """
    return [
        f"the distribution below the {top_n} likeliest tokens, {100 * (1 - mass):.2f} % of the "
        "mass on average: a KL from it is a lower bound",
        f"the next token's likelihood in {rows - seen} of {rows} positions, where it is not among "
        f"the {top_n}: perplexities leave these out",
    ]


class TopkRecording(Recording):
    """A finished `dsv41-topk-1` folder.

    Raises:
        MeasurementRefused: the manifest's kinds (see `Manifest.read`), `missing`, `size`, `tokens`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / _MANIFEST, FORMAT)
        where = str(path / _MANIFEST)
        self.top_n = whole(self.manifest.fields, "top_n", where, 1)
        conditions = self.manifest.fields.get("conditions")
        if not isinstance(conditions, dict):
            raise MeasurementRefused("manifest", f"{where}: conditions: is missing or no table")
        self.conditions: Mapping[str, Any] = conditions
        self.model = self.manifest.model
        self.corpus = self.manifest.corpus
        self.n_vocab = 0
        self.rows = self.manifest.rows
        self.documents = self.manifest.documents
        tokens, rows = self.manifest.tokens, self.rows
        for name, size, what in (
            ("tokens.i32", 4 * tokens, f"{tokens} tokens"),
            (
                "top.bin",
                rows * self.top_n * TOP_DTYPE.itemsize,
                f"{rows} rows of {self.top_n} tokens",
            ),
            ("rows.f32", rows * 8, f"{rows} rows"),
        ):
            sized(path / name, size, what)
        self.tokens = read_items(path / "tokens.i32", "<i4", tokens)
        self.check_tokens(path / "tokens.i32")

    def stored_top(self, row0: int, count: int) -> NDArray[np.void]:
        """Return rows of `top.bin`, shape (count, top_n), fields `id` (-1: none) and `logp`."""
        top_n = self.top_n
        return read_items(self.path / "top.bin", TOP_DTYPE, top_n * count, top_n * row0).reshape(
            -1, top_n
        )

    def stored_rows(self, row0: int, count: int) -> NDArray[np.float32]:
        """Return rows of `rows.f32`, shape (count, 2): NLL (NaN: not seen), mass of the list."""
        return read_items(self.path / "rows.f32", "<f4", 2 * count, 2 * row0).reshape(-1, 2)


class TopkWriter:
    """Records a reference document by document; a context manager, as `KldWriter`.

    Args:
        folder: made where missing.
        model, corpus, corpus_fnv1a64, created: for the manifest; the time is now by default.
        top_n: entries of a list.
        documents: (source, token ids, score_from) of each.
        facts: further keys of the manifest: `engine`, `version`, `conditions`.

    Raises:
        UsageError: the folder holds a reference or something else, or the disk has no room.
        MeasurementRefused: kind `documents`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        corpus: str,
        corpus_fnv1a64: str,
        top_n: int,
        documents: Sequence[tuple[str, Sequence[int] | NDArray[np.int32], int]],
        facts: Mapping[str, Any],
        created: str | None = None,
    ) -> None:
        self._documents = lay_out((source, len(ids), start) for source, ids, start in documents)
        tokens = np.concatenate([np.asarray(ids, "<i4") for _, ids, _ in documents])
        self._following = np.concatenate(
            [np.asarray(ids[start + 1 :], "<i4") for _, ids, start in documents]
        )
        self._rows = len(self._following)
        self._written = self._seen = 0
        self._mass = 0.0
        self._top_n = top_n
        self._facts = facts
        self._model, self._corpus, self._fingerprint = model, corpus, corpus_fnv1a64
        self._created = created
        self.folder = folder
        size = self._rows * (TOP_DTYPE.itemsize * top_n + 8)
        with contextlib.ExitStack() as stack:
            stack.enter_context(own_folder(folder, _MANIFEST, _DATA, size))
            self._files = {name: stack.enter_context((folder / name).open("wb")) for name in _DATA}
            self._stack = stack.pop_all()
        self._files["tokens.i32"].write(tokens.tobytes())

    def append(self, vector: Vector) -> None:
        """Record one row: a list from `checked_vector`, no longer than `top_n`.

        Raises:
            MeasurementRefused: kind `rows`: more than the documents have.
        """
        if self._written >= self._rows:
            raise MeasurementRefused("rows", f"more than the documents' {self._rows} rows")
        top = np.empty(self._top_n, TOP_DTYPE)
        top["id"], top["logp"] = NO_ID, -np.inf
        top["id"][: len(vector)] = [token for token, _ in vector]
        top["logp"][: len(vector)] = [logp for _, logp in vector]
        mass = min(1.0, math.fsum(math.exp(logp) for _, logp in vector))
        likely = dict(vector).get(int(self._following[self._written]))
        nll = math.nan if likely is None else max(0.0, -likely)
        self._files["top.bin"].write(top.tobytes())
        self._files["rows.f32"].write(np.array([nll, mass], "<f4").tobytes())
        self._written += 1
        self._seen += likely is not None
        self._mass += mass

    def finish(self, *unseen: str) -> Manifest:
        """Sync the data, then write the manifest, which says what the lists cannot see.

        `unseen` are further lines of that.

        Raises:
            MeasurementRefused: kind `rows`: not every row was recorded.
            UsageError: the folder has got a manifest meanwhile.
        """
        if self._written != self._rows:
            raise MeasurementRefused(
                "rows", f"{self._written} rows recorded; the documents have {self._rows}"
            )
        mass = self._mass / self._rows
        manifest = Manifest.build(
            model=self._model,
            corpus=self._corpus,
            corpus_fnv1a64=self._fingerprint,
            created=self._created,
            documents=self._documents,
            shape={
                **self._facts,
                "top_n": self._top_n,
                "cannot_see": [
                    *cannot_see(self._top_n, self._rows, self._seen, mass),
                    *unseen,
                ],
            },
            format_name=FORMAT,
        )
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        finish_folder(self.folder / _MANIFEST, manifest)
        self.close()
        return manifest

    def close(self) -> None:
        """Close the files; without `finish` the recording stays unfinished."""
        self._stack.close()

    def __enter__(self) -> TopkWriter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class TopkScores:
    """`scores` as those of dense recordings, an NLL that was not seen NaN; and how far to trust it.

    `common_mass` is, for each row, the smaller of both lists' mass on the tokens they share.
    """

    scores: Scores
    common_mass: NDArray[np.float32]
    top_n: int
    mass: float
    """Mean mass of the reference's lists."""

    def to_json(self) -> dict[str, Any]:
        """Return what a report says of it under `topk`."""
        known = np.isfinite(self.scores.candidate_nll) & np.isfinite(self.scores.reference_nll)
        return {
            "top_n": self.top_n,
            "trusted_share": float((self.common_mass >= COMMON_MASS).mean()),
            "next_token_seen": int(known.sum()),
            "cannot_see": cannot_see(self.top_n, len(known), int(known.sum()), self.mass),
        }


def score_topk(
    reference: TopkRecording | KldRecording,
    candidate: TopkRecording | KldRecording,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TopkScores:
    """Score lists against lists: the coarse KL over the shared tokens and OTHER, row by row.

    A `radiance-kld-1` recording gives its 16 likeliest. The shorter of the two lengths counts.

    Raises:
        MeasurementRefused: the kinds of `check_same`; `conditions` (recorded in another way: cached
            or beside others, which alone moves the KL as far as a requantisation, ENGINES section
            5); those of `checked_vector`, with the row.
    """
    check_same(reference, candidate)
    if isinstance(reference, TopkRecording) and isinstance(candidate, TopkRecording):
        _check_conditions(reference, candidate)
    top_n = min(_length(reference), _length(candidate))
    rows = reference.rows
    kl, common = np.empty(rows, np.float32), np.empty(rows, np.float32)
    same = np.empty(rows, np.bool_)
    nll = {name: np.empty(rows, np.float32) for name in ("reference", "candidate")}
    mass = 0.0
    for row0 in range(0, rows, _BLOCK):
        count = min(_BLOCK, rows - row0)
        left, right = reference.stored_top(row0, count), candidate.stored_top(row0, count)
        for row in range(count):
            p = _vector(reference, row0 + row, left[row], top_n)
            found = top20_kl(p, _vector(candidate, row0 + row, right[row], top_n), top_n=top_n)
            kl[row0 + row], common[row0 + row] = found.kl, found.common_mass
            same[row0 + row] = found.top1_same
            mass += min(1.0, math.fsum(math.exp(logp) for _, logp in p))
        for name, recording in (("reference", reference), ("candidate", candidate)):
            found_nll = recording.stored_rows(row0, count)[:, 0]
            odd = np.isinf(found_nll) | (found_nll < -0.001)
            if odd.any():
                row = int(np.argmax(odd))
                raise MeasurementRefused(
                    "nll",
                    f"{recording.path / 'rows.f32'}: {recording.where(row0 + row)}: the next "
                    f"token's negative log-likelihood is {found_nll[row]:g}",
                )
            nll[name][row0 : row0 + count] = found_nll
        if progress is not None:
            progress(row0 + count, rows)
    scores = Scores(kl, nll["candidate"], nll["reference"], same)
    return TopkScores(scores, common, top_n, mass / rows)


def _check_conditions(reference: TopkRecording, candidate: TopkRecording) -> None:
    if dict(reference.conditions) != dict(candidate.conditions):
        shown = [
            ", ".join(f"{key} {value}" for key, value in sorted(one.conditions.items()))
            for one in (candidate, reference)
        ]
        raise MeasurementRefused(
            "conditions",
            f"{candidate.path} was recorded with {shown[0]}; {reference.path} with {shown[1]}",
        )


def _length(recording: TopkRecording | KldRecording) -> int:
    return recording.top_n if isinstance(recording, TopkRecording) else TOP


def _vector(recording: Recording, row: int, entries: NDArray[np.void], top_n: int) -> Vector:
    try:
        return checked_vector(
            ((int(token), float(logp)) for token, logp in entries.tolist() if token != NO_ID),
            top_n=top_n,
        )
    except MeasurementRefused as error:
        raise MeasurementRefused(
            error.kind, f"{recording.path / 'top.bin'}: {recording.where(row)}: {error}"
        ) from None
