"""`dsv41 probe URL WHAT`: a server as it stands, by the probes a window runs as cells."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import counted, one_line
from .arguments import new_file, seconds

if TYPE_CHECKING:
    import threading

    from ..engines.served import Served
    from ..measure import Endpoint, GroupResult, Progress, Reader, Request
    from ..measure.probes import PromptMaker

HELP = (
    "The shape a server says it has, prefill cold, warm and cached, full slots, decode by depth, "
    "what is written at depth. Exit code: 0 PASS, 2 not, 1 nothing could be measured."
)

_BYTES_MOST = 64 << 20
_SLOTS_MOST = 1024
_WHAT = ("shape", "prefill", "capacity", "ladder", "depth-audit")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    parser.add_argument("what", choices=_WHAT, metavar="WHAT", help=", ".join(_WHAT))
    parser.add_argument("--engine", default="", help="default: as the server says")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="streams at a time (default: all slots there are)"
    )
    parser.add_argument(
        "--depth",
        action="append",
        default=[],
        metavar="TOKENS",
        help="prompt tokens, such as 3072 or 3k, or `window`; repeatable (default: window)",
    )
    parser.add_argument(
        "--tokens", type=int, default=512, metavar="N", help="a stream generates (default: 512)"
    )
    parser.add_argument("--chat", action="store_true", help="chats, thinking forbidden")
    parser.add_argument(
        "--corpus",
        choices=("varied", "repetitive"),
        default="varied",
        help="class of the text the prompts are filled with (default: varied)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a text of that class to fill with"
    )
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="LOG",
        help="the start log, for what the server does not tell",
    )
    parser.add_argument(
        "--deadline", type=seconds, default=3600.0, metavar="S", help="of all (default: an hour)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the answer there, as JSON")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


@dataclass
class _Run:
    """What a probe needs while it runs."""

    endpoint: Endpoint
    maker: PromptMaker
    shape: Served
    args: argparse.Namespace
    deadline: Callable[[], float]
    stop: threading.Event
    show: Callable[[str], None]
    reader: Reader

    def measure(self, requests: list[Request], what: str) -> GroupResult:
        """Send one group under the probe laws."""
        from ..measure import measure_group
        from ..measure.probes import obey

        def tell(now: Progress) -> None:
            self.show(f"{what}: {now.text}")

        return obey(
            measure_group(
                self.endpoint,
                requests,
                deadline_s=self.deadline(),
                stop=self.stop,
                progress=tell,
                reader=self.reader,
            )
        )

    def depths(self, tokens: int) -> list[int]:
        """Return the depths asked for, in tokens, each held against the window."""
        from ..errors import UsageError
        from ..measure.probes.shape import window_of

        window = window_of(self.shape)
        found = []
        for text in self.args.depth or ["window"]:
            depth = window - tokens if text == "window" else _tokens(text)
            if depth < 64 or depth + tokens > window:
                raise UsageError(
                    f"--depth {text}: {depth:,} prompt tokens and {tokens:,} of answer; the "
                    f"server's window is {window:,}"
                )
            found.append(depth)
        return found

    def streams(self) -> int:
        """Return how many streams at a time: as asked, else every slot."""
        from ..errors import MeasurementRefused

        asked: int | None = self.args.slots
        if asked is not None:
            return asked
        if self.shape.slots is None:
            raise MeasurementRefused("shape", "the server does not tell its slots; give --slots N")
        return self.shape.slots


def run(args: argparse.Namespace) -> int:
    """Probe, and say what was seen."""
    import time

    from ..durable import dump_json, write_atomic
    from ..engines import detect_engine
    from ..errors import MeasurementFailed, MeasurementRefused, UsageError
    from ..measure import Endpoint, Reader
    from ..measure.probes import PromptMaker, read_shape
    from ..measure.probes.laws import MIN_RATE_TOKENS
    from .measure import shown, stop_on_signals

    if args.slots is not None and not 1 <= args.slots <= _SLOTS_MOST:
        raise UsageError(f"--slots {args.slots}: valid: 1 to {_SLOTS_MOST:,}")
    if args.what == "ladder" and args.tokens < MIN_RATE_TOKENS:
        raise UsageError(f"--tokens {args.tokens}: a rate needs {MIN_RATE_TOKENS}")
    if args.tokens < 1:
        raise UsageError(f"--tokens {args.tokens}: at least 1")
    for depth in args.depth:
        if depth != "window":
            _tokens(depth)
    if args.out is not None:
        new_file(args.out, "an answer is never overwritten")
    own = _own_text(args.text)
    until = time.monotonic() + args.deadline
    with stop_on_signals() as stop, shown() as show, Reader() as reader:
        try:
            engine = args.engine or detect_engine(args.url)
            endpoint = Endpoint(args.url, engine, args.model)
            shape = read_shape(endpoint, *_of_ledger(args.ledger, engine))
            maker = PromptMaker.on(
                endpoint, api="chat" if args.chat else "completions", corpus=args.corpus, own=own
            )
            endpoint = Endpoint(args.url, engine, maker.model)
            work = _Run(
                endpoint,
                maker,
                shape,
                args,
                lambda: max(0.0, until - time.monotonic()),
                stop,
                show,
                reader,
            )
            facts, lines, code = _PROBES[args.what](work)
        except (MeasurementFailed, MeasurementRefused) as error:
            word = "FAILED" if isinstance(error, MeasurementFailed) else "REFUSED"
            print(f"dsv41 probe: {word} {error.kind}: {one_line(str(error), 500)}", file=sys.stderr)
            return 1
    facts = {
        "probe": args.what,
        "engine": engine,
        "model": maker.model,
        "api": maker.api,
        "corpus": maker.corpus,
        "shape": shape.to_json(),
        **facts,
    }
    if args.out is not None:
        write_atomic(args.out, dump_json(facts) + "\n")
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        print("\n".join(one_line(line, 400) for line in (f"shape: {shape.line}", *lines)))
    return code


def _tokens(text: str) -> int:
    from ..errors import UsageError

    digits = text.removesuffix("k").removesuffix("K")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise UsageError(f"--depth {text}: valid: a number of tokens, 3k for 3072, or window")
    return int(digits) * (1024 if digits != text else 1)


def _own_text(path: Path | None) -> str:
    from ..errors import UsageError

    if path is None:
        return ""
    from ..window.source import read_input

    try:
        return read_input(path, _BYTES_MOST).decode("utf-8-sig")
    except UnicodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from None


def _of_ledger(path: Path | None, engine: str) -> tuple[Served, ...]:
    """What a start log says of the shape."""
    if path is None:
        return ()
    from ..unit.memory import ledger_shape, parse_ledger
    from ..window.source import read_input

    ledger = parse_ledger(read_input(path, _BYTES_MOST).decode("utf-8", "replace"), engine)
    return (ledger_shape(ledger, str(path)),)


_Answer = tuple[dict[str, Any], list[str], int]


def _shape(run: _Run) -> _Answer:
    told = [f"{name}: from {source}" for name, source in run.shape.told.items()]
    return {}, told, 0


def _prefill(run: _Run) -> _Answer:
    from ..measure.probes.requests import PREFILL_TOKENS, prefill_groups

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for depth in run.depths(PREFILL_TOKENS):
        for which in ("cold", "warm", "hit"):
            name = f"{depth:,} tokens, {which}"
            run.show(f"prompts of {name}")
            groups = prefill_groups(run.maker, f"prefill-{which}", depth, salt="probe")
            for group in groups:
                result = run.measure(list(group), name)
            rate, ttft = result.values.get("prefill_tok_s"), result.values.get("ttft_ms")
            server = result.server
            rows.append(
                {
                    "depth": depth,
                    "pass": which,
                    "prompt_tokens": server.prompt_tokens,
                    "cached_tokens": server.cached_tokens,
                    "prefill_tok_s": None if rate is None else rate.value,
                    "ttft_ms": None if ttft is None else ttft.value,
                }
            )
            shown = (
                "no time: " + result.missing.get("ttft_ms", "")
                if ttft is None
                else (f"{ttft.value:,.0f} ms to the first token")
            )
            speed = "" if rate is None or which == "hit" else f", {rate.value:,.0f} tokens/s"
            lines.append(
                f"prefill {name}: {shown}{speed}, "
                f"{server.cached_tokens or 0:,} of {server.prompt_tokens or 0:,} tokens cached"
            )
    return {"rows": rows}, lines, 0


def _capacity(run: _Run) -> _Answer:
    from ..measure.probes import measure_capacity

    streams = run.streams()
    run.show(f"{streams} prompts of the whole window")
    found, _ = measure_capacity(
        run.endpoint,
        run.shape,
        streams,
        maker=run.maker,
        deadline_s=run.deadline(),
        stop=run.stop,
        progress=lambda now: run.show(f"capacity: {now.text}"),
        reader=run.reader,
    )
    lines = [
        f"stream {place}: {row['prompt']} of {row['sent']} tokens, asked {row['asked']}, answered "
        f"{row['answer'] or 'nothing'} ({row['channel']}), {row['finish']}, {row['wall_s']:.1f} s, "
        f"prefill {row['prefill_tok_s']:,.0f} tokens/s"
        for place, row in enumerate(found.rows)
    ]
    lines.append(
        f"together: {found.prompt_tokens:,} prompt tokens in {found.wall_s:.1f} s, "
        f"{found.prefill_tok_s:,.0f} tokens/s"
    )
    words = {True: "yes", False: "NO", None: "not seen"}
    lines += [f"{check.name}: {words[check.passed]}, {check.told}" for check in found.checks]
    lines.append(f"capacity-{streams}: {found.verdict}")
    return found.to_json(), lines, 0 if found.verdict == "PASS" else 2


def _ladder(run: _Run) -> _Answer:
    from ..measure.probes import rung_of
    from ..measure.probes.requests import ladder_requests
    from ..measure.probes.shape import window_of

    streams = run.streams()
    window_of(run.shape, streams=streams)
    rungs: list[dict[str, Any]] = []
    lines: list[str] = []
    for count in dict.fromkeys((1, streams)):
        for depth in run.depths(run.args.tokens):
            name = f"{counted(count, 'stream')} at {depth:,} tokens"
            run.show(f"prompts of {name}")
            sent = ladder_requests(run.maker, count, depth, run.args.tokens, salt="probe")
            rung = rung_of(run.measure(list(sent), name), depth=depth, corpus=run.maker.corpus)
            rungs.append(rung.to_json())
            each = " / ".join(f"{rate:.1f}" for rate in rung.rates)
            engine = "" if rung.engine_tok_s is None else f", engine {rung.engine_tok_s:.1f}"
            share = "" if rung.accepted_share is None else f", accepted {rung.accepted_share:.3f}"
            lines.append(
                f"ladder {name} ({rung.corpus}): {each} tokens/s, together {rung.wall_tok_s:.1f} "
                f"by the wall, {rung.decode_tok_s:.1f} in the decode phase, fairness "
                f"{rung.fairness:.2f} (Jain {rung.jain:.2f}){engine}{share}"
            )
    return {"rungs": rungs}, lines, 0


def _audit(run: _Run) -> _Answer:
    from ..measure.probes import audit_answer
    from ..measure.probes.laws import said
    from ..measure.probes.requests import audit_request

    audits: list[dict[str, Any]] = []
    lines: list[str] = []
    for depth in run.depths(run.args.tokens):
        run.show(f"a text of {depth} tokens")
        request, titles = audit_request(run.maker, depth, run.args.tokens, salt="probe")
        (stream,) = run.measure([request], f"audit at {depth}").streams
        text, _ = said(stream)
        found = audit_answer(text, run.maker.tokens(text), titles)
        audits.append({"depth": depth, **found.to_json()})
        lines += [
            f"{check.name} at {depth}: {'yes' if check.passed else 'NO'}, {check.told}"
            for check in found.checks
        ]
        lines.append(f"depth-audit at {depth}: {found.verdict}")
    passed = all(audit["verdict"] == "PASS" for audit in audits)
    return {"audits": audits}, lines, 0 if passed else 2


_PROBES: dict[str, Callable[[_Run], _Answer]] = {
    "shape": _shape,
    "prefill": _prefill,
    "capacity": _capacity,
    "ladder": _ladder,
    "depth-audit": _audit,
}
