"""`python -m sims …`: the published tables beside a simulation of them, and a planner."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_dsv41.decision_v2 import Refused, parse_design

from . import gate, moderated, no_effect, paired, plan, plot, power, published, resolution
from .draws import DEFAULT_SEED, Step
from .table import Row, print_rows

__all__ = ["main"]

TABLES = ("power", "no-effect", "paired", "gate", "resolution", "moderated", "bracket")
EXACT = ("power", "no-effect")
GATE_TRIALS = 100_000
GATE_KL_TRIALS = 1_000
PLAN_TRIALS = 4_000
MOST_EFFECT = 0.08
PLOT_POINTS = 33

Loaded = tuple[list[Row], list[Row]]


@contextmanager
def _progress(label: str, total: int) -> Iterator[Step]:
    """A progress bar on the terminal's error stream; nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        # Older releases of rich write an empty line even where the bar is off.
        yield lambda _trials: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)

        def step(trials: int, /) -> None:
            bar.advance(task, trials)

        yield step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sims",
        description="Simulate the decision rules and hold the results against the published "
        "tables; exit 1 when a number lies beyond 3 standard errors.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "power": "power of win2-v1 (81 numbers)",
        "no-effect": "no-effect windows of two cells with guards",
        "paired": "operating characteristics of seeded pairs",
        "gate": "error rates of the distributional gate",
        "resolution": "half widths of the resolution filter",
        "moderated": "the advisory rules beside the deciding ones",
        "bracket": "pairs of bracketing control starts",
        "all": "every table",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--seed", type=int, default=DEFAULT_SEED, help="default %(default)s")
        command.add_argument(
            "--trials", type=_positive, help="trials a number (default: the published size)"
        )
        command.add_argument("--json", action="store_true", help="rows as JSON")
        if name in (*EXACT, "all"):
            command.add_argument(
                "--exact", action="store_true", help="replay the published random stream"
            )
        if name in EXACT:
            command.add_argument("--revision", type=int, choices=(1, 2, 3))
            command.add_argument(
                "--design",
                action="append",
                metavar="DESIGN",
                help="only this one: unpaired:4v3, pairs:3, … (repeatable)",
            )
        if name == "paired":
            command.add_argument(
                "--design", action="append", metavar="seeded:N", help="only rows with N pairs"
            )
        if name == "power":
            command.add_argument(
                "--plot", type=Path, metavar="FILE", help="power against true effect, as SVG"
            )
    planner = commands.add_parser("plan", help="designs with their minutes and power")
    planner.add_argument("--cv", type=_fraction, required=True, help="CV of one repeat, a fraction")
    planner.add_argument("--gain", type=_fraction, required=True, help="true gain, a fraction")
    planner.add_argument("--power", type=_fraction, default=0.8, help="wanted (default 0.8)")
    planner.add_argument(
        "--start-sd", type=_fraction_or_zero, default=0.0, help="registered, for seeded pairs"
    )
    planner.add_argument("--start-min", type=float, default=6.8, help="minutes a start takes")
    planner.add_argument("--repeat-s", type=float, default=30.0, help="seconds a repeat takes")
    planner.add_argument("--pair-s", type=float, default=6.0, help="seconds a seeded pair takes")
    planner.add_argument("--trials", type=_positive, default=PLAN_TRIALS)
    planner.add_argument("--seed", type=int, default=DEFAULT_SEED)
    planner.add_argument("--json", action="store_true")
    return parser


