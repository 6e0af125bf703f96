"""`dsv41 aa-pilot run | compare | accumulate`: production against itself, seeded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MeasurementFailed, MeasurementRefused, UsageError
from ..text import counted, one_line
from .arguments import new_file, seconds

if TYPE_CHECKING:
    from ..measure.cell import Sampling
    from ..measure.seeded import SeededCell
    from ..quality.pilot import PilotPlan

__all__ = ["HELP", "configure", "run"]

_SAID_EVERY_S = 30.0
_KEPT = "a start that was measured counts: its record is never replaced"

HELP = "production against itself: run a start, compare two, pool several pilots"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)

    one = acts.add_parser(
        "run", help="one start: seeded cells, the probe, in start A the bridge; 0 whole, 1 not"
    )
    one.add_argument("--url", required=True, help="where production's configuration answers")
    one.add_argument(
        "--start", required=True, choices=("A", "B"), help="A: the first; B: after a restart"
    )
    one.add_argument("--out", required=True, type=Path, metavar="FILE", help="the start's record")
    one.add_argument(
        "--execute", action="store_true", help="run it; without, only print what would run"
    )
    one.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    one.add_argument("--model", default="", help="default: the first of /v1/models")
    one.add_argument(
        "--cell",
        action="append",
        metavar="NAME",
        help="a seeded cell, repeatable (default: the four registered ones)",
    )
    one.add_argument(
        "--subset",
        metavar="S",
        help="the probe's prompts, or 'none' (default: short,32k)",
    )
    one.add_argument(
        "--each", type=int, metavar="N", help="of each subset only the first N prompts"
    )
    one.add_argument("--no-bridge", action="store_true", help="start A without the bridge")
    one.add_argument(
        "--bridge-sampling",
        metavar="JSON",
        help='settings of production in the bridge (default: {"thinking": true, "priority": 10})',
    )
    one.add_argument("--commit", help="the 40 hex digits that name production")
    one.add_argument("--clock", type=int, metavar="MHZ", help="clock cap of the start")
    one.add_argument(
        "--deadline", type=seconds, metavar="S", help="default: three times the estimate"
    )

    two = acts.add_parser("compare", help="start A beside start B; 0 PASSED, 2 FAILED")
    two.add_argument("a", type=Path, metavar="A", help="record of start A")
    two.add_argument("b", type=Path, metavar="B", help="record of start B")
    two.add_argument("--out", type=Path, metavar="FILE", help="write the pilot's record")
    two.add_argument("--json", action="store_true", help="print the pilot's record")

    many = acts.add_parser(
        "accumulate", help="pool pilots of one definition; the start_sd to register"
    )  # fmt: skip
    many.add_argument("pilots", nargs="+", type=Path, metavar="PILOT", help="records of compare")
    many.add_argument("--out", type=Path, metavar="FILE", help="write the pooled record")
    many.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="of the start_sd line, repeatable (default: decode_tok_s alone, ms_per_round beside)",
    )
    many.add_argument("--json", action="store_true", help="print the pooled record")


def run(args: argparse.Namespace) -> int:
    """Run the chosen act."""
    acts: dict[str, Callable[[argparse.Namespace], int]] = {
        "run": _run,
        "compare": _compare,
        "accumulate": _accumulate,
    }
    return acts[args.act](args)


# -- run ------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from ..measure.group import Endpoint
    from ..quality.pilot import probe_path, refused_parts, run_start
    from ..quality.probe import save_probe
    from ..quality.sealed import outside_git, write_sealed

    plan = _plan(args)
    estimate = plan.estimate_s(args.start)
    if args.commit is not None and not re.fullmatch("[0-9a-f]{40}", args.commit):
        raise UsageError(f"--commit {one_line(args.commit, 60)}: 40 hex digits are needed")
    if args.clock is not None and args.clock < 1:
        raise UsageError(f"--clock {args.clock}: at least 1 MHz")
    new_file(args.out, _KEPT)
    if plan.prompts:
        new_file(outside_git(probe_path(args.out)), _KEPT)
    if not args.execute:
        _show_plan(plan, args.start, estimate)
        print("nothing was sent; add --execute to run it")
        return 0
    try:
        with _stop_on_signals() as stop, _shown_line() as show:
            record, probe = run_start(
                Endpoint(args.url, args.engine, args.model),
                plan,
                start=args.start,
                deadline_s=3 * estimate + 120.0 if args.deadline is None else args.deadline,
                commit=args.commit,
                clock_cap_mhz=args.clock,
                stop=stop,
                progress=show,
            )
    except (MeasurementFailed, MeasurementRefused) as error:
        word = "FAILED" if isinstance(error, MeasurementFailed) else "REFUSED"
        told = f"{word} {error.kind}: {one_line(str(error), 500)}; nothing was written"
        print(f"dsv41 aa-pilot run: {told}", file=sys.stderr)
        return 1
    if probe is not None:
        save_probe(probe_path(args.out), probe)
    write_sealed(args.out, record)
    _show_start(record)
    print(f"record: {args.out}")
    return 1 if refused_parts(record) else 0


def _plan(args: argparse.Namespace) -> PilotPlan:
    from ..measure.seeded import SEEDED_CELLS
    from ..quality.pilot import PILOT_SUBSET, plan_pilot

    sampling = None if args.bridge_sampling is None else _sampling(args.bridge_sampling)
    if args.each is not None and args.each < 1:
        raise UsageError(f"--each {args.each}: at least 1")
    return plan_pilot(
        tuple(args.cell or SEEDED_CELLS),
        subset=None if args.subset == "none" else args.subset or PILOT_SUBSET,
        each=args.each,
        bridge=args.start == "A" and not args.no_bridge,
        bridge_sampling=sampling,
    )


def _sampling(text: str) -> Sampling:
    """Read a cell's sampling from JSON, every value of its field's own type."""
    from pydantic import TypeAdapter, ValidationError

    from ..durable import dump_json, parse_json
    from ..measure.cell import Sampling

    try:
        table = parse_json(text)
        if not isinstance(table, dict):
            raise ValueError("a JSON object with the fields of a cell's sampling is needed")
        valid = [field.name for field in dataclasses.fields(Sampling)]
        for name in table:
            if name not in valid:
                raise ValueError(f"{name} is no field; valid: {', '.join(valid)}")
        return TypeAdapter(Sampling).validate_json(dump_json(table), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        told = one_line(f"{where}: {first['msg']}" if where else first["msg"], 120)
    except ValueError as error:
        told = one_line(str(error), 200)
    raise UsageError(f"--bridge-sampling: {told}")


def _show_plan(plan: PilotPlan, start: str, estimate: float) -> None:
    print(f"start {start}: about {estimate / 60:.1f} min")

    def show(cells: Sequence[SeededCell]) -> None:
        for cell in cells:
            print(
                f"  {cell.name}: {counted(cell.pairs, 'pair')} of {cell.batch} x "
                f"{cell.max_tokens} tokens, about {cell.estimated_s * cell.pairs:.0f} s"
            )

    show(plan.cells)
    if plan.prompts:
        print(f"  probe: {counted(len(plan.prompts), 'prompt')}, about {_probe_s(plan)} s")
    show(plan.bridge)


def _probe_s(plan: PilotPlan) -> str:
    from ..quality.pilot import probe_estimate_s

    return f"{probe_estimate_s(plan.prompts):.0f}"


def _show_start(record: Mapping[str, Any]) -> None:
    """Say what each cell and the probe came to, in the order in which they ran."""

    def show(cells: Mapping[str, Any]) -> None:
        for name, cell in cells.items():
            told = cell["refused"] if "refused" in cell else counted(len(cell["pairs"]), "pair")
            print(f"  {name}: {one_line(told, 300)}")

    show(record["cells"])
    probed = record["probe"]
    if probed is not None:
        told = f"subset {probed['subset']}" if "subset" in probed else probed["refused"]
        print(f"  probe: {one_line(told, 300)}")
    show(record["bridge"] or {})


# -- compare --------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from ..quality.aa_compare import START_SCHEMA, compare_starts
    from ..quality.pilot import probe_path
    from ..quality.probe import load_probe
    from ..quality.sealed import read_sealed, write_sealed

    if args.out is not None:
        new_file(args.out, _KEPT)
    a, b = (read_sealed(path, "start", START_SCHEMA, dict)[0] for path in (args.a, args.b))
    beside = [probe_path(path) for path in (args.a, args.b)]
    there = all(path.exists() for path in beside)
    probes = (load_probe(beside[0]), load_probe(beside[1])) if there else None
    with _records_of(args.a, args.b):
        pilot = compare_starts(a, b, probes=probes)
    if args.out is not None:
        write_sealed(args.out, pilot)
    if args.json:
        print(json.dumps(pilot, indent=2))
    else:
        _show_pilot(pilot, args.out)
        if probes is not None and "refused" not in (pilot["distribution"] or {}):
            print(f"for a band: dsv41 dist-gate band {beside[0]} {beside[1]} … --out FILE")
    return 0 if pilot["passed"] else 2


def _show_pilot(pilot: Mapping[str, Any], out: Path | None) -> None:
    from ..quality.aa_compare import registration_line

    if pilot["passed"]:
        print(
            "PASSED: every seeded cell with one request at a time gave the same tokens in the same "
            "rounds in both starts"
        )
    else:
        print("FAILED: expect_identical is forbidden; measured diff CVs only")
        for reason in pilot["reasons"]:
            print(f"  {one_line(reason, 300)}")
    for note in pilot["notes"]:
        print(f"note: {one_line(note, 300)}")
    for name, cell in pilot["cells"].items():
        count = cell["pairs"]
        if not count:
            print(f"{name}: {one_line(cell['fault'], 300)}")
            continue
        role = "" if cell["decides"] else " (reported only)"
        print(
            f"{name}{role}: {cell['outputs_identical']} of {counted(count, 'pair')} with "
            f"identical outputs, "
            f"{cell['rounds_identical']} with identical rounds"
        )
        for one in cell["series"]:
            print(
                f"  {one['metric']:<20} diff CV {100 * one['diff_cv']:.3f} %, start SD "
                f"{100 * one['start_sd']:.3f} % (1 df; the pairs' own spread alone gives "
                f"{100 * one['pair_noise']:.3f} %)"
            )
        for metric, why in cell["missing"].items():
            print(f"  {metric:<20} {one_line(why, 120)}")
    found = pilot["distribution"]
    if found is not None:
        print(f"probe, A against B: {_distribution_text(found)}")
    if pilot["bridge"]:
        _show_bridge(pilot["bridge"])
    if out is not None:
        print(f"for the filter: dsv41 resolution --diff-cv {out} …")
        print(f"pool it with others before registering: dsv41 aa-pilot accumulate {out} …")
        line = registration_line(pilot, "start_sd", _primaries(pilot))
        if line:
            print(f"one pilot alone (1 df) would register: {line}")


def _distribution_text(found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return one_line(found["refused"], 300)
    return (
        f"mean KL {found['mean_kl']:.3g} nats over {counted(found['positions'], 'position')} "
        f"({found['subset']}), {counted(found['disagreements'], 'other likeliest token')}, "
        f"{found['untrusted']} with a common mass below 0.99"
    )


def _show_bridge(report: Mapping[str, Any]) -> None:
    print("bridge, accepted per round (reported only):")
    for name, row in report["cells"].items():
        if row["accepted_per_round"] is None:
            print(f"  {name:<30} {one_line(row['missing'], 120)}")
            continue
        beside = row["missing"]
        if row["reference"]:
            known = row["reference"]
            within = f" [{known['low']}, {known['high']}]" if known["low"] is not None else ""
            beside = f"reference {known['value']:.3f}{within} of {known['when']}"
        print(f"  {name:<30} {row['accepted_per_round']:.3f}   {beside}")
    for prompt, difference in report["lengths"].items():
        told = "not read" if difference is None else f"{difference:+.3f}"
        print(f"  {prompt}: 512 minus 1,500 tokens {told}")
    print(f"  {report['h4']}")


# -- accumulate -----------------------------------------------------------------------------------


def _accumulate(args: argparse.Namespace) -> int:
    from ..quality.aa_compare import (
        ACCUMULATED_SCHEMA,
        PILOT_SCHEMA,
        accumulate,
        registration_line,
    )
    from ..quality.sealed import read_sealed, write_sealed

    if args.out is not None:
        new_file(args.out, _KEPT)
    schemas = (PILOT_SCHEMA, ACCUMULATED_SCHEMA)
    records = [read_sealed(path, "pilot", schemas, dict)[0] for path in args.pilots]
    with _records_of(*args.pilots):
        pooled = accumulate(records)
        keys = _primaries(pooled)
    if args.metric:
        keys = [key for key in pooled["start_sd"] if key.rpartition("/")[2] in args.metric]
        if not keys:
            valid = ", ".join(sorted({key.rpartition("/")[2] for key in pooled["start_sd"]}))
            raise UsageError(f"--metric {', '.join(args.metric)}: not measured; valid: {valid}")
    if args.out is not None:
        write_sealed(args.out, pooled)
    if args.json:
        print(json.dumps(pooled, indent=2))
        return 0
    count = len(pooled["pilots"])
    passed = sum(bool(pilot["passed"]) for pilot in pooled["pilots"])
    print(f"{counted(count, 'pilot')} of one definition, {passed} PASSED")
    for key, sd in pooled["start_sd"].items():
        print(
            f"  {key:<40} start SD {100 * sd:.3f} % ({pooled['df'][key]} df; up to "
            f"{100 * pooled['start_sd_upper'][key]:.3f} % is plausible), diff CV "
            f"{100 * pooled['diff_cv'][key]:.3f} %"
        )
    lines = [
        registration_line(pooled, "start_sd", keys),
        registration_line(pooled, "diff_cv", keys),
    ]
    if any(lines):
        least = min(pooled["df"][key] for key in keys)
        print(f"to register under [window], start_sd with {least} df:")
        print("\n".join(filter(None, lines)))
    else:
        print("every figure is 0: there is nothing to register")
    return 0


def _primaries(record: Mapping[str, Any]) -> list[str]:
    """The keys of the metrics that decide a seeded cell (RULES section 2)."""
    keys = []
    for name, cell in record["definition"]["cells"].items():
        alone = len(cell["cell"]["prompts"]) == 1
        metric = "decode_tok_s" if alone else "ms_per_round"
        if f"{name}/{metric}" in record["start_sd"]:
            keys.append(f"{name}/{metric}")
    return keys


@contextmanager
def _records_of(*paths: Path) -> Iterator[None]:
    """Say in one line that sealed records of somebody else's making lack what they must hold."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        names = ", ".join(map(str, paths))
        lacks = f"has no {error}" if isinstance(error, KeyError) else one_line(str(error), 100)
        raise UsageError(f"{names}: no whole record of the pilot: {lacks}") from None


# -- the terminal ---------------------------------------------------------------------------------


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """A signal ends the run at once, sockets closed, and it says so."""
    from ..signals import Signals

    stop = threading.Event()
    signals = Signals(lambda _reason: stop.set())
    signals.install()
    try:
        yield stop
    finally:
        signals.remove()


@contextmanager
def _shown_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal that the next one replaces; elsewhere a line every half minute."""
    shown = sys.stderr.isatty()
    said = time.monotonic()

    def show(text: str) -> None:
        nonlocal said
        if not shown and time.monotonic() - said >= _SAID_EVERY_S:
            said = time.monotonic()
            print(one_line(text, 100), file=sys.stderr, flush=True)
        elif shown:
            print(f"\r\033[K{one_line(text, 100)}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
