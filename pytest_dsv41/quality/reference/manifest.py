"""What a recording says of itself: its documents and their rows, its corpus and its fingerprint.

A document of `n` tokens has the positions `score_from … n − 2`, each scored against the token
after it, so `n − 1 − score_from` rows; the rows of all documents follow one another (FORMATS).
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dsv41.durable import read_regular
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.text import one_line

__all__ = [
    "FNV_BASIS",
    "FNV_PRIME",
    "Document",
    "Manifest",
    "fingerprint",
    "lay_out",
    "utc_now",
]

FNV_BASIS: Final = 1469598103934665603
"""Where the fingerprint begins: not the textbook basis of FNV-1a (FORMATS)."""
FNV_PRIME: Final = 1099511628211
_U64: Final = (1 << 64) - 1
_MOST_BYTES: Final = 64 << 20
_HEX: Final = re.compile(r"[0-9a-f]{16}")
_UTC: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def fingerprint(lines: Iterable[bytes]) -> str:
    """Return the 16 hex digits of a corpus: FNV-1a over its lines' bytes without the newlines.

    The hash runs on from line to line; a carriage return is part of its line (FORMATS).
    """
    value = FNV_BASIS
    for line in lines:
        for byte in line.removesuffix(b"\n"):
            value = ((value ^ byte) * FNV_PRIME) & _U64
    return f"{value:016x}"


def utc_now() -> str:
    """Return the time as manifests write it, to the second: `2026-01-31T12:00:00Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Document:
    """One text of a corpus: where its tokens and its rows lie in the recording."""

    source: str
    tokens: int
    score_from: int
    row0: int

    @property
    def rows(self) -> int:
        """How many positions are scored."""
        return self.tokens - 1 - self.score_from


def lay_out(documents: Iterable[tuple[str, int, int]]) -> tuple[Document, ...]:
    """Return documents in order from (source, tokens, score_from), each `row0` filled in.

    Raises:
        MeasurementRefused: kind `documents`: one has nothing to score.
    """
    placed: list[Document] = []
    row0 = 0
    for source, tokens, score_from in documents:
        document = Document(source, tokens, score_from, row0)
        if score_from < 0 or document.rows < 1:
            raise MeasurementRefused(
                "documents",
                f"document {len(placed)}: {tokens} tokens leave nothing to score from position "
                f"{score_from}",
            )
        row0 += document.rows
        placed.append(document)
    return tuple(placed)


@dataclass(frozen=True)
class Manifest:
    """A recording's manifest, checked. `fields` is all of it, in the order of the file."""

    fields: Mapping[str, Any]
    documents: tuple[Document, ...]

    @property
    def model(self) -> str:
        """The model that was recorded."""
        return str(self.fields["model"])

    @property
    def corpus(self) -> str:
        """The name of the corpus."""
        return str(self.fields["corpus"])

    @property
    def rows(self) -> int:
        """How many positions there are in all."""
        return int(self.fields["rows"])

    @property
    def tokens(self) -> int:
        """How many tokens the documents have together."""
        return sum(document.tokens for document in self.documents)

    def to_bytes(self) -> bytes:
        """Return the file: JSON indented by one space, keys in order, a newline at the end."""
        text = json.dumps(self.fields, indent=1, ensure_ascii=False, allow_nan=False)
        return text.encode(errors="backslashreplace") + b"\n"

    @classmethod
    def build(
        cls,
        *,
        model: str,
        corpus: str,
        corpus_fnv1a64: str,
        documents: Sequence[Document],
        shape: Mapping[str, Any],
        format_name: str,
        created: str | None = None,
    ) -> Manifest:
        """Make a manifest; `shape` holds the format's own keys, which stand after `created`."""
        fields: dict[str, Any] = {
            "format": format_name,
            "model": model,
            "corpus": corpus,
            "corpus_fnv1a64": corpus_fnv1a64,
            "created": created or utc_now(),
            **shape,
            "rows": sum(document.rows for document in documents),
            "docs": [
                {
                    "source": document.source,
                    "tokens": document.tokens,
                    "score_from": document.score_from,
                    "row0": document.row0,
                }
                for document in documents
            ],
        }
        return cls(fields, tuple(documents))

    @classmethod
    def read(cls, path: Path, format_name: str) -> Manifest:
        """Read and check the manifest of a recording.

        Raises:
            MeasurementRefused: kinds `unfinished` (there is none: the recording did not end),
                `format` (another one), `manifest` (a key is missing or wrong; named), `rows` (the
                documents do not follow one another, or do not add up).
        """
        if not path.parent.is_dir():
            raise MeasurementRefused("missing", f"{path.parent}: there is no such folder")
        try:
            raw = read_regular(path, _MOST_BYTES)
        except FileNotFoundError:
            raise MeasurementRefused(
                "unfinished",
                f"{path.parent}: has no {path.name}: not a {format_name} recording, or one that "
                "did not end",
            ) from None
        except ValueError as error:
            raise MeasurementRefused("manifest", f"{path}: {error}") from None
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            raise MeasurementRefused("manifest", f"{path}: is not JSON") from None
        if not isinstance(fields, dict):
            raise MeasurementRefused("manifest", f"{path}: is not a JSON object")
        found = fields.get("format")
        if found != format_name:
            named = one_line(str(found), 60)
            raise MeasurementRefused("format", f"{path}: format: {named!r}, not {format_name!r}")
        return cls(fields, _documents(fields, path))


def whole(fields: Mapping[str, Any], key: str, where: str, least: int) -> int:
    """Return the integer of a key, at least `least`; refused by name where it is none."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        named = "is missing" if value is None else f"{one_line(str(value), 40)}"
        raise MeasurementRefused(
            "manifest", f"{where}: {key}: {named}; an integer of at least {least} is needed"
        )
    return value


def _documents(fields: Mapping[str, Any], path: Path) -> tuple[Document, ...]:
    for key in ("model", "corpus", "corpus_fnv1a64", "created"):
        if not isinstance(fields.get(key), str):
            raise MeasurementRefused("manifest", f"{path}: {key}: is missing or no text")
    for key, form, needed in (
        ("corpus_fnv1a64", _HEX, "16 lower-case hex digits"),
        ("created", _UTC, "a UTC time that ends in Z"),
    ):
        if not form.fullmatch(fields[key]):
            named = one_line(fields[key], 60)
            raise MeasurementRefused("manifest", f"{path}: {key}: {named!r} is not {needed}")
    rows = whole(fields, "rows", str(path), 1)
    listed = fields.get("docs")
    if not isinstance(listed, list) or not listed:
        raise MeasurementRefused("manifest", f"{path}: docs: is missing, no list, or empty")
    documents: list[Document] = []
    row0 = 0
    for number, entry in enumerate(listed):
        where = f"{path}: docs[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
            raise MeasurementRefused("manifest", f"{where}: source: is missing or no text")
        document = Document(
            entry["source"],
            whole(entry, "tokens", where, 1),
            whole(entry, "score_from", where, 0),
            whole(entry, "row0", where, 0),
        )
        if document.rows < 1:
            raise MeasurementRefused(
                "rows",
                f"{where}: {document.tokens} tokens leave nothing to score from position "
                f"{document.score_from}",
            )
        if document.row0 != row0:
            raise MeasurementRefused(
                "rows", f"{where}: row0: {document.row0}; the rows before it are {row0}"
            )
        row0 += document.rows
        documents.append(document)
    if row0 != rows:
        raise MeasurementRefused("rows", f"{path}: rows: {rows}; its documents add up to {row0}")
    return tuple(documents)
