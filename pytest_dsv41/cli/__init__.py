"""`dsv41 …`: what runs without pytest. Each command is a module, imported when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..errors import Dsv41Error, RefusedByWorld

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "aa-pilot": "production against itself: run, compare, accumulate",
    "ab": "compare two servers that already run: dsv41 ab URL_A URL_B",
    "archive": "the control archive: head, append, verify, query, spread, plot, migrate",
    "calib": "push a corpus through a server that records a calibration; 0 enough, 1 not",
    "chain": "windows back to back: gate, abort, placeholders, end, status",
    "compare": "set two windows side by side",
    "corpus": "cut prompts to token lengths and pin them, hold a corpus against its pins",
    "decide": "decide again from a window's folder",
    "dist-gate": "is it still the same model? probe, register a band, judge; 0 PASS, 2 LOSS",
    "experts": "which experts are kept whole, from their Grams; and into a recipe with them",
    "fleet-probe": "what a server offers beside plain text; 0 none failed, 2 one did",
    "gate": "commands between named checks, with receipts; 0 done, 1 command, 2 check failed",
    "greedy": "answers at temperature 0 of two arms: identical, near ties, or parted",
    "history": "backfill the archive from old windows, score them again",
    "init": "write a commented window and target file",
    "keeper": "",
    "kl": "KL references: record, verify, score a candidate, gate: 0 PASS, 2 FAIL",
    "knob-gate": "may a server start under the kernel's limits? 0 yes, 2 no",
    "kv": "memory laws and boot ledgers: plan a KV pool (0 fits, 2 REFUSED), compare two boots",
    "measure": "measure one request or group against a server",
    "payload": "a payload against its manifest: count, sizes, sha256; 0 verified, 2 not",
    "probe": "a server's shape, prefill, full slots, decode ladder, depth audit; 0 PASS, 2 not",
    "recover": "finish a window whose session and keeper died",
    "replay": "an item's values again from its raw record",
    "report": "make a window's junit.xml and report.html again",
    "resolution": "can this design resolve the expected gain? 0 QUEUE, 2 REFUSE",
    "schema": "print the JSON schema of a summary or a window file",
    "smoke": "does an arm come up? start, ask, stop; counted nowhere",
    "status": "the facts of a campaign, what they mean, the exact next command",
    "stub": "the embedded stub server",
    "unit": "a service under systemd: drift, why it does not run, verify, rollback a window",
    "watchdog": "one look at a campaign for a timer: alert, recover a stopped chain once",
    "window-cap": "may this lane open another window? 0 ALLOW, 2 REFUSE",
    "windows": "list the windows of a campaign",
}
"""Command to its one-line help; an empty help hides it. A command without a module is left out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    known = {
        name: text
        for name, text in COMMANDS.items()
        if importlib.util.find_spec(f"{__name__}.{_module(name)}") is not None
    }
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no ± gets \\xb1, not an error in place of the answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _Parser(
        prog="dsv41",
        description="Windows for self-hosted LLM servers. A window itself runs as: "
        "pytest --window=FILE",
    )
    parser.add_argument("--version", action="version", version=f"dsv41 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in known:
        shown = [name for name, text in known.items() if text]
        near = "".join(
            f"did you mean {name!r}?; " for name in difflib.get_close_matches(chosen, shown, 1)
        )
        parser.exit(4, f"dsv41: unknown command {chosen!r}; {near}valid: {', '.join(shown)}\n")
    for name, text in known.items():
        sub = commands.add_parser(name, help=text) if text else commands.add_parser(name)
        if name == chosen:
            module = importlib.import_module(f"{__name__}.{_module(name)}")
            sub.description = module.HELP
            module.configure(sub)
            # `alone`: this process exists for the command, which may put another in its place.
            sub.set_defaults(run=module.run, words=tuple(words), alone=argv is None)
    arguments = parser.parse_args(words)
    try:
        # Here and not in each command: none that takes a server can forget it.
        if getattr(arguments, "url", None) is not None:
            from ..engines import check_url

            check_url(arguments.url)
        if hasattr(arguments, "campaign") and any(x.startswith("DSV41_CHAIN_") for x in os.environ):
            from pathlib import Path

            from ..lifecycle.chain import refuse_overrides_over

            given = arguments.campaign
            refuse_overrides_over(None if given is None else Path(given))
        return int(arguments.run(arguments))
    except RefusedByWorld as error:
        print(f"dsv41 {chosen}: REFUSED: {error}", file=sys.stderr)
        return 13
    except BrokenPipeError:
        # The reader (head, less) has left: nothing more to say, and no traceback at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Dsv41Error, OSError, ValueError) as error:
        print(f"dsv41 {chosen}: {_line(error)}", file=sys.stderr)
        return int(getattr(arguments, "usage_code", 4))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Actions(argparse._SubParsersAction):  # type: ignore[type-arg]
    """What a list of actions says of one stands in that one's own help too."""

    def add_parser(self, name: str, **settings: Any) -> Any:
        described = {"description": settings.get("help"), "allow_abbrev": False}
        return super().add_parser(name, **{**described, **settings})


class _Parser(argparse.ArgumentParser):
    """Wrong use ends with 4 everywhere: 2 is an answer of some commands."""

    def add_subparsers(self, **settings: Any) -> Any:
        return super().add_subparsers(action=_Actions, **settings)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(4, f"{self.prog}: {message}\n")


def _module(name: str) -> str:
    return name.replace("-", "_")


def _line(error: BaseException) -> str:
    from ..text import one_line

    if isinstance(error, OSError) and error.strerror:
        # A full disk names no file: whoever wrote has noted what was lost.
        where = [str(error.filename)] if error.filename else getattr(error, "__notes__", [])
        return one_line(": ".join([*where, error.strerror]), 1000)
    return one_line(str(error) or type(error).__name__, 1000)
