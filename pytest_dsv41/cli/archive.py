"""`dsv41 archive`: head, append, verify, query, spread, plot and migrate of a control archive.

Exit codes: 0 done or valid, 1 the archive is not what it should be (verify: a finding; migrate:
it cannot be done), 4 wrong use or a refused row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..text import counted, one_line

if TYPE_CHECKING:
    from ..archive import Head
    from ..archive.history import Backfill

__all__ = [
    "HELP",
    "checkpoint_argument",
    "clock_arguments",
    "configure",
    "known_heads",
    "patience",
    "print_backfill",
    "run",
]

HELP = "the control archive: head, append, verify, query, spread, plot, migrate"

_FILTERS = {
    "window": str,
    "cell": str,
    "metric": str,
    "start": str,
    "repeat": int,
    "max_tokens": int,
    "clock_cap_mhz": int,
    "commit": str,
    "prompt_sha256": str,
    "date": str,
    "clock_source": str,
}
_MOST_HOSTS = 1000
_ARCHIVE_BEGINS = b'{"schema":"dsv41-control-archive-'
_EXAMPLES = {"cell": "short-b1", "metric": "ms_per_round"}
_FLAGS = {"clock_cap_mhz": "--clock", "prompt_sha256": "--prompt", "max_tokens": "--max-tokens"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str, work: Any) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text)
        sub.set_defaults(work=work)
        return sub

    head = action("head", "row count and head sha256, as JSON: a checkpoint", _head)
    _archive(head)

    append = action("append", "append the finished control starts of window folders", _append)
    append.add_argument("folder", metavar="WINDOW", nargs="+", help="a window's folder")
    append.add_argument(
        "--archive",
        metavar="FILE",
        help="default: control-archive.jsonl of the window's campaign, else beside its folder",
    )
    checkpoint_argument(append)
    clock_arguments(append)

    verify = action(
        "verify", "verify the chain, and with checkpoints that nothing is missing", _verify
    )
    _archive(verify)
    verify.add_argument(
        "--checkpoints",
        metavar="PATH",
        nargs="+",
        action="extend",
        default=[],
        help="summary.json files, files of heads, or campaign folders",
    )
    verify.add_argument(
        "--fields", action="store_true", help="check every field and key of every row too (slower)"
    )
    verify.add_argument("--json", action="store_true", help="print a JSON object")

    query = action("query", "rows that match, as CSV, JSON, JSON lines or Parquet", _query)
    _archive(query)
    _filters(query)
    query.add_argument(
        "--format", choices=("csv", "json", "jsonl", "parquet"), help="default: csv, or by --out"
    )
    query.add_argument("--out", metavar="FILE", help="write to FILE (parquet needs it)")

    spread = action("spread", "spreads of a cell's metric, one per definition", _spread)
    _archive(spread)
    _filters(spread, required=("cell", "metric"))
    spread.add_argument("--json", action="store_true", help="print a JSON array")

    plot = action("plot", "a metric over time per definition, with control limits and drift", _plot)
    _archive(plot)
    _filters(plot, required=("cell", "metric"))
    plot.add_argument("--out", metavar="FILE.svg", help="write the plot; without it the text alone")

    migrate = action(
        "migrate", "rebuild a v1 or v3 archive as v4; a dry run without --apply", _migrate
    )
    _archive(migrate)
    migrate.add_argument(
        "--windows",
        metavar="DIR",
        nargs="+",
        action="extend",
        default=[],
        help="window folders or campaign folders that prove what old rows lack",
    )
    migrate.add_argument(
        "--prompts", metavar="FILE", help='v3: JSON {"<window>": {"<cell>": "<prompt sha256>"}}'
    )
    clock_arguments(migrate)
    migrate.add_argument("--apply", action="store_true", help="replace the file, keep the old copy")
    migrate.add_argument("--json", action="store_true", help="print a JSON object")


def _archive(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "archive",
        metavar="ARCHIVE",
        nargs="?",
        default="dsv41-windows/control-archive.jsonl",
        help="the archive's file (default: %(default)s)",
    )


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add how an append is held against what the campaign remembers."""
    parser.add_argument(
        "--no-checkpoints",
        action="store_true",
        help="append although the archive lacks rows that the campaign's summaries know",
    )


