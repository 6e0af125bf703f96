"""Rows out of the archive: CSV, JSON, JSON lines, and Parquet where a library for it is there."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from pytest_dsv41.archive.errors import ArchiveError
from pytest_dsv41.archive.rows import FIELDS

__all__ = ["FORMATS", "write_parquet", "write_text"]

FORMATS = ("csv", "json", "jsonl", "parquet")

_INTEGERS = ("max_tokens", "clock_cap_mhz", "repeat")
_BATCH = 10_000


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with every field; lists as JSON text, missing fields as None."""
    return {
        field: json.dumps(row[field]) if isinstance(row.get(field), list) else row.get(field)
        for field in FIELDS
    }


def write_text(rows: Iterable[Mapping[str, Any]], out: TextIO, form: str) -> int:
    """Write rows as `csv`, `json` or `jsonl`, one at a time; return how many."""
    count = 0
    if form == "csv":
        # A spreadsheet runs a cell that begins with one of these as a formula.
        table = csv.DictWriter(out, FIELDS, lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow(
                {
                    field: f"'{value}" if isinstance(value, str) and value[:1] in "=+-@" else value
                    for field, value in _flat(row).items()
                }
            )
            count += 1
        return count
    if form == "json":
        out.write("[")
    for row in rows:
        if form == "json":
            out.write("\n " if count == 0 else ",\n ")
        out.write(json.dumps(row) + ("" if form == "json" else "\n"))
        count += 1
    if form == "json":
        out.write("\n]\n" if count else "]\n")
    return count


def write_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write rows as a Parquet file; return how many.

    Raises:
        ArchiveError: pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ArchiveError(
            "Parquet needs pyarrow, which is not installed (pip install 'pytest-dsv41[parquet]'); "
            "valid without it: csv, json, jsonl"
        )
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    kinds = {field: arrow.string() for field in FIELDS}
    kinds |= {field: arrow.int64() for field in _INTEGERS}
    kinds["value"] = arrow.float64()
    schema = arrow.schema(list(kinds.items()))
    count = 0
    with parquet.ParquetWriter(str(path), schema) as writer:
        for batch in _batches(rows):
            writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _batches(rows: Iterable[Mapping[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        flat = _flat(row)
        flat["value"] = float(flat["value"])
        batch.append(flat)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
