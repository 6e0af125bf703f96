"""The journal: each step's intent and outcome, durable before and after the act (SAFETY)."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..durable import append_json_line, read_json_lines
from ..hosts.local import boottime
from ..text import one_line

__all__ = ["Journal", "StepHook", "utc_now"]

StepHook = Callable[[str, str], None]
"""Called with a step's name and "begin", "end" or "fail", after it was journalled."""


def utc_now() -> str:
    """The time as a label, never used to decide anything."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Journal:
    """`journal.jsonl` of one window."""

    def __init__(self, folder: Path, on_step: StepHook | None = None) -> None:
        self.path = folder / "journal.jsonl"
        self.tolerant = False
        """While a window closes, a full disk or a failing hook must not keep production down."""
        self.lost: list[str] = []
        self._on_step = on_step

    def note(self, step: str, event: str, **detail: Any) -> None:
        """Append one line and tell the hook."""
        line = {"step": step, "event": event, "utc": utc_now(), "boottime": boottime(), **detail}
        try:
            append_json_line(self.path, line)
            if self._on_step is not None:
                self._on_step(step, event)
        except Exception as error:
            if not self.tolerant:
                raise
            self.lost.append(one_line(f"{step} {event}: {error}"))

    @contextlib.contextmanager
    def step(self, name: str, **detail: Any) -> Iterator[dict[str, Any]]:
        """Journal `name` around an act; what the body puts into the dict stands in the end line."""
        result: dict[str, Any] = {}
        begun = boottime()
        self.note(name, "begin", **detail)
        try:
            yield result
        except BaseException as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            self.note(name, "fail", seconds=boottime() - begun, reason=reason)
            raise
        self.note(name, "end", seconds=boottime() - begun, **result)

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line so far."""
        return read_json_lines(self.path)

    def mode(self) -> str:
        """How the window found production: `single` (serving), `chained` (down), or `abort`."""
        return str(self._window().get("mode", "single"))

    def chain(self) -> str:
        """The owner of the chain that the window was opened in, or has begun itself; or nothing."""
        named = self.chains()
        return named[-1] if named else ""

    def chains(self) -> list[str]:
        """Every chain's owner that it names, the newest last."""
        return [str(line["chain"]) for line in self.lines() if line.get("chain")]

    def _window(self) -> dict[str, Any]:
        return next((line for line in self.lines() if line.get("step") == "window"), {})

    def took_down(self) -> bool:
        """Whether production is down by this window: stopped by it, or taken over from a chain."""
        return bool(self.begun("production-stop") or self.begun("snapshot"))

    def left_down(self) -> bool:
        """Whether the window took production down and no close of it has come to its end."""
        return self.took_down() and not self.begun("intent-clear") and not self.handed_over()

    def handed_over(self) -> bool:
        """Whether a chained end left production to the chain's next window."""
        ends = [line.get("step") for line in self.lines() if line.get("event") == "end"]
        return (
            "marker" in ends
            and "hold-close" in ends[ends.index("marker") :]
            and ("restore-start" not in ends)
        )

    def begun(self, prefix: str) -> list[str]:
        """The names of the steps with this prefix that were begun, in order."""
        return [
            line["step"]
            for line in self.lines()
            if line.get("event") == "begin" and str(line.get("step", "")).startswith(prefix)
        ]

    def ended(self, step: str) -> dict[str, Any]:
        """The newest end line of a step, empty when it never ended well."""
        return next(
            (
                line
                for line in reversed(self.lines())
                if (line.get("step"), line.get("event")) == (step, "end")
            ),
            {},
        )