def known_heads(args: argparse.Namespace, archive: Path) -> list[Head]:
    """Return the heads that the summaries beside an archive know of it."""
    from ..archive.verify import read_checkpoints

    if args.no_checkpoints:
        return []
    return [point.head for point in read_checkpoints([archive.parent], archive)]


def _hosts(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= _MOST_HOSTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hosts; valid: 1 to 1000")
    return int(text)


def clock_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how a start's clock cap is proved."""
    parser.add_argument(
        "--clock-log", metavar="FILE", help="'<UTC> <MHz>' lines, for starts without a start log"
    )
    parser.add_argument(
        "--hosts",
        metavar="N",
        type=_hosts,
        default=2,
        help="hosts whose clock cap a start log must prove (default: %(default)s)",
    )


def _filters(parser: argparse.ArgumentParser, required: tuple[str, ...] = ()) -> None:
    for field, kind in _FILTERS.items():
        flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
        if field in required:
            parser.add_argument(
                flag,
                dest=f"where_{field}",
                metavar=field.upper(),
                required=True,
                help=f"which {field}, such as {_EXAMPLES[field]}",
            )
        else:
            parser.add_argument(
                flag,
                dest=f"where_{field}",
                metavar=field.upper(),
                type=kind,
                action="append",
                help="may be given again: any of them",
            )


def _where(args: argparse.Namespace) -> dict[str, Any]:
    given = {field: getattr(args, f"where_{field}") for field in _FILTERS}
    return {
        field: value[0] if isinstance(value, list) and len(value) == 1 else value
        for field, value in given.items()
        if value is not None
    }


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    with patience(f"archive {args.action}"):
        code: int = args.work(args)
    return code


@contextlib.contextmanager
def patience(what: str, *, after_s: float = 2.0) -> Iterator[None]:
    """Say on standard error that work goes on, from `after_s` seconds on.

    A terminal gets one line that renews itself, unless rows are printed on it; anything else a
    line every ten seconds.
    """
    terminal = sys.stderr.isatty()
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        wait = after_s
        while not done.wait(wait):
            text = f"{what}: {time.monotonic() - began:.0f} s, at work"
            line = f"\r\033[K{text}" if terminal else f"{text}\n"
            print(line, end="", file=sys.stderr, flush=True)
            wait = 1.0 if terminal else 10.0

    teller = threading.Thread(target=tell, daemon=True)
    if not (terminal and sys.stdout.isatty() and what.endswith(" query")):
        teller.start()
    try:
        yield
    finally:
        done.set()
        if teller.ident is not None:
            teller.join()
            if terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"{path}: there is no such archive")
    return path


