"""The windows of a campaign, one line each, from their summaries alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import UsageError
from ..window.summary import FILE_NAME, Summary, read_summary
from .model import duration_text, seconds_between
from .terminal import print_text, safe, verdict_text

__all__ = ["Listed", "list_windows", "render_listing"]

NO_SUMMARY = "NO SUMMARY"
DAMAGED = "DAMAGED"


@dataclasses.dataclass(frozen=True)
class Listed:
    """One window's folder. `summary` is None when it has none or a damaged one; `note` says it."""

    folder: Path
    status: str
    summary: Summary | None
    note: str

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values."""
        summary = self.summary
        return {
            "folder": str(self.folder),
            "status": self.status,
            "note": self.note or None,
            "id": summary.window.id if summary else self.folder.name,
            "lane": summary.window.lane if summary else None,
            "name": summary.window.name if summary else None,
            "kind": summary.window.kind if summary else None,
            "exit_code": summary.exit_code if summary else None,
            "started_utc": summary.started_utc if summary else None,
            "ended_utc": summary.ended_utc if summary else None,
            "restore": summary.restore.status if summary else None,
            "chain": summary.chain if summary else None,
            "promotion": summary.promotion.model_dump(mode="json")
            if summary and summary.promotion
            else None,
        }


def list_windows(campaign: Path, *, lane: str | None = None) -> list[Listed]:
    """Return the windows that lie or are registered in `campaign`, of one lane or of all.

    The oldest comes first. A folder without a summary is listed if it has a plan: its window runs,
    or was killed. With a `lane` such a folder is listed when its name begins with the lane.

    Raises:
        UsageError: there is no such folder.
    """
    if not campaign.is_dir():
        raise UsageError(f"{campaign}: no such folder; name the campaign with --campaign DIR")
    found = [listed for listed in _scan(campaign) if lane is None or _lane(listed, lane)]
    return sorted(found, key=_when)


def _folders(campaign: Path) -> Iterator[Path]:
    """The folders in the campaign's, and those that its register names elsewhere."""
    yield from campaign.iterdir()
    for record in sorted((campaign / "windows").glob("*.json")):
        # A record that cannot be read names nothing; status and recover are the ones to alert.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            yield Path(json.loads(record.read_bytes())["folder"])


def _scan(campaign: Path) -> Iterator[Listed]:
    for folder in {os.path.realpath(path): path for path in _folders(campaign)}.values():
        if (folder / FILE_NAME).is_file():
            try:
                summary = read_summary(folder)
            except UsageError as error:
                yield Listed(folder, DAMAGED, None, str(error))
            else:
                yield Listed(folder, summary.status, summary, summary.stopped or "")
        elif (folder / "plan.json").is_file():
            yield Listed(folder, NO_SUMMARY, None, "still running, or killed; see dsv41 status")


def _lane(listed: Listed, lane: str) -> bool:
    if listed.summary:
        return listed.summary.window.lane == lane
    return listed.folder.name.startswith(f"{lane}-")


def _when(listed: Listed) -> tuple[str, str]:
    """Start time, else the stamp at the end of the folder's name, so both forms sort together."""
    if listed.summary and listed.summary.started_utc:
        stamp = listed.summary.started_utc
    else:
        stamp = listed.folder.name.rpartition("-W-")[2]
    return "".join(char for char in stamp if char.isdigit())[:14], listed.folder.name


def render_listing(
    windows: Sequence[Listed],
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return the list as a table, or one line when it is empty."""
    if not windows:
        return "no windows\n"
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    # An id that is folded cannot be copied: the note gives way first.
    names = [one.summary.window.id if one.summary else one.folder.name for one in windows]
    table.add_column("window", overflow="fold", min_width=min(44, max(map(len, names))))
    table.add_column("status", no_wrap=True)
    table.add_column("exit", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("restore", overflow="fold")
    table.add_column("note", overflow="fold")
    for one, name in zip(windows, names, strict=True):
        summary = one.summary
        took = seconds_between(summary.started_utc, summary.ended_utc) if summary else None
        note = one.note
        if summary and summary.promotion:
            note = f"{summary.promotion.arm} on {', '.join(summary.promotion.cells)}"
        table.add_row(
            safe(name),
            verdict_text(one.status),
            str(summary.exit_code) if summary else "–",
            duration_text(took),
            safe(summary.restore.status if summary else "–"),
            safe(note, limit=120),
        )
    columns = width or shutil.get_terminal_size((120, 24)).columns
    return print_text(table, columns, color, encoding)
