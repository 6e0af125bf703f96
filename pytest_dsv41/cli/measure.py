"""`dsv41 measure URL`: one request or one group, measured and judged exactly as a cell does it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..measure import GroupResult, Reader, Request

_PLAIN_S = 5.0

HELP = "Measure one request or group against a running server; exit 0 with values, 1 without."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    parser.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text; - for stdin")
    source.add_argument("--messages", type=Path, metavar="FILE", help="chat messages, JSON")
    source.add_argument(
        "--prompt", default="short", metavar="NAME", help="a prompt of a corpus (default: short)"
    )
    parser.add_argument("--chat", action="store_true", help="over /v1/chat/completions")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="a request's (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help="of the sampling; N + 1 for a group's second request, and so on (default: none)",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly N tokens (default)",
    )
    parser.add_argument(
        "--cache",
        choices=("cold", "warm", "any"),
        default="cold",
        help="what the prompt cache must have done (default: cold)",
    )
    parser.add_argument("--salt", default=None, help="cache salt of warm requests")
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="B", help="requests at once (default: 1)"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="one after the other (default: 1)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="per repeat: above 0 to 1e9 (default: 600)",
    )
    parser.add_argument(
        "--reader",
        choices=("thread", "process"),
        default="thread",
        help="process: read the streams in one of its own, which nothing here can hold up "
        "(default: thread)",
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep raw records here")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Measure; print the values, or the reason why there are none."""
    from ..errors import MeasurementFailed, MeasurementRefused, UsageError
    from ..measure.group import refuse_too_many

    for name, low in (("max_tokens", 1), ("concurrency", 1), ("repeats", 1)):
        if getattr(args, name) < low:
            raise UsageError(f"--{name.replace('_', '-')}: at least {low}")
    if not 0 < args.deadline <= 1e9:
        raise UsageError(f"--deadline {args.deadline}: valid: above 0 to 1e9 seconds")
    refuse_too_many(args.concurrency)
    requests = _requests(args)
    if args.record is not None:
        _take_place(args.record)
    rows: list[dict[str, Any]] = []
    code = 0
    with stop_on_signals() as stop, _reader(args.reader) as reader:
        for repeat in range(args.repeats):
            try:
                result = _measure(args, requests, repeat, stop, reader)
            except (MeasurementFailed, MeasurementRefused) as error:
                outcome = "failed" if isinstance(error, MeasurementFailed) else "refused"
                rows.append({"outcome": outcome, "kind": error.kind, "reason": str(error)})
                code = 1
                if error.kind == "stopped":
                    break
                continue
            rows.append({"outcome": "measured", **result.to_json()})
    if args.json:
        print(json.dumps({"url": args.url, "engine": args.engine, "repeats": rows}, indent=1))
    else:
        _show(rows)
    return code


def _requests(args: argparse.Namespace) -> tuple[Request, ...]:
    from ..errors import UsageError
    from ..measure import Request, Sampling
    from ..measure.corpus import find_prompt

    try:
        sampling = Sampling(
            temperature=args.temperature, ignore_eos=args.ignore_eos, cache=args.cache
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    if args.messages is not None:
        try:
            data = json.loads(args.messages.read_text(encoding="utf-8"))
            json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeError as error:
            raise UsageError(f"{args.messages}: not UTF-8: {error}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{args.messages}: not JSON: {error}") from None
        if not isinstance(data, list) or not data or not all(isinstance(r, dict) for r in data):
            raise UsageError(f"{args.messages}: not a list of messages")
        messages = tuple(data)
    elif args.prompt_file is not None:
        stdin = str(args.prompt_file) == "-"
        name = "--prompt-file -" if stdin else str(args.prompt_file)
        try:
            text = (sys.stdin.buffer.read() if stdin else args.prompt_file.read_bytes()).decode()
        except UnicodeError as error:
            raise UsageError(f"{name}: not UTF-8: {error}") from None
    else:
        text = find_prompt(args.prompt).text
    return tuple(
        Request(
            max_tokens=args.max_tokens,
            prompt=text,
            messages=messages,
            api="chat" if args.chat or messages is not None else "completions",
            sampling=sampling,
            seed=None if args.seed is None else args.seed + member,
            salt=args.salt,
        )
        for member in range(args.concurrency)
    )


def _take_place(folder: Path) -> None:
    """Make the records' folder before anything is measured; an earlier one's are kept."""
    from ..errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--record {folder}: no folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--record {folder}: cannot be written to")
    if any(folder.glob("measure-r*.jsonl")):
        raise UsageError(f"--record {folder}: holds records already; name another folder")


def _measure(
    args: argparse.Namespace,
    requests: tuple[Request, ...],
    repeat: int,
    stop: threading.Event,
    reader: Reader | None,
) -> GroupResult:
    from ..measure import Endpoint, measure_group

    endpoint = Endpoint(args.url, args.engine, args.model)
    which = f"repeat {repeat + 1} of {args.repeats}: " if args.repeats > 1 else ""
    with shown() as show:
        result = measure_group(
            endpoint,
            requests,
            deadline_s=args.deadline,
            stop=stop,
            progress=lambda now: show(f"{which}{now.text}"),
            reader=reader,
        )
    if args.record is not None:
        from ..measure.record import write_record

        write_record(
            args.record / f"measure-r{repeat}.jsonl",
            endpoint,
            result,
            caches=tuple(request.sampling.cache for request in requests),
        )
    return result


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM end the measurement at once, sockets closed, and it says so."""
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _reader(kind: str) -> Iterator[Reader | None]:
    from ..measure import Reader

    if kind == "thread":
        yield None
        return
    with Reader() as reader:
        yield reader


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Show a line on standard error: one that changes on a terminal, else one every 5 seconds."""
    live = sys.stderr.isatty()
    last = time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        if live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= _PLAIN_S:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(rows: list[dict[str, Any]]) -> None:
    from ..text import one_line

    several = len(rows) > 1
    for index, row in enumerate(rows):
        head = f"repeat {index + 1} of {len(rows)}: " if several else ""
        if row["outcome"] != "measured":
            print(f"{head}{row['outcome'].upper()} {row['kind']}: {one_line(row['reason'])}")
            continue
        if several:
            print(head.rstrip(" "))
        for name, value in row["values"].items():
            source = value["source"]
            print(f"  {name:<20}{value['value']:>14.3f} {value['unit']:<14}{source}")
        for name, reason in row["missing"].items():
            print(f"  {name:<20}{'–':>14} {reason}")
        print(f"  {_counts(row['server'])}, prompt {row['prompt_sha256'][:12]}")
        if row["notes"]:
            print(f"  notes: {', '.join(row['notes'])}")


def _counts(server: dict[str, Any]) -> str:
    """What the server counted, in words; what it does not tell is left out."""
    parts = [f"{server['tokens']} tokens"]
    if server["rounds"] is not None:
        parts.append(f"{server['rounds']} rounds")
    if server["speculates"]:
        drafted = "" if server["draft_tokens"] is None else f" of {server['draft_tokens']} drafted"
        parts.append(f"{server['accepted']} accepted{drafted}")
    if server["cached_tokens"] is not None:
        prompt = "" if server["prompt_tokens"] is None else f" of {server['prompt_tokens']}"
        parts.append(f"{server['cached_tokens']}{prompt} prompt tokens cached")
    return ", ".join(parts)
