"""What all recordings have in common: documents, their tokens, and which row is which position."""

from __future__ import annotations

import stat
from abc import ABC
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.manifest import Document

__all__ = ["Recording", "check_same", "read_items", "sized"]


class Recording(ABC):
    """A recording on disk, opened and found whole in its sizes.

    `path` is the folder or file; `corpus` the name of the text, empty where the format has none;
    `n_vocab` the size of the vocabulary, 0 where the format does not know it; `tokens` all
    documents' token ids, one after the other.
    """

    path: Path
    model: str
    corpus: str
    n_vocab: int
    rows: int
    documents: tuple[Document, ...]
    tokens: NDArray[np.int32]

    def next_tokens(self) -> NDArray[np.int32]:
        """Return, for each row, the token that its position is scored against."""
        parts = []
        first = 0
        for document in self.documents:
            parts.append(self.tokens[first + document.score_from + 1 : first + document.tokens])
            first += document.tokens
        return np.concatenate(parts)

    def where(self, row: int) -> str:
        """Say where a row lies: row, document and position."""
        number = next(
            n for n, one in enumerate(self.documents) if one.row0 <= row < one.row0 + one.rows
        )
        document = self.documents[number]
        position = document.score_from + row - document.row0
        return f"row {row} (document {number}, position {position})"

    def check_tokens(self, path: Path) -> None:
        """Refuse token ids that the vocabulary does not have, kind `tokens`."""
        most = self.n_vocab or np.inf
        outside = (self.tokens < 0) | (self.tokens >= most)
        if outside.any():
            at = int(np.argmax(outside))
            has = f"; the vocabulary has {self.n_vocab} tokens" if self.n_vocab else ""
            raise MeasurementRefused("tokens", f"{path}: token {at} is {self.tokens[at]}{has}")


def check_same(reference: Recording, candidate: Recording) -> None:
    """Refuse a candidate that is not of the reference's tokens and positions.

    Raises:
        MeasurementRefused: kinds `vocabulary`, `documents`, `tokens`.
    """
    names = f"{candidate.path} against {reference.path}"
    known = candidate.n_vocab and reference.n_vocab
    if known and candidate.n_vocab != reference.n_vocab:
        raise MeasurementRefused(
            "vocabulary",
            f"{names}: {candidate.n_vocab} tokens in the vocabulary, not {reference.n_vocab}",
        )
    if len(candidate.documents) != len(reference.documents):
        raise MeasurementRefused(
            "documents",
            f"{names}: {len(candidate.documents)} documents, not {len(reference.documents)}",
        )
    for number, (one, other) in enumerate(
        zip(candidate.documents, reference.documents, strict=True)
    ):
        if (one.tokens, one.score_from) != (other.tokens, other.score_from):
            raise MeasurementRefused(
                "documents",
                f"{names}: document {number} has {one.tokens} tokens scored from "
                f"{one.score_from}, not {other.tokens} from {other.score_from}",
            )
    if not np.array_equal(candidate.tokens, reference.tokens):
        at = int(np.argmax(candidate.tokens != reference.tokens))
        raise MeasurementRefused(
            "tokens",
            f"{names}: token {at} is {int(candidate.tokens[at])}, not {int(reference.tokens[at])}: "
            "another text, or another tokenizer",
        )


def read_items(path: Path, form: Any, count: int, first: int = 0) -> NDArray[Any]:
    """Return `count` items of the dtype `form` from the `first` on; kind `size` for fewer.

    A file whose size was right can be cut while it is read.
    """
    dtype = np.dtype(form)
    found = np.fromfile(path, dtype, count, offset=first * dtype.itemsize)
    if len(found) < count:
        at = (first + len(found)) * dtype.itemsize
        raise MeasurementRefused("size", f"{path}: ends at byte {at}, too short")
    return found


def sized(path: Path, size: int, what: str) -> None:
    """Refuse a file that is not there (kind `missing`) or not one of exactly `size` bytes (`size`).

    Also a pipe or a device in its place, which would never end or never begin.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise MeasurementRefused("missing", f"{path}: is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise MeasurementRefused("size", f"{path}: not a regular file")
    if found.st_size != size:
        how = "short" if found.st_size < size else "long"
        raise MeasurementRefused(
            "size", f"{path}: {found.st_size} bytes, too {how}: {what} are {size} bytes"
        )
