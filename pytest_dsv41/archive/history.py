"""What a window's folder proves about its control rows: commit, clock cap, date, values.

Two kinds of folder are read. One of this project has plan.json, values.jsonl, target.json and
journal.jsonl. An older one has at least summary.json or rollback.json, start logs
`cmd/NNNN-<start>-start.log`, and values.jsonl with the same lines as ours (item, start, arm, cell,
repeat, outcome, values, prompt_sha256, max_tokens, started_utc, duration_s); its plan may be
missing, then the arm's name is its role.

Nothing is guessed: a fact that the folder does not prove raises `HistoryUnknown`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.errors import HistoryUnknown, RowRefused
from pytest_dsv41.archive.store import Head, archive_append, archive_rows
from pytest_dsv41.durable import read_json_lines
from pytest_dsv41.text import one_line

__all__ = [
    "CONTROL_ROLES",
    "Backfill",
    "backfill",
    "clock_caps_mhz",
    "control_rows",
    "parse_utc",
    "production_commit",
    "read_values",
    "recorded_clocks",
    "role_of",
    "rows_of",
    "start_clock_cap",
    "unfinished_starts",
    "window_date",
    "window_folders",
    "window_id",
]

Folder = str | os.PathLike[str]

CONTROL_ROLES = frozenset({"control", "k", "off", "h"})
"""Roles that are controls, in lower case (WIN2 "Window re-scoring"); every other is its own arm."""

HOSTS = 2
"""How many hosts a start log must prove the clock cap of."""

_WINDOW_FILES = ("summary.json", "plan.json", "values.jsonl", "rollback.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CAP_LINE = re.compile(r"(?<!\S)([A-Za-z0-9][A-Za-z0-9._-]*) clock cap ([0-9]{1,6}) MHz\b")
_UTC = re.compile(
    r"(?<![0-9])([0-9]{4})-?([0-9]{2})-?([0-9]{2})"
    r"(?:[T ]([0-9]{2}):?([0-9]{2})(?::?([0-9]{2})(?:\.[0-9]+)?)?)"
    r"(?:Z|\+00:?00| ?UTC)(?![0-9A-Za-z])"
)
_MHZ = re.compile(r"(?<![0-9.])([0-9]{2,6})(?: ?MHz)?(?![0-9.:])")


def parse_utc(text: str) -> datetime | None:
    """Return the last UTC timestamp in `text`, or None.

    Valid forms: 2026-10-27T18:13:14Z, 2026-10-27 18:13 UTC, 20261027T181314Z, and +00:00 for Z.
    """
    found = None
    for match in _UTC.finditer(text):
        year, month, day, hour, minute = (int(part) for part in match.groups()[:5])
        try:
            found = datetime(year, month, day, hour, minute, int(match[6] or 0), tzinfo=UTC)
        except ValueError:
            continue
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _block(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    block = value.get(name)
    return block if isinstance(block, dict) else {}


def window_id(out: Folder) -> str:
    """Return the window's id: the summary's or plan's, else the folder's name."""
    folder = Path(out)
    summary, plan = _json(folder / "summary.json"), _json(folder / "plan.json")
    for value in (
        _block(summary, "window").get("id"),
        summary.get("window"),
        plan.get("window_id"),
    ):
        if isinstance(value, str) and value:
            return value
    return folder.resolve().name


def window_date(out: Folder) -> str:
    """Return the window's UTC day as YYYYMMDD: ours recorded it, else of its id or first time.

    Raises:
        HistoryUnknown: nothing in the folder is dated.
    """
    folder = Path(out)
    summary = _json(folder / "summary.json")
    recorded = _json(folder / "target.json").get("date")
    for text in (recorded, window_id(folder), folder.resolve().name, summary.get("started_utc")):
        if isinstance(text, str):
            if re.fullmatch(r"[0-9]{8}", text):
                return text
            when = parse_utc(text)
            if when is not None:
                return f"{when:%Y%m%d}"
    times = [span[0] for span in _item_spans(folder, None)]
    if times:
        return f"{min(times):%Y%m%d}"
    raise HistoryUnknown(f"{folder}: nothing dates this window (id, summary or values)")


def production_commit(out: Folder) -> str:
    """Return the commit of production in this window, 40 hex digits; never the experiment's.

    The summary's `production_commit`, then its `production`, then rollback.json's
    `production_commit` or `commit`; ours: then target.json's `commit`.

    Raises:
        HistoryUnknown: none of them holds a commit.
    """
    folder = Path(out)
    summary = _json(folder / "summary.json")
    rollback = _json(folder / "rollback.json")
    production = summary.get("production")
    named = production.get("commit") if isinstance(production, dict) else production
    for value in (
        summary.get("production_commit"),
        named,
        rollback.get("production_commit"),
        rollback.get("commit"),
        _json(folder / "target.json").get("commit"),
    ):
        if isinstance(value, str) and _COMMIT.fullmatch(value):
            return value
    raise HistoryUnknown(
        f"{folder}: no production commit of 40 hex digits in summary.json (production_commit, "
        "production) or rollback.json (production_commit, commit)"
    )


def read_values(out: Folder) -> list[dict[str, Any]]:
    """Return the measured lines of values.jsonl, the last one of an item.

    Raises:
        HistoryUnknown: a line's start, cell or repeat is a list or an object.
    """
    by_item: dict[tuple[Any, ...], dict[str, Any]] = {}
    path = Path(out) / "values.jsonl"
    for line in read_json_lines(path):
        if line.get("outcome", "measured") == "measured" and isinstance(line.get("values"), dict):
            for name in ("start", "cell", "repeat"):
                if isinstance(line.get(name), dict | list):
                    raise HistoryUnknown(
                        f"{path}: {name}: must be a name or a number, got "
                        f"{one_line(repr(line[name]), 80)}"
                    )
            by_item[(line.get("start"), line.get("cell"), line.get("repeat"))] = line
    return list(by_item.values())


def role_of(out: Folder, arm: str) -> str:
    """Return an arm's role, `control` for every role that is a control."""
    folder = Path(out)
    role: Any = arm
    plan = _block(_json(folder / "plan.json"), "spec")
    for source in (plan, _json(folder / "summary.json")):
        arms = source.get("arms")
        if isinstance(arms, dict):
            arms = [{"name": name, **body} for name, body in arms.items() if isinstance(body, dict)]
        for entry in arms if isinstance(arms, list) else ():
            if isinstance(entry, dict) and entry.get("name") == arm:
                role = entry.get("role", arm)
                break
        else:
            continue
        break
    return "control" if str(role).lower() in CONTROL_ROLES else str(role)


