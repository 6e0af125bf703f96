"""The two-window cap: from a lane's third counted window on, a new hypothesis is needed.

Counted are the lane's windows since adoption that ended COMPLETE (not of kind admission),
INCONCLUSIVE, NOT A CANDIDATE or CANDIDATE. A window that stopped (INCOMPLETE, REFUSED), an
admission window and a smoke start do not count (WIN2 "Process rules as code" item 2).

With two or more counted windows one of these, dated after the end of the latest of them, allows
the next: `experiments/<LANE>/hypothesis-<n>.md` with a UTC timestamp in its first lines; a line
`HYPOTHESIS <LANE> … <UTC>` or `WINDOW-CAP OVERRIDE <LANE> <UTC>` in LANES.md.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.errors import ArchiveError
from pytest_dsv41.archive.history import parse_utc, read_values, role_of, window_folders, window_id
from pytest_dsv41.text import one_line

__all__ = ["CAP", "CapAnswer", "Reason", "SeenWindow", "window_cap"]

CAP = 2
"""So many counted windows a lane may have before it needs a new hypothesis."""

COUNTED = frozenset({"COMPLETE", "INCONCLUSIVE", "NOT A CANDIDATE", "CANDIDATE"})
NEVER_COUNTED = frozenset({"admission", "smoke"})

_FIRST_LINES = 10
_LANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HYPOTHESIS_FILE = re.compile(r"hypothesis-[0-9]+\.md")
_DECORATION = re.compile(r"^[\s>*+`_#|-]*|[`*|]")
_READ_LIMIT = 16 << 20
# The time in a window's or chain's id is that one's and no date of the text that names it.
_ID = re.compile(r"[\w.-]*[\w.]-[0-9]{8}T[0-9]{6}Z")
_DAY_FIRST = re.compile(r"[0-9]{4}-?[0-9]{2}-?[0-9]{2}[T ]")


@dataclass(frozen=True)
class SeenWindow:
    """A window of the lane and why it counts or not; times are UTC."""

    window: str
    status: str
    kind: str
    ended_utc: str | None
    counts: bool
    why: str


@dataclass(frozen=True)
class Reason:
    """A hypothesis or an override: where it stands, and its date."""

    kind: str
    source: str
    dated_utc: str
    satisfies: bool


@dataclass(frozen=True)
class CapAnswer:
    """The cap's answer.

    Attributes:
        allow: whether the lane may open another window.
        in_force_since: the adoption, or None where the cap is not in force.
        reason: one line: why.
        windows: every window of the lane since adoption, oldest first.
        reasons: every hypothesis and override found for the lane.
        peeked: INCOMPLETE windows in which both arms of a decision cell were measured; they do
            not count, but whoever looked at their values has seen a result.
        needed: what would allow the next window; empty if it is allowed.
    """

    lane: str
    allow: bool
    in_force_since: str | None
    reason: str
    windows: tuple[SeenWindow, ...]
    reasons: tuple[Reason, ...]
    peeked: tuple[str, ...]
    needed: tuple[str, ...]

    @property
    def counted(self) -> tuple[SeenWindow, ...]:
        """The windows that count."""
        return tuple(window for window in self.windows if window.counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON."""
        return {"answer": "ALLOW" if self.allow else "REFUSE", **asdict(self)}


@dataclass(frozen=True)
class _Window:
    seen: SeenWindow
    began: datetime
    ended: datetime
    folder: Path


