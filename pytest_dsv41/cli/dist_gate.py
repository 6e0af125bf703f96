"""`dsv41 dist-gate cuts | probe | band | gate`: is it still the same model? Exit 2 on LOSS."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import counted, one_line
from .arguments import new_file, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..quality.bands import Band
    from ..quality.dist_gate import CountTest, GateResult
    from ..quality.probe import Conditions, ProbeProgress
    from ..quality.prompts import ProbePrompt

HELP = (
    "The distributional gate: cut the prompts, probe a server, register a band of production "
    "against itself, judge a candidate by it. 0 PASS, 2 LOSS."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    cuts = actions.add_parser("cuts", help="cut the long registered prompts out of texts")
    cuts.add_argument("url", metavar="URL", help="a server with /tokenize")
    cuts.add_argument("folder", type=Path, metavar="FOLDER", help="the corpus; made where missing")
    cuts.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="cut in this order")
    cuts.add_argument("--subset", default="32k,150k", help="default: %(default)s")
    cuts.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="SUBSET=N",
        help="another length of a subset's prompts (default: 32k=32000, 150k=150000)",
    )
    cuts.add_argument("--each", type=int, metavar="N", help="the first N prompts of each subset")
    _server(cuts)

    probe = actions.add_parser("probe", help="ask a server for its next-token distributions")
    probe.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    probe.add_argument("--out", type=Path, required=True, metavar="FILE", help="outside of git")
    probe.add_argument(
        "--candidate", action="store_true", help="what is to be judged; needs --band"
    )
    probe.add_argument(
        "--band",
        type=Path,
        metavar="FILE",
        help="a registered band: its prompts, list length and conditions are taken",
    )
    probe.add_argument("--subset", help="short, 32k, 150k or several (default: short,32k)")
    probe.add_argument("--each", type=int, metavar="N", help="the first N prompts of each subset")
    probe.add_argument(
        "--cache", choices=("cached", "cold"), help="one salt a run (default), or none cached"
    )
    probe.add_argument(
        "--concurrency", type=int, metavar="B", help="positions at a time (default: 1)"
    )
    probe.add_argument(
        "--others",
        choices=("none", "allowed"),
        help="none (default): the counters must prove that nobody else was served",
    )
    probe.add_argument("--top-n", type=int, metavar="N", help="entries a position (default: 20)")
    probe.add_argument("--salt", default="probe", help="beginning of the run's cache salt")
    probe.add_argument(
        "--deadline", type=seconds, default=3600.0, metavar="S", help="of all of it (default: 3600)"
    )
    _server(probe)

    band = actions.add_parser("band", help="register comparisons of production with itself")
    band.add_argument(
        "probes", type=Path, nargs="+", metavar="PROBE", help="pairs: A B, or A B C D, …"
    )
    band.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the band; not overwritten"
    )

    gate = actions.add_parser("gate", help="judge a candidate's probe; exit 2 on LOSS")
    gate.add_argument("control", type=Path, metavar="CONTROL", help="production's probe")
    gate.add_argument("candidate", type=Path, metavar="CANDIDATE", help="the candidate's probe")
    gate.add_argument(
        "--band",
        type=Path,
        required=True,
        metavar="FILE",
        help="the band that both were probed by",
    )
    gate.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")


def run(args: argparse.Namespace) -> int:
    """Run one action."""
    from ..errors import MeasurementFailed, MeasurementRefused

    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "cuts": _cuts,
        "probe": _probe,
        "band": _band,
        "gate": _gate,
    }
    try:
        return actions[args.action](args)
    except (MeasurementFailed, MeasurementRefused) as error:
        word = "FAILED" if isinstance(error, MeasurementFailed) else "REFUSED"
        print(
            f"dsv41 dist-gate {args.action}: {word} {error.kind}: {one_line(str(error), 500)}",
            file=sys.stderr,
        )
        # A server that cannot be probed is one thing, files that cannot be judged another.
        return 1 if args.action in ("cuts", "probe") else 4


def _cuts(args: argparse.Namespace) -> int:
    from ..engines import get_engine
    from ..errors import UsageError
    from ..measure.corpus import Corpus
    from ..measure.cut import cut_texts
    from ..quality.prompts import DIST_PROMPTS, DIST_TOKENS, parse_subset

    lengths = dict(DIST_TOKENS)
    for pair in args.tokens:
        name, equals, number = pair.partition("=")
        if not equals or name not in DIST_PROMPTS or not number.isdigit() or int(number) < 16:
            raise UsageError(f"--tokens {pair}: write SUBSET=N, N at least 16")
        lengths[name] = int(number)
    wanted: list[tuple[str, int]] = []
    for subset in parse_subset(args.subset):
        if subset not in lengths:
            raise UsageError(f"--subset {subset}: travels with the package; give --tokens to cut")
        wanted += [(name, lengths[subset]) for name in DIST_PROMPTS[subset][: _each(args)]]
    known: set[str] = set()
    if (args.folder / "cuts.json").exists():
        known = set(Corpus.load(args.folder).cuts)
    text = "\n\n".join(_text(path) for path in args.texts)
    engine = get_engine(args.engine)
    model = args.model or engine.models(args.url)[0]

    def count(part: str) -> int:
        return len(engine.tokenize(args.url, model, part))

    at = 0
    for index, (name, tokens) in enumerate(wanted, 1):
        if name in known:
            # A run that was ended goes on behind what it has cut.
            piece = Corpus.load(args.folder).prompt(name)
            if not text.startswith(piece.text, at):
                raise UsageError(f"{args.folder}: {name} is there and was cut from other texts")
            # A cut is the longest piece with at most so many tokens.
            longer = text[at : at + len(piece.text) + 1]
            if piece.tokens != tokens and not (piece.tokens or 0) < tokens < count(longer):
                raise UsageError(
                    f"{args.folder}: {name} is there and has {piece.tokens} tokens, {tokens} are "
                    "asked: name another folder"
                )
        else:
            (piece,) = cut_texts(text, [(name, tokens)], count, args.folder, start=at)
        at += len(piece.text)
        shown = f"{piece.name:<20}{piece.tokens:>10} tokens  {piece.sha256}"
        print(f"{index:>3} of {len(wanted)}  {shown}", flush=True)
    print(f"probe with them: DSV41_CORPUS={args.folder} dsv41 dist-gate probe …")
    return 0


def _text(path: Path) -> str:
    from ..errors import UsageError

    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is no UTF-8: a text is needed") from None


def _each(args: argparse.Namespace) -> int | None:
    from ..errors import UsageError

    if args.each is not None and args.each < 1:
        raise UsageError("--each: at least 1")
    each: int | None = args.each
    return each


def _probe(args: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..measure import Endpoint
    from ..quality.bands import production_of
    from ..quality.probe import run_probe, save_probe
    from ..quality.sealed import outside_git
    from .measure import stop_on_signals

    if args.candidate and args.band is None:
        raise UsageError("--candidate needs --band: a band is registered before any candidate use")
    new_file(outside_git(args.out), "a probe is never overwritten")
    prompts, settings, conditions = _plan(args)
    with stop_on_signals() as stop, _shown() as progress:
        probe = run_probe(
            Endpoint(args.url, args.engine, args.model),
            prompts,
            deadline_s=args.deadline,
            role="candidate" if args.candidate else "control",
            conditions=conditions,
            salt=args.salt,
            progress=progress,
            stop=stop,
            **settings,
        )
    seal = save_probe(args.out, probe)
    told = [position.cached_tokens for position in probe.positions]
    cached = "not told" if None in told else f"{counted(sum(filter(None, told)), 'token')}"
    print(f"{args.out}: the {probe.role}, {one_line(production_of(probe))}")
    print(
        f"  {counted(len(probe.positions), 'position')} of "
        f"{counted(len(probe.prompts), 'prompt')} ({probe.subset}), "
        f"{probe.top_n} entries each, {conditions}"
    )
    print(f"  from the cache: {cached}; run {probe.run}; seal {seal}")
    for note in probe.notes:
        print(f"  note: {note}")
    return 0


def _plan(args: argparse.Namespace) -> tuple[tuple[ProbePrompt, ...], dict[str, Any], Conditions]:
    """What a probe asks: as a band has it, or as the options say."""
    from ..errors import UsageError
    from ..measure.corpus import find_prompt
    from ..quality.bands import load_band
    from ..quality.kl import TOP_N
    from ..quality.probe import Conditions
    from ..quality.prompts import ProbePrompt, parse_subset, probe_prompts

    options = ("subset", "each", "cache", "concurrency", "others", "top_n")
    if args.band is not None:
        given = [name for name in options if getattr(args, name) is not None]
        if given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"{names}: the band has registered it; leave it out beside --band")
        band, seal = load_band(args.band)
        prompts = tuple(
            ProbePrompt(prompt.name, prompt.subset, find_prompt(prompt.name).text)
            for prompt in band.prompts
        )
        settings = {"top_n": band.top_n, "prefixes": band.prefixes}
        if args.candidate:
            settings["band"] = seal
        return prompts, settings, band.conditions
    if args.top_n is not None and not 1 <= args.top_n <= 1000:
        raise UsageError("--top-n: 1 to 1000")
    subsets = parse_subset("short,32k" if args.subset is None else args.subset)
    return (
        probe_prompts(subsets, each=_each(args)),
        {"top_n": args.top_n or TOP_N},
        Conditions(
            args.cache or "cached",
            1 if args.concurrency is None else args.concurrency,
            args.others or "none",
        ),
    )


@contextmanager
def _shown() -> Iterator[Callable[[ProbeProgress], None]]:
    """Progress on stderr: one line that renews itself, or a line every ten seconds."""
    terminal = sys.stderr.isatty()
    last = 0.0

    def show(now: ProbeProgress) -> None:
        nonlocal last
        at = time.monotonic()
        if at - last < (0.2 if terminal else 10.0) and now.done < now.total:
            return
        last = at
        left = now.elapsed_s / now.done * (now.total - now.done)
        text = f"{now.done} of {now.total} positions ({now.prompt}), about {left:.0f} s left"
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _band(args: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..quality.bands import register_band, save_band
    from ..quality.probe import load_probe

    new_file(args.out, "a band is never overwritten")
    if len(args.probes) % 2:
        raise UsageError(f"{counted(len(args.probes), 'probe')}: give pairs, A B or A B C D")
    probes = [load_probe(path) for path in args.probes]
    band = register_band(list(zip(probes[::2], probes[1::2], strict=True)))
    seal = save_band(args.out, band)
    print(f"{args.out}: registered {band.registered_utc}, seal {seal}")
    _show_band(band)
    return 0


def _show_band(band: Band) -> None:
    from ..quality.bands import production_of

    print(f"  production: {one_line(production_of(band))}, {band.conditions}")
    print(
        f"  {counted(band.k, 'A/A comparison')} over {counted(len(band.prefixes), 'position')} of "
        f"{counted(len(band.prompts), 'prompt')} ({one_line(band.subset)}), {band.top_n} "
        f"entries each"
    )
    print(
        f"  mean KL {band.kls.mean():.3g} nats, ceiling {band.kl_ceiling:.3g} "
        f"(prompts resampled: {band.prompt_ceiling:.3g})"
    )
    differ = " ".join(str(one.disagreements) for one in band.comparisons)
    print(f"  different likeliest tokens: {differ} of {len(band.prefixes)}")
    print(f"  positions with a common mass of 0.99: {100 * band.trusted_share:.1f} %")
    for remark in band.remarks():
        print(f"  note: {remark}")


def _gate(args: argparse.Namespace) -> int:
    from ..quality.bands import load_band
    from ..quality.dist_gate import judge
    from ..quality.probe import load_probe

    band, seal = load_band(args.band)
    result = judge(band, seal, load_probe(args.control), load_probe(args.candidate))
    if args.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        _show_result(result)
    return 2 if result.verdict == "LOSS" else 0


def _show_result(result: GateResult) -> None:

    print(
        f"{result.verdict}: {counted(result.positions, 'position')}, "
        f"{counted(result.k, 'A/A comparison')}, band {result.band[:12]}"
    )
    print(
        f"  mean KL                  {result.mean_kl:.3g} nats, ceiling {result.kl_ceiling:.3g}, "
        f"A/A {result.aa_mean_kl:.3g} (prompts resampled: ceiling {result.prompt_ceiling:.3g})"
    )
    for label, test in (
        ("likeliest token differs", result.top1),
        ("common mass < 0.99", result.mass),
    ):
        print(f"  {label:<25}{_count(test, result.positions)}")
    rule = result.fmethod_top1_rule
    answer = "LOSS" if rule["loss"] else "no loss"
    print(
        f"  F-METHOD's literal rule   {answer} ({rule['candidate']}, loses from "
        f"{rule['limit']} on); it does not decide"
    )
    for name, subset in result.by_subset.items():
        print(
            f"  {one_line(name, 40) + ' prompts':<25}mean KL {subset.mean_kl:.3g}, "
            f"A/A {subset.aa_mean_kl:.3g}, {subset.disagreements} of {subset.positions} "
            "likeliest tokens differ"
        )
    worst = one_line(result.worst_prompt, 60)
    print(f"  worst prompt             {worst}: mean KL {result.worst_prompt_kl:.3g}")
    print(
        f"  common mass ≥ 0.99       {100 * result.trusted_share:.1f} % of the positions, "
        f"A/A {100 * result.aa_trusted_share:.1f} %"
    )
    for reason in result.reasons:
        print(f"  LOSS: {one_line(reason, 500)}")
    for remark in result.remarks:
        print(f"  note: {one_line(remark, 500)}")


def _count(test: CountTest, positions: int) -> str:
    counts = " ".join(map(str, test.aa))
    text = f"{test.candidate} of {positions}, A/A {counts}, p = {test.p:.2g}"
    if not test.decides:
        return f"{text}; saturated, does not decide"
    return f"{text}, loses from {test.least_losing} on"