# -- the clock cap ---------------------------------------------------------------------------------


def _start_log(folder: Path, start: str) -> Path | None:
    """Return the start's log; of several the last, which is the start that was measured."""
    pattern = re.compile(rf"[0-9]+-{re.escape(start)}-start\.log")
    logs = [file for file in (folder / "cmd").glob("*-start.log") if pattern.fullmatch(file.name)]
    return max(logs, key=lambda file: int(file.name.partition("-")[0]), default=None)


def _logged_caps(log: Path) -> dict[str, set[int]]:
    caps: dict[str, set[int]] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _CAP_LINE.search(line)
        if match:
            caps.setdefault(match[1], set()).add(int(match[2]))
    return caps


@dataclass(frozen=True)
class _Change:
    at: datetime
    cap: int


def _clock_log(path: Path) -> list[_Change]:
    """Return the changes of a clock log: lines with a UTC timestamp, then a number of MHz."""
    changes = []
    # What is no UTF-8 is named as a line that is no entry, with its number.
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        stamp = _UTC.search(line)
        cap = _MHZ.search(line, stamp.end()) if stamp else None
        when = parse_utc(stamp[0]) if stamp else None
        if when is None or cap is None:
            raise HistoryUnknown(
                f"{path}: line {number}: {one_line(line, 80)!r} is not '<UTC> <MHz>'"
            )
        changes.append(_Change(when, int(cap[1])))
    return sorted(changes, key=lambda change: change.at)