def _positive(text: str) -> int:
    value = int(text.replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must be a fraction between 0 and 1, such as 0.02")
    return value


def _fraction_or_zero(text: str) -> float:
    return 0.0 if float(text) == 0 else _fraction(text)


def _designs(args: argparse.Namespace, known: Sequence[power.Design]) -> list[power.Design]:
    """The asked designs among the published ones, or all."""
    if not getattr(args, "design", None):
        return list(known)
    out = []
    for text in args.design:
        kind, nc, nx = parse_design(text)
        design = (kind != "unpaired", nc, nx)
        if design not in known:
            listed = ", ".join(_short(one) for one in known)
            raise Refused(f"nothing is published for {text}; valid: {listed}")
        out.append(design)
    return out


def _short(design: power.Design) -> str:
    is_paired, nc, nx = design
    return f"pairs:{nx}" if is_paired else f"unpaired:{nc}v{nx}"


def _power(args: argparse.Namespace) -> Loaded:
    designs = _designs(args, list(published.POWER))
    trials = args.trials or published.POWER_TRIALS
    with _progress("power", trials * len(designs) * len(power.EFFECTS)) as step:
        rows = power.rows(
            designs,
            trials=trials,
            seed=args.seed,
            exact=args.exact,
            revision=getattr(args, "revision", None),
            step=step,
        )
    if getattr(args, "plot", None) is not None:
        effects = [MOST_EFFECT * (2 * i / (PLOT_POINTS - 1) - 1) for i in range(PLOT_POINTS)]
        with _progress("plot", trials * len(designs) * len(effects)) as step:
            curves = {
                power.design_name(design): power.curve(
                    design, effects, trials=trials, seed=args.seed, step=step
                )
                for design in designs
            }
        plot.save(args.plot, curves)
    return rows, []


def _no_effect(args: argparse.Namespace) -> Loaded:
    designs = _designs(args, list(published.NO_EFFECT))
    windows = args.trials or published.NO_EFFECT_WINDOWS
    with _progress("no effect", windows * len(designs)) as step:
        rows = no_effect.rows(
            designs,
            windows=windows,
            seed=args.seed,
            exact=args.exact,
            revision=getattr(args, "revision", None),
            step=step,
        )
    return rows, []


def _paired(args: argparse.Namespace) -> Loaded:
    keys = list(published.PAIRED)
    if getattr(args, "design", None):
        wanted = {parse_design(text)[2] for text in args.design}
        keys = [key for key in keys if key[1] in wanted]
        if not keys:
            raise Refused("nothing is published for this design; valid: seeded:6, seeded:12")
    total = sum((args.trials or key[5]) * len(paired.EFFECTS) for key in keys)
    with _progress("paired", total) as step:
        return paired.rows(keys, trials=args.trials, seed=args.seed, step=step), []


def _gate(args: argparse.Namespace) -> Loaded:
    trials = args.trials or GATE_TRIALS
    kl_trials = min(trials, GATE_KL_TRIALS)
    with _progress("gate", 3 * kl_trials) as step:
        return gate.rows(trials=trials, kl_trials=kl_trials, seed=args.seed, step=step)


def _resolution(_: argparse.Namespace) -> Loaded:
    return resolution.rows(), []


def _moderated(args: argparse.Namespace) -> Loaded:
    archives, windows = published.MODERATED_ARCHIVES, published.MODERATED_WINDOWS
    if args.trials:
        archives = max(2, args.trials // windows)
    trials = args.trials or published.POWER_TRIALS
    with _progress("moderated", 8 * archives * windows + 9 * trials) as step:
        rows = moderated.rows(archives=archives, windows=windows, seed=args.seed, step=step)
        rows += paired.widened_rows(trials=trials, seed=args.seed, step=step)
    return rows, []


def _bracket(args: argparse.Namespace) -> Loaded:
    trials = args.trials or published.BRACKET_TRIALS
    with _progress("bracket", trials * 2 * len(published.BRACKET)) as step:
        return power.bracket_rows(trials=trials, seed=args.seed, step=step), []


RUNNERS: dict[str, Callable[[argparse.Namespace], Loaded]] = {
    "power": _power,
    "no-effect": _no_effect,
    "paired": _paired,
    "gate": _gate,
    "resolution": _resolution,
    "moderated": _moderated,
    "bracket": _bracket,
}


def _plan(args: argparse.Namespace) -> int:
    total = args.trials * 3 * (len(plan.REPEATS) + len(plan.SEEDED))
    with _progress("plan", total) as step:
        found = plan.options(
            cv=args.cv,
            gain=args.gain,
            wanted=args.power,
            costs=plan.Costs(args.start_min, args.repeat_s, args.pair_s),
            trials=args.trials,
            seed=args.seed,
            start_sd=args.start_sd,
            step=step,
        )
    if args.json:
        print(json.dumps([option.__dict__ for option in found], indent=1))
    else:
        print(
            f"A true gain of {100 * args.gain:g} % at a cv of {100 * args.cv:g} %, "
            f"power {100 * args.power:g} % ({args.trials:,} trials a number):\n"
        )
        plan.print_options(found, args.power)
    return 0 if any(option.enough for option in found) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: all met; 1: a number differs (or no design is enough); 2: wrong use."""
    args = _parser().parse_args(argv)
    try:
        if getattr(args, "exact", False) and args.trials:
            raise Refused("--exact replays the published number of trials; leave --trials out")
        if args.command == "plan":
            return _plan(args)
        names = TABLES if args.command == "all" else (args.command,)
        judged: list[Row] = []
        beside: list[Row] = []
        for name in names:
            rows, more = RUNNERS[name](args)
            judged += rows
            beside += more
    except ValueError as error:
        print(f"sims: {error}", file=sys.stderr)
        return 2
    if args.json:
        document: dict[str, Any] = {
            "rows": [row.to_dict() for row in judged],
            "beside": [row.to_dict() for row in beside],
        }
        print(json.dumps(document, indent=1))
    else:
        print_rows(judged)
        if beside:
            print_rows(beside)
    return 1 if any(row.ok is False for row in judged) else 0
