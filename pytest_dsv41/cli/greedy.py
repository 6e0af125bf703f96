"""`dsv41 greedy run | compare | kl`: answers at temperature 0 of two arms; exit 2 on DIVERGED."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import counted, one_line
from .arguments import new_file, seconds

if TYPE_CHECKING:
    from ..quality.greedy import GreedyProgress, PromptOutcome

_QUICK_S = 10.0
"""A run that is over sooner says nothing on its way where no terminal is."""

HELP = (
    "Greedy answers of two arms: identical, parted at a near tie, or parted; and the KL where they "
    "parted. 0 identical, near ties or within the bound; 2 not."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_ = actions.add_parser("run", help="answer the prompts at temperature 0")
    run_.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    run_.add_argument("--out", type=Path, required=True, metavar="FILE", help="outside of git")
    run_.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="NAME",
        help="a prompt of a corpus, repeatable (default: dist-short-01 to -06)",
    )
    run_.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="an answer's (default: 128)"
    )
    run_.add_argument(
        "--top-n", type=int, default=20, metavar="N", help="candidates a token (default: 20)"
    )
    run_.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="the control's record: compare with it (prompts and tokens as there)",
    )
    _limit(run_)
    run_.add_argument(
        "--record-distribution",
        action="store_true",
        help="keep this arm's candidates and the prefix at every divergence",
    )
    run_.add_argument(
        "--probe-salt-prefix",
        default="greedy",
        metavar="TAG",
        help="beginning of the cache salts, such as the window's tag",
    )
    _server(run_)

    compare = actions.add_parser("compare", help="set two records side by side")
    compare.add_argument("control", type=Path, metavar="CONTROL", help="the control's record")
    compare.add_argument("candidate", type=Path, metavar="CANDIDATE", help="the candidate's record")
    _limit(compare)
    compare.add_argument("--json", action="store_true", help="one JSON object on stdout")

    kl = actions.add_parser("kl", help="ask a control start where the candidate parted")
    kl.add_argument("url", metavar="URL", help="a control start")
    kl.add_argument(
        "candidate",
        type=Path,
        metavar="CANDIDATE",
        help="the candidate's record, made with --record-distribution",
    )
    bound = kl.add_mutually_exclusive_group()
    bound.add_argument("--bound", type=float, metavar="NATS", help="the registered bound")
    bound.add_argument(
        "--aa-floor", type=float, metavar="NATS", help="bound max(0.005, 2 x this) (default: 0)"
    )
    kl.add_argument(
        "--probe-salt-prefix",
        default="greedy-kl",
        metavar="TAG",
        help="beginning of the cache salts (default: greedy-kl)",
    )
    _server(kl)


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--near-tie-nats",
        type=float,
        default=0.501,
        metavar="NATS",
        help="the registered limit of a near tie (default: %(default)s)",
    )


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument(
        "--deadline", type=seconds, default=1800.0, metavar="S", help="of all of it (default: 1800)"
    )


def run(args: argparse.Namespace) -> int:
    """Run one action."""
    from ..errors import MeasurementFailed, MeasurementRefused

    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "run": _run,
        "compare": _compare,
        "kl": _kl,
    }
    try:
        return actions[args.action](args)
    except (MeasurementFailed, MeasurementRefused) as error:
        word = "FAILED" if isinstance(error, MeasurementFailed) else "REFUSED"
        print(
            f"dsv41 greedy {args.action}: {word} {error.kind}: {one_line(str(error), 500)}",
            file=sys.stderr,
        )
        return 4 if args.action == "compare" else 1


def _run(args: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..measure import Endpoint
    from ..measure.corpus import find_prompt
    from ..quality.greedy import (
        GreedyPrompt,
        compare_greedy,
        load_greedy,
        record_divergences,
        run_greedy,
        save_greedy,
    )
    from ..quality.prompts import DIST_PROMPTS
    from ..quality.sealed import outside_git
    from .measure import stop_on_signals

    if args.max_tokens < 1 or not 1 <= args.top_n <= 1000:
        raise UsageError("--max-tokens: at least 1; --top-n: 1 to 1000")
    if not 0 <= args.near_tie_nats < float("inf"):
        raise UsageError(f"--near-tie-nats {args.near_tie_nats}: valid: 0 and more nats")
    if args.record_distribution and args.against is None:
        raise UsageError("--record-distribution needs --against: it is about where the two part")
    new_file(outside_git(args.out), "a record is never overwritten")
    names, max_tokens, top_n = args.prompt or DIST_PROMPTS["short"][:6], args.max_tokens, args.top_n
    control = None
    if args.against is not None:
        control = load_greedy(args.against)
        names = [row.name for row in control.rows]
        max_tokens, top_n = control.max_tokens, control.top_n
    found = [find_prompt(name) for name in names]
    for prompt, row in zip(found, control.rows if control is not None else (), strict=False):
        if prompt.sha256 != row.prompt_sha256:
            raise UsageError(
                f"{args.against}: its prompt {one_line(row.name, 60)} hashes to "
                f"{one_line(row.prompt_sha256[:12])}…, the corpus's to {prompt.sha256[:12]}…"
            )
    prompts = [GreedyPrompt(prompt.name, prompt.text) for prompt in found]
    endpoint = Endpoint(args.url, args.engine, args.model)
    with stop_on_signals() as stop:
        record = run_greedy(
            endpoint,
            prompts,
            max_tokens=max_tokens,
            deadline_s=args.deadline,
            top_n=top_n,
            salt=args.probe_salt_prefix,
            progress=_progress,
            stop=stop,
        )
        if control is not None and args.record_distribution:
            record = record_divergences(
                endpoint,
                control,
                record,
                probe_salt_prefix=args.probe_salt_prefix,
                deadline_s=args.deadline,
                progress=_progress,
                stop=stop,
            )
    seal = save_greedy(args.out, record)
    print(
        f"{args.out}: {counted(len(record.rows), 'answer')} of up to "
        f"{counted(max_tokens, 'token')}, "
        f"{one_line(f'{record.engine} {record.version} {record.model}')}, seal {seal}"
    )
    if control is None:
        return 0
    return _show(compare_greedy(control, record, near_tie_nats=args.near_tie_nats))


def _progress(now: GreedyProgress) -> None:
    text = f"{now.done} of {counted(now.total, 'answer')} ({now.prompt}), {now.elapsed_s:.0f} s"
    if sys.stderr.isatty():
        end = "\n" if now.done == now.total else ""
        print(f"\r\033[K{text}", end=end, file=sys.stderr, flush=True)
    elif now.elapsed_s > _QUICK_S:
        print(text, file=sys.stderr, flush=True)


def _compare(args: argparse.Namespace) -> int:
    from ..quality.greedy import compare_greedy, load_greedy

    outcomes = compare_greedy(
        load_greedy(args.control), load_greedy(args.candidate), near_tie_nats=args.near_tie_nats
    )
    if args.json:
        rows = [vars(outcome) for outcome in outcomes]
        print(json.dumps({"near_tie_nats": args.near_tie_nats, "prompts": rows}, indent=1))
        return _code(outcomes)
    return _show(outcomes)


def _code(outcomes: Sequence[PromptOutcome]) -> int:
    return 2 if any(outcome.outcome == "DIVERGED" for outcome in outcomes) else 0


def _show(outcomes: Sequence[PromptOutcome]) -> int:

    for one in outcomes:
        text = f"  {one.outcome:<10}{one_line(one.name, 60)}"
        if one.at is not None:
            text += f": parted at token {one.at}"
        if one.margin is not None:
            text += f", the control prefers its own by {one.margin:.3f} nats"
        if one.why:
            text += f", {one_line(one.why)}"
        print(text)
    counts = {
        word: sum(one.outcome == word for one in outcomes)
        for word in ("IDENTICAL", "NEAR TIE", "DIVERGED")
    }
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return _code(outcomes)


def _kl(args: argparse.Namespace) -> int:
    from ..measure import Endpoint
    from ..quality.greedy import load_greedy
    from ..quality.greedy_kl import compare_recorded, kl_bound
    from .measure import stop_on_signals

    candidate = load_greedy(args.candidate)
    bound = args.bound if args.bound is not None else kl_bound(args.aa_floor)
    with stop_on_signals() as stop:
        found = compare_recorded(
            Endpoint(args.url, args.engine, args.model),
            candidate.divergences,
            args.probe_salt_prefix,
            bound=bound,
            deadline_s=args.deadline,
            top_n=candidate.top_n,
            progress=_progress,
            stop=stop,
        )
    if not found:
        print(f"{args.candidate}: no divergence was recorded: nothing to compare")
        return 0
    for one in found:
        print(
            f"  {one.outcome:<5}{one_line(one.name, 60)}: token {one.at}, "
            f"KL {one.position.kl:.4g} nats, common mass {one.position.common_mass:.4f}"
        )
    worst = max(one.position.kl for one in found)
    bad = [one for one in found if one.outcome != "OK"]
    thin = sum(one.outcome == "MASS" for one in bad)
    print(
        f"{len(found) - len(bad)} of {len(found)} within the bound of {bound:.4g} nats, "
        f"worst {worst:.4g}" + (f"; {thin} with a common mass below 0.99" if thin else "")
    )
    return 2 if bad else 0