def _item_spans(folder: Path, start: str | None) -> Iterator[tuple[datetime, datetime]]:
    """Yield when each item ran: its checkpoint times."""
    for line in read_json_lines(folder / "values.jsonl"):
        if start is not None and line.get("start") != start:
            continue
        began = parse_utc(str(line.get("started_utc", "")))
        if began is not None:
            seconds = line.get("duration_s")
            took = seconds if isinstance(seconds, int | float) and 0 <= seconds < 1e7 else 0
            yield began, began + timedelta(seconds=took)


def _span(folder: Path, start: str) -> tuple[datetime, datetime] | None:
    spans = list(_item_spans(folder, start))
    for entry in _json(folder / "summary.json").get("starts") or ():
        if isinstance(entry, dict) and entry.get("name") == start:
            for name in ("started_utc", "ended_utc"):
                when = parse_utc(str(entry.get(name) or ""))
                if when is not None:
                    spans.append((when, when))
    if not spans:
        return None
    return min(span[0] for span in spans), max(span[1] for span in spans)


def start_clock_cap(
    out: Folder, start: str, *, clock_log: Folder | None = None, hosts: int = HOSTS
) -> tuple[int, str]:
    """Return a start's clock cap in MHz and its source: `start-log`, `clock-log` or `none`.

    The start's own log proves it: every one of the `hosts` hosts must have printed its cap, and
    they must agree. Ours: what the journal recorded when the start was up; a target without
    clocks recorded `none`, the cap is 1.
    A start without a log is placed by its checkpoint times in the clock log, a file of
    '<UTC> <MHz>' lines, each valid from its time on.

    Raises:
        HistoryUnknown: the log does not prove one cap, or the start straddles a change.
    """
    folder = Path(out)
    recorded = recorded_clocks(read_json_lines(folder / "journal.jsonl"))
    if start in recorded:
        return recorded[start]
    log = _start_log(folder, start)
    if log is not None:
        caps = _logged_caps(log)
        shown = ", ".join(
            f"{host} {'/'.join(map(str, sorted(values)))}" for host, values in sorted(caps.items())
        )
        if len(caps) != hosts:
            raise HistoryUnknown(
                f"{log}: {len(caps)} of {hosts} hosts proved a clock cap ({shown or 'none'}); "
                "the start is refused"
            )
        every = set().union(*caps.values())
        if len(every) != 1:
            raise HistoryUnknown(f"{log}: the clock caps differ ({shown}); the start is refused")
        return every.pop(), "start-log"
    if clock_log is None:
        raise HistoryUnknown(f"{folder}: {start} has no start log, and no clock log was given")
    span = _span(folder, start)
    if span is None:
        raise HistoryUnknown(f"{folder}: {start} has neither a start log nor checkpoint times")
    changes = _clock_log(Path(clock_log))
    before = [change for change in changes if change.at <= span[0]]
    if not before:
        raise HistoryUnknown(f"{clock_log}: begins after {start} of {folder} ({span[0]:%FT%TZ})")
    cap = before[-1].cap
    for change in changes:
        if span[0] < change.at <= span[1] and change.cap != cap:
            raise HistoryUnknown(
                f"{folder}: {start} straddles the change from {cap} to {change.cap} MHz at "
                f"{change.at:%FT%TZ}; the start is refused"
            )
    return cap, "clock-log"