@contextlib.contextmanager
def _whole(name: str, archive: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the name `name` when all is written.

    A command that fails leaves no half file. What is no regular file is not replaced, nor is an
    archive or a file beside one: an answer is never worth the rows that it was read from.
    """
    # Through a symbolic link it is the file behind it that is written.
    out = Path(os.path.realpath(name))
    if not out.parent.is_dir():
        raise UsageError(f"--out {name}: there is no folder {out.parent}")
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {name}: is no regular file; valid: the name of a file")
    real = Path(os.path.realpath(archive))
    beside = out.parent == real.parent and out.name.startswith(f"{real.name}.")
    if out == real or beside or (out.exists() and _is_archive(out, real)):
        raise UsageError(f"--out {name}: is a control archive, or belongs to one; name another")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        part = Path(folder) / out.name
        try:
            yield part
            part.replace(out)
        except OSError as error:
            error.add_note(f"--out {name}: nothing was written")
            raise


def _is_archive(out: Path, archive: Path) -> bool:
    with out.open("rb") as file:
        return out.samefile(archive) or file.read(len(_ARCHIVE_BEGINS)) == _ARCHIVE_BEGINS


def _head(args: argparse.Namespace) -> int:
    from ..archive import archive_head

    print(json.dumps(archive_head(_existing(args.archive)).to_dict()))
    return 0


def _archive_of(folder: Path) -> Path:
    """Return where a window's control rows belong: its campaign's archive."""
    try:
        campaign = json.loads((folder / "target.json").read_bytes()).get("campaign")
    except (OSError, ValueError, AttributeError):
        campaign = None
    root = Path(campaign) if isinstance(campaign, str) else folder.resolve().parent
    return root / "control-archive.jsonl"


def _append(args: argparse.Namespace) -> int:
    from ..archive.history import backfill

    for name in args.folder:
        folder = Path(name)
        archive = Path(args.archive) if args.archive else _archive_of(folder)
        done = backfill(
            archive,
            [folder],
            clock_log=args.clock_log,
            hosts=args.hosts,
            checkpoints=known_heads(args, archive),
        )
        print_backfill(done)
    return 0


def print_backfill(done: Backfill) -> None:
    """Print what each window gave, what was left out, and the archive's new head."""
    for window, rows, new in done.windows:
        print(
            one_line(f"{window}: {counted(rows, 'control row')}, {new} new, in {done.archive}", 500)
        )
    for reason in done.refused:
        print("  " + one_line(f"left out: {reason}", 500))
    print(f"head: {counted(done.head.rows, 'row')}, {done.head.sha256}")


def _verify(args: argparse.Namespace) -> int:
    from ..archive.verify import read_checkpoints, verify_archive

    points = read_checkpoints(args.checkpoints, args.archive)
    found = verify_archive(args.archive, points, fields=args.fields)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0 if found.ok else 1
    if found.ok:
        print(
            f"VALID: {one_line(found.path, 300)}: {counted(found.head.rows, 'row')}, "
            f"head {found.head.sha256}, {counted(found.checkpoints, 'checkpoint')}"
        )
    else:
        print(
            f"BROKEN: {one_line(found.path, 300)}: the chain holds for "
            f"{counted(found.head.rows, 'row')}, {counted(found.checkpoints, 'checkpoint')}"
        )
    for finding in found.findings:
        print(f"  {one_line(finding.message, 500)}")
    for note in found.notes:
        print(f"  note: {one_line(note, 500)}")
    return 0 if found.ok else 1


def _query(args: argparse.Namespace) -> int:
    from ..archive import iter_rows
    from ..archive.export import FORMATS, write_parquet, write_text

    ending = Path(args.out).suffix[1:] if args.out else ""
    form = args.format or (ending if ending in FORMATS else "csv")
    rows = iter_rows(_existing(args.archive), _where(args))
    if args.out is None:
        if form == "parquet":
            raise UsageError("--format parquet: needs --out FILE")
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Rows are as they are in a file, whatever the terminal can show.
            sys.stdout.reconfigure(encoding="utf-8", errors="strict")
        write_text(rows, sys.stdout, form)
        return 0
    with _whole(args.out, Path(args.archive)) as part:
        if form == "parquet":
            count = write_parquet(rows, part)
        else:
            with part.open("w", encoding="utf-8", newline="") as file:
                count = write_text(rows, file, form)
    print(f"{counted(count, 'row')}: {one_line(args.out, 300)}")
    return 0


def _picked(args: argparse.Namespace) -> Any:
    """Return the spreads of the definitions that the filters leave."""
    from ..archive import archive_spread, archive_spreads
    from ..archive.rows import DEFINITION

    path, where = _existing(args.archive), _where(args)
    cell, metric = where.pop("cell"), where.pop("metric")
    spreads = archive_spreads(path, cell, metric)
    if not where:
        return spreads
    found = []
    for spread in spreads:
        definition = spread.definition
        if all(
            definition[field] in _many(value)
            for field, value in where.items()
            if field in DEFINITION
        ):
            other = {field: value for field, value in where.items() if field not in DEFINITION}
            one = archive_spread(path, cell, metric, {**definition, **other}) if other else spread
            if one.n:
                found.append(one)
    return found


def _many(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _title(spread: Any) -> str:
    return (
        f"{spread.cell}/{spread.metric}: {spread.max_tokens} tokens, {spread.clock_cap_mhz} MHz, "
        f"commit {spread.commit[:12]}, prompt {spread.prompt_sha256[:12]}"
    )


def _spread(args: argparse.Namespace) -> int:
    spreads = _picked(args)
    if args.json:
        print(json.dumps([spread.to_dict() for spread in spreads], indent=2))
        return 0
    if not spreads:
        print("no such rows")
    for spread in spreads:
        print(one_line(_title(spread), 400))
        print(
            f"  {counted(spread.n, 'value')} in {counted(len(spread.windows), 'window')}, "
            f"mean {spread.mean:.6g}, "
            f"{spread.minimum:.6g} to {spread.maximum:.6g}; CV of one repeat within a window "
            f"{_percent(spread.cv_within)}, between windows {_percent(spread.cv_between)}, of all "
            f"values {_percent(spread.cv)}"
        )
    return 0


def _plot(args: argparse.Namespace) -> int:
    from ..archive import iter_rows
    from ..archive.drift import chart, svg

    charts = [
        chart(
            spread,
            {row["window"]: row["date"] for row in iter_rows(args.archive, spread.definition)},
        )
        for spread in _picked(args)
    ]
    if not charts:
        print("no such rows")
        return 0
    for one in charts:
        print(one_line(_title(one.spread), 400))
        if one.low is None or one.high is None:
            print(f"  {counted(len(one.points), 'window')}: limits need three")
        else:
            print(f"  mean {one.centre:.6g}, control limits {one.low:.6g} to {one.high:.6g}")
        for window, value in one.points:
            print("  " + one_line(f"{window}  {value:.6g}", 300))
        for drift in one.drift:
            print("  " + one_line(f"DRIFT: {drift}", 400))
    if args.out:
        with _whole(args.out, Path(args.archive)) as part:
            part.write_text(svg(charts), encoding="utf-8")
        print(f"plot: {one_line(args.out, 300)}")
    return 0


def _folders(names: list[str]) -> list[Path]:
    from ..archive.history import window_folders

    found: list[Path] = []
    for name in names:
        folder = Path(name)
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder")
        is_window = any((folder / file).exists() for file in ("summary.json", "plan.json", "cmd"))
        found += [folder] if is_window else window_folders(folder)
    return found


def _migrate(args: argparse.Namespace) -> int:
    from ..archive.migrate import migrate

    prompts = None
    if args.prompts:
        try:
            prompts = json.loads(Path(args.prompts).read_bytes())
        except (ValueError, RecursionError):
            prompts = None
        if not isinstance(prompts, dict) or not all(
            isinstance(cells, dict) for cells in prompts.values()
        ):
            raise UsageError(f'{args.prompts}: is not {{"<window>": {{"<cell>": "<sha256>"}}}}')
    found = migrate(
        _existing(args.archive),
        _folders(args.windows),
        prompts=prompts,
        clock_log=args.clock_log,
        hosts=args.hosts,
        apply=args.apply,
    )
    code = 1 if found.problems else 0
    if args.json:
        shown = {**vars(found), "head": found.head.to_dict() if found.head else None}
        print(json.dumps(shown, indent=2))
        return code
    state = "APPLIED" if found.applied else "REFUSED" if found.problems else "DRY RUN"
    print(
        f"{state}: {found.version} to v4: {counted(found.rows, 'row')} of "
        f"{counted(found.windows, 'window')}"
    )
    for problem in found.problems:
        print(f"  {one_line(problem, 500)}")
    if not found.problems and found.head is not None:
        print(
            f"  multiset equal on every old field: {'yes' if found.multiset_equal else 'no'}; "
            f"{found.identities} prompt identities, one for each window and cell"
        )
        print(f"  head: {counted(found.head.rows, 'row')}, {found.head.sha256}")
    for note in found.notes:
        print(f"  note: {one_line(note, 500)}")
    if found.kept:
        print(f"  the old file is kept: {one_line(found.kept, 300)}")
    elif not found.problems and found.head is not None:
        print("  nothing was changed; --apply replaces the file")
    return code
