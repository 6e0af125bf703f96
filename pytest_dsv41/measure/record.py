"""The raw record of one item: what its values were made of, so that they can be made again.

One JSON-lines file an item: a head, one line a stream, the counters, the values. `redacted` (the
default) holds sizes, times, token counts, usage and hashes, and no text. `bytes` holds every byte
that came as well, for cells that ask; a replay then parses them anew.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pytest_dsv41.durable import dump_json, read_json_lines, write_atomic
from pytest_dsv41.engines import Engine, Snapshot, get_engine
from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.cell import CACHES
from pytest_dsv41.measure.group import Endpoint, GroupResult, evaluate
from pytest_dsv41.measure.metrics import Value
from pytest_dsv41.measure.stream import StreamRecord, read_pieces
from pytest_dsv41.measure.wire import TRANSPORT, Framing, Read
from pytest_dsv41.text import one_line

__all__ = ["Replay", "replay", "write_record"]

SCHEMA: Final = "dsv41-raw-v1"


def write_record(
    path: Path,
    endpoint: Endpoint,
    result: GroupResult,
    *,
    record: Literal["redacted", "bytes"] = "redacted",
    caches: tuple[str, ...] = (),
) -> None:
    """Write `result`'s record to `path` (its folder is made), whole or not at all.

    `bytes` needs a result measured with `keep_bytes`; the exchanges' `Sampling.cache` goes into
    `caches` (default: all cold).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [
        {
            "kind": "head",
            "schema": SCHEMA,
            "record": record,
            "engine": endpoint.engine,
            "model": result.model,
            "transport": dict(TRANSPORT),
            "caches": list(caches or ("cold",) * len(result.streams)),
            "prompt_sha256": result.prompt_sha256,
            "prompt_members": list(result.prompt_members),
        }
    ]
    for index, stream in enumerate(result.streams):
        line = {"kind": "stream", **stream.to_json()}
        if index < len(result.exchanges):
            exchange = result.exchanges[index]
            line["reads"] = [list(read) for read in exchange.reads]
            line["offset_ns"] = exchange.offset_ns
            if record == "bytes":
                line["raw"] = [base64.b64encode(raw).decode("ascii") for raw in exchange.raw]
        lines.append(line)
    lines.append(
        {
            "kind": "counters",
            "before": result.before.to_json(),
            "after": result.after.to_json(),
            "server": result.server.to_json(),
        }
    )
    lines.append(
        {
            "kind": "values",
            "values": {name: value.to_json() for name, value in result.values.items()},
            "missing": dict(result.missing),
            "notes": list(result.notes),
        }
    )
    write_atomic(path, "".join(dump_json(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Replay:
    """Values made again from a record, beside those it holds."""

    values: Mapping[str, Value]
    missing: Mapping[str, str]
    recorded: Mapping[str, Mapping[str, Any]]
    parsed_again: bool
    """The bytes themselves were parsed again, not only their record."""
    notes: tuple[str, ...]
    differences: tuple[str, ...] = ()
    """What the record says otherwise, one line each."""

    @property
    def same(self) -> bool:
        """Whether everything came out as recorded, to the last digit."""
        return not self.differences


def replay(path: Path) -> Replay:
    """Make the values of a record again.

    Raises:
        UsageError: no such record, or not one.
        MeasurementFailed, MeasurementRefused: what it holds is now judged otherwise.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such record")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in read_json_lines(path):
        by_kind.setdefault(str(line.get("kind")), []).append(line)
    try:
        (head,), (counters,), (told,) = by_kind["head"], by_kind["counters"], by_kind["values"]
        if head["schema"] != SCHEMA:
            said = one_line(str(head["schema"]), 40)
            raise UsageError(f"{path}: schema {said!r}; valid: {SCHEMA}")
        again = head["record"] == "bytes"
        streams = [
            _parse_again(row) if again else StreamRecord.from_json(row) for row in by_kind["stream"]
        ]
        if len(streams) != len(head["prompt_members"]):
            raise ValueError(f"{len(streams)} of {len(head['prompt_members'])} streams")
        if len(head["caches"]) != len(streams) or not {*head["caches"]} <= {*CACHES}:
            raise ValueError("caches: one of each stream's")
        result = evaluate(
            _engine(path, head["engine"]),
            head["caches"],
            streams,
            Snapshot.from_json(counters["before"]),
            Snapshot.from_json(counters["after"]),
        )
        # What JSON did to the recorded values it must do to these too.
        now = json.loads(dump_json(result.to_json()))
        recorded = told["values"]
        differences = [
            *_differences(recorded, now["values"]),
            *(
                f"{name}: recorded {one_line(dump_json(was), 120)}, "
                f"now {one_line(dump_json(now[name]), 120)}"
                for name, was in (
                    ("missing", told["missing"]),
                    ("prompt_sha256", head["prompt_sha256"]),
                    ("prompt_members", head["prompt_members"]),
                )
                if was != now[name]
            ),
            *(
                f"stream {index}: {key}: the bytes say otherwise"
                for index, row in enumerate(by_kind["stream"])
                for key, value in now["streams"][index].items()
                if row[key] != value
            ),
        ]
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        what = "no" if isinstance(error, KeyError) else f"{type(error).__name__}:"
        why = one_line(f"{what} {error}", 200)
        raise UsageError(f"{path}: not a whole record ({why})") from None
    values = {name: Value(**row) for name, row in now["values"].items()}
    return Replay(values, result.missing, recorded, again, result.notes, tuple(differences))


def _engine(path: Path, name: str) -> Engine:
    try:
        return get_engine(name)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _differences(
    recorded: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """One line a value that is another one; parts that an older record lacks are none."""
    for name in sorted({*recorded, *now}):
        was, became = recorded.get(name), now.get(name)
        shown = one_line(name, 40)
        if was is None or became is None:
            yield f"{shown}: only {'recorded' if became is None else 'now'}"
            continue
        parts = {key: became["parts"].get(key) for key in was["parts"]}
        for key, old, new in (
            *((key, was[key], became[key]) for key in became if key != "parts"),
            *((key, old, parts[key]) for key, old in was["parts"].items()),
        ):
            if old != new:
                yield (
                    f"{shown}: {one_line(key, 40)}: recorded {one_line(str(old), 60)}, "
                    f"now {one_line(str(new), 60)}"
                )


def _parse_again(row: Mapping[str, Any]) -> StreamRecord:
    reads = [Read(*read) for read in row["reads"]]
    framing = Framing("POST")
    pieces: list[tuple[int, bytes]] = []
    for index, raw in enumerate(row["raw"]):
        body = framing.feed(base64.b64decode(raw))
        if body:
            pieces.append((index, body))
    zero = int(row["start_ns"])
    return read_pieces(
        pieces,
        reads,
        offset_ns=row["offset_ns"],
        start_ns=zero,
        send_ns=row["send_ns"],
        end_ns=zero + int(row["end_ns"]),
        prompt_sha256=row["prompt_sha256"],
    )