def recorded_clocks(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """Return each start's clock cap in MHz and its source, as a journal of ours has them.

    A start that did not come up, or whose line lacks them, is not there.
    """
    found = {}
    for line in lines:
        kind, _, start = str(line.get("step", "")).partition(":")
        if kind == "start" and line.get("event") == "end":
            source = line.get("clock_source")
            cap = line.get("clock_cap_mhz", 1 if source == "none" else None)
            if isinstance(cap, int) and isinstance(source, str):
                found[start] = (cap, source)
    return found


def clock_caps_mhz(
    out: Folder, *, clock_log: Folder | None = None, hosts: int = HOSTS
) -> list[int] | str:
    """Return the caps of all the window's starts, ascending, or 'unknown' if one is not proved."""
    starts = {
        str(line["start"])
        for line in read_json_lines(Path(out) / "values.jsonl")
        if "start" in line
    }
    try:
        caps = {
            start_clock_cap(out, start, clock_log=clock_log, hosts=hosts)[0] for start in starts
        }
    except HistoryUnknown:
        return "unknown"
    return sorted(caps) or "unknown"


# -- backfill --------------------------------------------------------------------------------------


def window_folders(campaign: Folder) -> list[Path]:
    """Return the window folders of a campaign: its subfolders, and those that it registers."""
    root = Path(campaign)
    found = [
        file.parent for name in ("summary.json", "plan.json") for file in root.glob(f"*/{name}")
    ]
    for record in sorted((root / "windows").glob("*.json")):
        named = _json(record).get("folder")
        if isinstance(named, str) and Path(named).is_dir():
            found.append(Path(named))
    return _once(found)


def _once(folders: Iterable[Folder]) -> list[Path]:
    """Return each window once, whatever it was called, in the order it was first named."""
    by_path: dict[str, Path] = {}
    for folder in folders:
        by_path.setdefault(os.path.realpath(folder), Path(folder))
    by_id: dict[str, Path] = {}
    for folder in by_path.values():
        by_id.setdefault(window_id(folder), folder)
    return list(by_id.values())


def control_rows(
    out: Folder,
    *,
    clock_log: Folder | None = None,
    hosts: int = HOSTS,
    refused: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the archive rows of a window: every measured control repeat, every metric.

    Of a window of ours that was stopped only the starts that finished. A start whose clock cap is
    not proved is left out and its reason added to `refused`; without that list it raises.

    Raises:
        HistoryUnknown: the folder does not prove its commit, its date, or a start's clock cap.
    """
    folder = Path(out)
    if not folder.is_dir():
        raise HistoryUnknown(f"{folder}: there is no such window folder")
    if not any((folder / name).exists() for name in _WINDOW_FILES):
        # Its 0 rows would look as if a window had been read.
        raise HistoryUnknown(
            f"{folder}: is no window's folder: it has none of {', '.join(_WINDOW_FILES)}"
        )
    kind = _block(_json(folder / "plan.json"), "spec").get("kind") or _block(
        _json(folder / "summary.json"), "window"
    ).get("kind")
    if kind == "admission":
        return []
    values = read_values(folder)
    roles = {arm: role_of(folder, arm) for arm in {str(line.get("arm")) for line in values}}
    lost: set[str] = set()
    summary = _json(folder / "summary.json")
    if not summary or summary.get("stopped"):
        told, journal = (
            read_json_lines(folder / name) for name in ("values.jsonl", "journal.jsonl")
        )
        lost = unfinished_starts(_json(folder / "plan.json"), told, journal)
    values = [
        line
        for line in values
        if roles[str(line.get("arm"))] == "control" and line.get("start") not in lost
    ]
    if not values:
        return []
    clocks = {}
    for start in dict.fromkeys(str(line.get("start")) for line in values):
        try:
            clocks[start] = start_clock_cap(folder, start, clock_log=clock_log, hosts=hosts)
        except HistoryUnknown as error:
            if refused is None:
                raise
            refused.append(str(error))
    return rows_of(
        values,
        window=window_id(folder),
        commit=production_commit(folder),
        date=window_date(folder),
        clocks=clocks,
    )


def unfinished_starts(
    plan: Mapping[str, Any], values: Iterable[Mapping[str, Any]], journal: Iterable[Any]
) -> set[str]:
    """Return the starts in which a stop came before their last item (WIN2, adoption step 4).

    Args:
        plan: what plan.json holds; a folder without one proves nothing, no start is named.
        values: the lines of values.jsonl, whatever their outcome.
        journal: the lines of journal.jsonl; a start that was ended in its turn has finished.
    """
    items = plan.get("items")
    told = {str(line.get("item")) for line in values}
    ended = {
        str(line.get("step")).partition(":")[2]
        for line in journal
        if str(line.get("step")).startswith("stop:") and line.get("event") == "begin"
    }
    return {
        str(item["start"])
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and "start" in item and str(item.get("id")) not in told
    } - ended


def rows_of(
    values: Iterable[Mapping[str, Any]],
    *,
    window: str,
    commit: str,
    date: str,
    clocks: Mapping[str, tuple[int, str]],
) -> list[dict[str, Any]]:
    """Return the archive rows of measured control lines of values.jsonl, every metric of each.

    `clocks` gives each start's clock cap (MHz) and its source; a start that is not there has none
    that is proved, and is left out.
    """
    rows = []
    for line in values:
        start = str(line.get("start"))
        if start not in clocks:
            continue
        for metric, measured in sorted(line["values"].items()):
            row = {
                "window": window,
                "cell": line.get("cell"),
                "metric": metric,
                "value": measured.get("value") if isinstance(measured, dict) else measured,
                "max_tokens": line.get("max_tokens"),
                "commit": commit,
                "clock_cap_mhz": clocks[start][0],
                "clock_source": clocks[start][1],
                "date": date,
                "start": start,
                "repeat": line.get("repeat"),
                "prompt_sha256": line.get("prompt_sha256"),
            }
            if line.get("prompt_members"):
                row["prompt_members"] = line["prompt_members"]
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Backfill:
    """What a backfill did: per window the rows it found and the rows that were new."""

    archive: Path
    head: Head
    windows: tuple[tuple[str, int, int], ...]
    refused: tuple[str, ...]


def backfill(
    archive: Folder,
    folders: Iterable[Folder],
    *,
    clock_log: Folder | None = None,
    hosts: int = HOSTS,
    checkpoints: Iterable[Head] = (),
) -> Backfill:
    """Append the control rows of window folders; idempotent, each window read once.

    A window is one append: all of its rows or none. Rows that are there already, equal but for
    optional fields that the folder does not tell, are left as they are. `checkpoints` as for
    `archive_append`.

    Raises:
        RolledBack: the archive lacks rows of a checkpoint.
        KeyConflict: the archive has one of the rows with other contents.
        HistoryUnknown: a folder does not prove its commit or date.
        RowRefused: a folder's value breaks a rule of the archive; it is named.
    """
    done = []
    refused: list[str] = []
    head = archive_append(archive, [], checkpoints=checkpoints)
    for folder in _once(folders):
        rows = control_rows(folder, clock_log=clock_log, hosts=hosts, refused=refused)
        before = head.rows
        try:
            head = archive_append(archive, _unless_known(archive, rows))
        except RowRefused as error:
            raise RowRefused(f"{folder}: {error}") from None
        done.append((window_id(folder), len(rows), head.rows - before))
    return Backfill(Path(archive), head, tuple(done), tuple(refused))


def _unless_known(archive: Folder, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Complete rows by the optional fields with which they already stand in the archive."""
    if not rows:
        return rows
    known = {
        (row["cell"], row["metric"], row["start"], row["repeat"]): row
        for row in archive_rows(archive, {"window": rows[0]["window"]})
    }
    completed = []
    for row in rows:
        there = known.get((row["cell"], row["metric"], row["start"], row["repeat"]), {})
        if all(
            there.get(field) == value for field, value in row.items() if field != "clock_source"
        ):
            completed.append(there)
        else:
            completed.append(row)
    return completed
