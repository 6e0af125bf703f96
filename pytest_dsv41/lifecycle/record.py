"""`target.json`: what another process needs to build a window's target again."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..durable import dump_json, from_record, parse_json, write_atomic
from ..engines import ENGINES
from ..errors import Dsv41Error, UsageError
from ..hosts import CommandLog
from ..targets import Target, TargetContext, load_class, load_factory
from ..text import error_line, one_line

__all__ = ["TargetRecord", "read_record", "register_window", "window_folder", "windows"]

_NAME = "target.json"


@dataclasses.dataclass(frozen=True)
class TargetRecord:
    """A target's table and context as JSON: everything but the running window's own objects."""

    window: str
    factory: str
    table: dict[str, Any]
    base: str
    campaign: str
    seed: int
    limits: dict[str, float]
    variables: dict[str, str]
    state: dict[str, Any]
    commit: str
    date: str
    """YYYYMMDD, UTC, of the day the window was opened."""
    path: tuple[str, ...] = ()
    """The import path of the process that opened the window, for targets of the user's own."""
    engines: dict[str, str] = dataclasses.field(default_factory=dict)
    """Dialects that plugins added: name to the `module:qualname` of the engine's class."""

    @property
    def close_budget_s(self) -> float:
        """Seconds that giving production back may take: every limit of the close, twice.

        The work in the restore's seam ends at its own deadline and counts once.
        """
        limits = self.limits
        known = {"stop_s": 60.0, "start_s": 600.0, "watch_s": 900.0}
        acts = sum(limits.get(name, default) for name, default in known.items())
        return 2 * acts + limits.get("seam_s", 0.0) + 60.0

    def build(
        self, folder: Path, pause: Callable[[float], None] = time.sleep, epoch: int = 0
    ) -> tuple[Target, TargetContext]:
        """Build the target for the window in `folder`; without an epoch only to look at it.

        Raises:
            UsageError: its factory cannot be imported any more, or refuses its table.
        """
        for entry in self.path:
            if entry not in sys.path:
                sys.path.append(entry)
        for name, engine in self.engines.items():
            if name not in ENGINES:
                ENGINES[name] = load_class(engine)()
        context = TargetContext(
            window_id=self.window,
            folder=folder,
            campaign=Path(self.campaign),
            base=Path(self.base),
            seed=self.seed,
            limits=self.limits,
            state=self.state,
            variables=self.variables,
            log=CommandLog(folder / "cmd"),
            pause=pause,
            epoch=epoch,
        )
        factory = load_factory(self.factory)
        try:
            return factory(self.table, context), context
        except Dsv41Error:
            raise
        except Exception as error:  # a factory of the user's own
            why = error_line(error)
            raise UsageError(f"target factory {one_line(self.factory)}: {why}") from error

    def write(self, folder: Path) -> None:
        """Write `target.json`."""
        record = {"schema": "dsv41-target-v1", **dataclasses.asdict(self)}
        write_atomic(folder / _NAME, dump_json(record) + "\n")


def read_record(folder: Path) -> TargetRecord:
    """Read the folder's `target.json`.

    Raises:
        UsageError: it is missing or damaged.
    """
    path = folder / _NAME
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        record.pop("schema")
        return from_record(TargetRecord, record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error_line(error)
        raise UsageError(f"{path}: not a window's target record ({why})") from error


def register_window(campaign: Path, window_id: str, folder: Path, epoch: int = 0) -> None:
    """Tell the campaign where a window's folder lies, before the window touches anything."""
    register = campaign / "windows"
    register.mkdir(exist_ok=True)
    write_atomic(
        register / f"{window_id}.json", dump_json({"folder": str(folder), "epoch": epoch}) + "\n"
    )


def window_folder(campaign: Path, window_id: str) -> Path | None:
    """Return the folder of a window of this campaign that has a journal, or None."""
    if not window_id or Path(window_id).name != window_id:
        return None
    try:
        record = parse_json((campaign / "windows" / f"{window_id}.json").read_text("utf-8"))
        folder = Path(record["folder"])
    except (OSError, ValueError, TypeError, KeyError):
        folder = campaign / window_id
    try:
        return folder if (folder / "journal.jsonl").is_file() else None
    except OSError:
        # A name or a place that no file can have, as the owner of another's HOLD may say.
        return None


def windows(campaign: Path) -> list[str]:
    """The ids of the campaign's windows, the oldest first.

    By the lease's epoch, which only grows: the clock may jump, and the newest window is the one
    whose production is looked at. Files of one epoch come in the order they were written. A window
    in the campaign's own folder is known, first, also where its registration was lost.
    """
    found = []
    for path in (campaign / "windows").glob("*.json"):
        epoch = written = 0
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            written = path.stat().st_mtime_ns
            epoch = int(parse_json(path.read_text("utf-8"))["epoch"])
        found.append((epoch, written, path.stem))
    known = {name for _, _, name in found}
    lost = [
        path.parent.name
        for path in campaign.glob("*/target.json")
        if path.parent.name not in known and _of_campaign(path, campaign)
    ]
    return [
        *sorted(name for name in lost if window_folder(campaign, name)),
        *(name for _, _, name in sorted(found)),
    ]


def _of_campaign(path: Path, campaign: Path) -> bool:
    """Whether the window of this record was opened here: a folder may be moved to anywhere."""
    try:
        return Path(read_record(path.parent).campaign).resolve() == campaign.resolve()
    except UsageError:
        return False
