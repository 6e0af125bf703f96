"""`dsv41 kl`: recordings of a model's distribution, a candidate scored against one, its gate.

Exit codes of its own: gate 0 PASS, 2 FAIL; verify 1: something is wrong; shape 2: it differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..text import counted, one_line
from .arguments import new_file, seconds

if TYPE_CHECKING:
    from ..quality.reference import Limits

__all__ = ["HELP", "configure", "run"]

HELP = "KL references: record, verify, convert, score a candidate, gate"

_SHOWN = 20
_LIMITS = ("mean_kl_max", "top1_min", "ppl_ratio_max", "trusted_share_min")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str, work: Any) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text)
        sub.set_defaults(work=work)
        return sub

    verify = action("verify", "read a recording whole and say what is wrong with it", _verify)
    verify.add_argument("recording", type=Path, metavar="RECORDING", help="a folder or base file")

    record = action(
        "record", "record the likeliest tokens of a server as a dsv41-topk-1 reference", _record
    )
    record.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    record.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    texts = record.add_mutually_exclusive_group(required=True)
    texts.add_argument(
        "--corpus", type=Path, metavar="FILE", help="JSON lines of prompt, source, score_from"
    )
    texts.add_argument(
        "--like", type=Path, metavar="RECORDING", help="the very tokens of another recording"
    )
    record.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    record.add_argument("--model", default="", help="default: the first of /v1/models")
    record.add_argument("--top-n", type=int, default=20, metavar="N", help="default: %(default)s")
    record.add_argument(
        "--cache",
        choices=("cached", "cold"),
        default="cached",
        help="a position may build on those before it (default), or none cached",
    )
    record.add_argument(
        "--concurrency", type=int, default=1, metavar="B", help="documents at a time (default: 1)"
    )
    record.add_argument(
        "--deadline", type=seconds, default=86400.0, metavar="S", help="default: a day"
    )

    convert = action(
        "convert", "write a llama.cpp base file as a radiance-kld-1 reference", _convert
    )
    convert.add_argument("base", type=Path, metavar="BASE", help="of --kl-divergence-base")
    convert.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    convert.add_argument(
        "--text",
        type=Path,
        required=True,
        metavar="FILE",
        help="what llama-perplexity -f was given",
    )
    convert.add_argument("--model", default="", help="default: the base file's name")

    score = action("score", "score a candidate's recording against a reference", _score)
    score.add_argument("reference", type=Path, metavar="REFERENCE", help="a folder or base file")
    score.add_argument("candidate", type=Path, metavar="CANDIDATE", help="of the same tokens")
    score.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the report; FILE.rows beside it"
    )
    score.add_argument("--model", default="", help="the candidate's name, where it is a base file")
    score.add_argument("--threads", type=int, help="default: one a processor, at most 8")
    score.add_argument("--json", action="store_true", help="print the report")

    gate = action("gate", "judge a report: 0 PASS, 2 FAIL", _gate)
    gate.add_argument("report", type=Path, metavar="REPORT", help="of kl score")
    gate.add_argument(
        "--spec", type=Path, metavar="FILE", help="limits and the scored run's shape, as TOML"
    )
    gate.add_argument("--receipt", type=Path, metavar="FILE", help="write the answer there")
    gate.add_argument("--json", action="store_true", help="print the receipt")

    shape = action("shape", "does a server still have the scored shape? 0 yes, 2 no", _shape)
    shape.add_argument("receipt", type=Path, metavar="RECEIPT", help="of kl gate --receipt")
    shape.add_argument("now", type=Path, metavar="FILE", help="TOML with a table [shape]")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    code: int = args.work(args)
    return code


def _verify(args: argparse.Namespace) -> int:
    from ..errors import MeasurementRefused
    from ..quality.reference import TopkRecording, open_recording, verify

    if not args.recording.exists():
        raise UsageError(f"{args.recording}: no such file or folder")
    try:
        recording = open_recording(args.recording)
        with _progress("verifying") as progress:
            found = verify(recording, progress=progress)
    except MeasurementRefused as error:
        print(f"{one_line(str(error), 600)}")
        return 1
    for line in found[:_SHOWN]:
        print(one_line(f"{args.recording}: {line}", 600))
    if len(found) > _SHOWN:
        print(f"{args.recording}: {counted(len(found) - _SHOWN, 'more row')}")
    if found:
        return 1
    width = f"{recording.n_vocab} tokens"
    if isinstance(recording, TopkRecording):
        width = f"the {recording.top_n} likeliest tokens"
    print(
        f"{args.recording}: whole: {counted(recording.rows, 'row')} of {width}, "
        f"documents: {len(recording.documents)}, {one_line(recording.model, 80)}"
    )
    return 0


def _record(args: argparse.Namespace) -> int:
    from ..engines import get_engine
    from ..errors import MeasurementFailed, MeasurementRefused
    from ..measure import Endpoint
    from ..measure.group import control_client, ended_by
    from ..quality.reference import corpus_plan, open_recording, plan_like, record_topk
    from .measure import stop_on_signals

    if (args.folder / "topk.json").exists():
        raise UsageError(f"{args.folder}: already holds a reference, which is never overwritten")
    like = None if args.like is None else plan_like(open_recording(args.like))
    endpoint = Endpoint(args.url, args.engine, args.model)
    until = time.monotonic() + args.deadline
    deadline_ns = int(until * 1e9)
    try:
        engine = get_engine(args.engine)
        with stop_on_signals() as stop, _progress("recording") as progress:
            if like is not None:
                plan = like
            else:
                with (
                    ended_by(stop, deadline_ns),
                    control_client(endpoint, stop=stop, deadline_ns=deadline_ns) as client,
                ):
                    model = args.model or engine.models(args.url, client=client)[0]
                    plan = corpus_plan(
                        args.corpus,
                        lambda text: engine.tokenize(args.url, model, text, client=client),
                    )
            manifest = record_topk(
                endpoint,
                plan,
                args.folder,
                deadline_s=max(0.0, until - time.monotonic()),
                top_n=args.top_n,
                cache=args.cache,
                concurrency=args.concurrency,
                progress=progress,
                stop=stop,
            )
    except (MeasurementFailed, MeasurementRefused) as error:
        word = "FAILED" if isinstance(error, MeasurementFailed) else "REFUSED"
        print(f"dsv41 kl record: {word} {error.kind}: {one_line(str(error), 500)}", file=sys.stderr)
        return 1
    print(f"{args.folder}: {counted(manifest.rows, 'position')} of {one_line(manifest.model, 80)}")
    for line in manifest.fields["cannot_see"]:
        print(f"  cannot see {line}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from ..quality.reference import BaseFile, convert

    base = BaseFile(args.base, model=args.model)
    with _progress("converting") as progress:
        manifest = convert(base, args.folder, args.text, progress=progress)
    print(f"{args.folder}: {counted(manifest.rows, 'row')} of {base.n_vocab} tokens")
    return 0


def _score(args: argparse.Namespace) -> int:
    from ..quality.reference import (
        BaseFile,
        Dense,
        build_report,
        open_recording,
        rows_path,
        score,
        score_topk,
        write_report,
    )

    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: at least 1")
    rows = rows_path(args.out)
    new_file(args.out, "a report is never overwritten")
    new_file(rows, "its report is missing, so a scoring that was ended left it: remove it")
    reference = open_recording(args.reference)
    candidate = open_recording(args.candidate, model=args.model)
    if args.reference.samefile(args.candidate):
        raise UsageError(f"{args.candidate}: is the reference itself: two recordings are needed")
    topk = None
    with _progress("scoring") as progress:
        if isinstance(reference, Dense) and isinstance(candidate, Dense):
            scores = score(reference, candidate, threads=args.threads, progress=progress)
        elif isinstance(reference, BaseFile) or isinstance(candidate, BaseFile):
            raise UsageError("a base file keeps no lists: score it against a dense recording")
        else:
            lists = score_topk(reference, candidate, progress=progress)
            scores, topk = lists.scores, lists.to_json()
    report = build_report(
        scores,
        reference.documents,
        model=args.model or candidate.model,
        reference=reference.model,
        ref_dir=str(args.reference),
        corpus=reference.corpus,
        topk=topk,
    )
    write_report(args.out, report, scores)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    print(one_line(f"{report['model']} against {report['reference']}", 300))
    lines = [("all", report["all"])]
    if len(report["by_source"]) > 1:
        lines += list(report["by_source"].items())
    for name, part in lines:
        kld, ppl = part["kld"], part["ppl"]
        seen = "perplexities not seen"
        if ppl["ratio"] is not None:
            seen = (
                f"perplexity {ppl['candidate']:.4f} against {ppl['reference']:.4f}, ratio "
                f"{ppl['ratio']:.4f}"
            )
        print(
            f"  {one_line(name, 30) or '(no source)':<24} "
            f"{counted(part['positions'], 'position')}: mean KL "
            f"{kld['mean']:.5f} (median {kld['median']:.5f}, p99 {kld['p99']:.4f}, max "
            f"{kld['max']:.3f}), top-1 {100 * part['top1_agreement']:.2f} %, {seen}"
        )
    topk = report.get("topk")
    if topk is not None:
        print(
            f"  lists of {topk['top_n']}: the KL can be trusted in "
            f"{100 * topk['trusted_share']:.1f} % of the positions, elsewhere it is a lower bound"
        )
        for line in topk["cannot_see"]:
            print(f"  cannot see {line}")


def _gate(args: argparse.Namespace) -> int:
    from ..durable import create_exclusive
    from ..quality.reference import Limits, judge

    limits, shape = _spec(args.spec) if args.spec is not None else (Limits(), {})
    receipt = judge(args.report, limits, shape)
    text = json.dumps(receipt.to_json(), indent=2, ensure_ascii=False)
    if args.receipt is not None:
        try:
            create_exclusive(args.receipt, f"{text}\n".encode(errors="backslashreplace"))
        except FileExistsError:
            raise UsageError(f"{args.receipt}: exists; a receipt is never overwritten") from None
    if args.json:
        print(text)
        return 0 if receipt.verdict == "PASS" else 2
    print(one_line(f"{receipt.verdict}: {receipt.report['model']}", 300))
    for check in receipt.checks:
        limit = "no limit" if check.limit is None else f"{check.relation} {check.limit:g}"
        mark = {True: "kept", False: "NOT KEPT", None: "reported"}[check.passed]
        value = "not seen" if check.value is None else f"{check.value:.5f}"
        print(f"  {check.name:<18}{value:>12}  {limit:<12}{mark}")
    if not shape:
        print("  no [shape] given: the receipt does not say how the scored run was started")
    return 0 if receipt.verdict == "PASS" else 2


def _shape(args: argparse.Namespace) -> int:
    from ..quality.reference import left_shape, read_receipt

    scored = read_receipt(args.receipt)["shape"]
    if not scored:
        raise UsageError(f"{args.receipt}: was written without a shape")
    _, now = _spec(args.now)
    lines = left_shape(scored, now)
    for line in lines:
        print(one_line(f"WARNING: {line}", 300))
    if not lines:
        print(f"the scored shape: {counted(len(scored), 'key')}, none differs")
    return 2 if lines else 0


def _spec(path: Path) -> tuple[Limits, dict[str, Any]]:
    """Read limits and shape from a TOML file; what it does not name stays at its default."""
    from ..quality.reference import Limits
    from ..window.source import choices, read_toml

    values, source = read_toml(path, str(path))
    shape = values.pop("shape", {})
    if not isinstance(shape, dict):
        raise source.error(("shape",), "is no table")
    for key, value in shape.items():
        if not isinstance(value, (str, int, float)):
            raise source.error(("shape", key), "a text, number, true or false is needed")
    given: dict[str, float] = {}
    for key, value in values.items():
        if key not in _LIMITS:
            raise source.error((key,), f"unknown key{choices(key, (*_LIMITS, 'shape'))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise source.error((key,), "a number of at least 0 is needed")
        if key == "ppl_ratio_max" and value == 0:
            raise source.error((key,), "0 cannot be kept: a ratio of perplexities is above it")
        if key in ("top1_min", "trusted_share_min") and value > 1:
            raise source.error((key,), f"{value} is above 1; 95 % is written 0.95")
        given[key] = float(value)
    return Limits(**given), shape


@contextmanager
def _progress(word: str) -> Iterator[Callable[[int, int], None]]:
    """Say how far a long work is: on a terminal in one line, else a line every half minute."""
    terminal = sys.stderr.isatty()
    began = said = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - began < 2.0 or now - said < (0.2 if terminal else 30.0):
            return
        said = now
        left = (now - began) * (total - done) / done
        line = f"{word}: {done} of {total} rows, {left:.0f} s to go"
        print(
            f"\r\033[K{line}" if terminal else line,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    try:
        yield tell
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