def _utc(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _day_or_utc(text: str, where: str) -> datetime:
    """Return a UTC timestamp, or the first moment of a UTC day."""
    when = parse_utc(text)
    if when is None and re.fullmatch(r"[0-9]{4}-?[0-9]{2}-?[0-9]{2}", text.strip()):
        day = text.strip().replace("-", "")
        when = parse_utc(f"{day}T000000Z")
    if when is None:
        raise ArchiveError(
            f"{where}: {one_line(repr(text), 60)} is no UTC date; valid: 2026-10-26 or "
            "2026-10-26T00:00:00Z"
        )
    return when


def _adoption(campaign: Path, since: str | None) -> datetime | None:
    if since is not None:
        return _day_or_utc(since, "since")
    path = campaign / "WINDOW-CAP.json"
    if path.exists() and not path.is_file():
        raise ArchiveError(f"{path}: is no regular file")
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        value = None
    adopted = value.get("adopted_utc") if isinstance(value, dict) else None
    if not isinstance(adopted, str):
        raise ArchiveError(f'{path}: is not {{"adopted_utc": "<UTC>"}}')
    return _day_or_utc(adopted, f"{path}: adopted_utc")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _windows(campaign: Path, lane: str, prefix: str | None) -> Iterator[_Window]:
    for folder in window_folders(campaign):
        path = folder / "summary.json"
        try:
            summary = json.loads(path.read_bytes())
        except FileNotFoundError:
            # Running, killed, or no window. Nothing of it can be counted.
            continue
        except (OSError, ValueError, RecursionError):
            summary = None
        if not isinstance(summary, dict):
            if _told_of(folder, lane, prefix):
                raise ArchiveError(
                    f"{path}: damaged, whether this window counts cannot be told; bring the file "
                    "back from a copy"
                )
            continue
        block = summary.get("window")
        window = block if isinstance(block, dict) else {}
        name = _text(window.get("id")) or _text(block) or folder.resolve().name
        of_lane = _text(window.get("lane")) or _text(summary.get("lane"))
        if prefix is not None:
            if not name.startswith(prefix):
                continue
        elif of_lane:
            if of_lane != lane:
                continue
        elif not name.startswith(f"{lane}-"):
            continue
        began = parse_utc(_text(summary.get("started_utc"))) or parse_utc(name)
        ended = parse_utc(_text(summary.get("ended_utc"))) or began
        if began is None or ended is None:
            raise ArchiveError(
                f"{folder / 'summary.json'}: neither the id nor started_utc dates this window"
            )
        status = _text(summary.get("status"))
        kind = _text(window.get("kind")) or _text(summary.get("kind"))
        counts, why = _counts(status, kind, name)
        seen = SeenWindow(name, status or "none", kind or "none", _utc(ended), counts, why)
        yield _Window(seen, began, ended, folder)


def _told_of(folder: Path, lane: str, prefix: str | None) -> bool:
    """Whether a window is the lane's (or the prefix's) by what its folder has beside a summary."""
    name = window_id(folder)
    if prefix is not None:
        return name.startswith(prefix)
    try:
        of_lane = json.loads((folder / "plan.json").read_bytes())["spec"]["lane"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return name.startswith(f"{lane}-")
    return bool(of_lane == lane)


def _counts(status: str, kind: str, name: str) -> tuple[bool, str]:
    # An old summary has no kind: then its name tells.
    words = {kind.lower()} if kind else set(re.split(r"[-_.]", name.lower()))
    kinds = words & NEVER_COUNTED
    if kinds:
        return False, f"{min(kinds)} windows never count"
    if status not in COUNTED:
        return False, "stopped" if status in ("INCOMPLETE", "REFUSED") else "not ended"
    return True, "counts"


def _date_of(text: str) -> datetime | None:
    """Return when a hypothesis or an override says that it was written."""
    return parse_utc(_ID.sub("", text))


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():
        # Whoever opens a pipe waits for its other end.
        raise ArchiveError(f"{path}: is no regular file")
    with path.open("rb") as file:
        raw = file.read(_READ_LIMIT)
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ArchiveError(f"{path}: is UTF-16, its lines cannot be read; save it as UTF-8")
    # An editor's byte order mark is no part of the first line.
    return raw.decode("utf-8-sig", "replace")


def _hypothesis_files(root: Path, lane: str) -> Iterator[tuple[str, str, datetime]]:
    folder = root / lane
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not _HYPOTHESIS_FILE.fullmatch(path.name) or not path.is_file():
            continue
        for line in _read_text(path).splitlines()[:_FIRST_LINES]:
            when = _date_of(line)
            if when is not None:
                yield "hypothesis file", str(path), when
                break


def _register_lines(path: Path, lane: str) -> Iterator[tuple[str, str, datetime]]:
    try:
        text = _read_text(path)
    except FileNotFoundError:
        return
    forms = (
        ("register line", re.compile(rf"HYPOTHESIS\s+{re.escape(lane)}(?![\w.-])")),
        ("override", re.compile(rf"WINDOW-CAP OVERRIDE\s+{re.escape(lane)}(?![\w.-])")),
    )
    for number, raw in enumerate(text.splitlines(), start=1):
        # Markdown around the line (a bullet, bold, a code span, a table) does not matter.
        line = _DECORATION.sub("", raw).strip() if lane in raw else ""
        for kind, form in forms:
            match = form.match(line)
            if match is None:
                continue
            rest = line[match.end() :].lstrip(" :,")
            if kind == "override" and not _DAY_FIRST.match(rest):
                # Its form has no text before the time: a sentence about an override is none.
                continue
            when = _date_of(rest)
            if when is not None:
                yield kind, f"{path}:{number}", when


def _both_arms(window: _Window) -> list[str]:
    """Return the decision cells of a window of which both arms were measured."""
    summary = json.loads((window.folder / "summary.json").read_bytes())
    cells = summary.get("decision_cells")
    if not isinstance(cells, list):
        decision = summary.get("decision")
        cells = decision.get("decision_cells") if isinstance(decision, Mapping) else None
    measured: dict[str, set[bool]] = {}
    values = read_values(window.folder)
    arms = {str(line.get("arm")) for line in values}
    controls = {arm for arm in arms if role_of(window.folder, arm) == "control"}
    for line in values:
        control = str(line.get("arm")) in controls
        measured.setdefault(str(line.get("cell")), set()).add(control)
    named: Sequence[Any] = cells if isinstance(cells, list) else list(measured)
    return [str(cell) for cell in named if len(measured.get(str(cell), ())) == 2]


def window_cap(
    lane: str,
    campaign: str | os.PathLike[str],
    *,
    since: str | None = None,
    prefix: str | None = None,
    experiments: Iterable[str | os.PathLike[str]] = (),
    lanes: Iterable[str | os.PathLike[str]] = (),
) -> CapAnswer:
    """Say whether `lane` may open another window.

    Args:
        lane: the lane's name; its windows carry it in their summary, older ones in their name.
        campaign: the folder of the windows; WINDOW-CAP.json, experiments/ and LANES.md are looked
            for in it too.
        since: the adoption, a UTC date or time, instead of WINDOW-CAP.json.
        prefix: count the windows whose names begin with it instead of the lane's.
        experiments: folders that hold <LANE>/hypothesis-<n>.md.
        lanes: LANES.md files.

    Raises:
        ArchiveError: no such campaign, no lane's name, a bad date, a window that nothing dates, or
            a file that cannot be read.
    """
    if not _LANE.fullmatch(lane):
        # An empty name (an unset variable of a script) would find no window, and allow.
        raise ArchiveError(
            f"lane: {one_line(repr(lane), 80)} is no lane's name; valid: 1 to 64 of "
            "A-Z a-z 0-9 . _ -, the first one a letter or a digit"
        )
    root = Path(campaign)
    if not root.is_dir():
        raise ArchiveError(f"{root}: there is no such campaign folder")
    adopted = _adoption(root, since)
    if adopted is None:
        return CapAnswer(
            lane,
            True,
            None,
            f"the cap is not in force: no WINDOW-CAP.json in {root}",
            (),
            (),
            (),
            (),
        )
    windows = sorted(
        (window for window in _windows(root, lane, prefix) if window.began >= adopted),
        key=lambda window: (window.ended, window.seen.window),
    )
    counted = [window for window in windows if window.seen.counts]
    latest = max((window.ended for window in counted), default=None)
    found = [
        *(
            reason
            for folder in _unique((root / "experiments", *experiments))
            for reason in _hypothesis_files(folder, lane)
        ),
        *(
            reason
            for path in _unique((root / "LANES.md", *lanes))
            for reason in _register_lines(path, lane)
        ),
    ]
    reasons = tuple(
        Reason(kind, source, _utc(when), latest is not None and when > latest)
        for kind, source, when in sorted(found, key=lambda reason: reason[2])
    )
    peeked = tuple(
        f"{window.seen.window}: {', '.join(cells)}"
        for window in windows
        if window.seen.status == "INCOMPLETE" and (cells := _both_arms(window))
    )
    since_text = _utc(adopted)
    told = f"{len(counted)} counted window(s) of {lane} since {since_text}"
    needed: tuple[str, ...] = ()
    if len(counted) < CAP:
        allow, reason = True, f"{told}, {CAP} are free"
    else:
        newest = counted[-1]
        good = [one for one in reasons if one.satisfies]
        allow = bool(good)
        if allow:
            reason = f"{told}; {good[-1].kind} {good[-1].source} of {good[-1].dated_utc}"
        else:
            reason = f"{told}; nothing new since {newest.seen.window} ended {_utc(newest.ended)}"
            after = f"dated after {_utc(newest.ended)}"
            needed = (
                f"{root / 'experiments' / lane}/hypothesis-<n>.md with a UTC timestamp in its "
                f"first {_FIRST_LINES} lines, {after}",
                f"a line in {root / 'LANES.md'}: HYPOTHESIS {lane} <text> <UTC>, {after}",
                f"a line in {root / 'LANES.md'}: WINDOW-CAP OVERRIDE {lane} <UTC>, {after}",
            )
    return CapAnswer(
        lane,
        allow,
        since_text,
        reason,
        tuple(window.seen for window in windows),
        reasons,
        peeked,
        needed,
    )


def _unique(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    by_path: dict[str, Path] = {}
    for path in paths:
        by_path.setdefault(os.path.realpath(path), Path(path))
    return list(by_path.values())
