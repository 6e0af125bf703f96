"""`dsv41 replay RECORD`: the values of an item again, from its raw record alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "Make an item's values again from its raw record; exit 0 when they are the recorded ones."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "record", type=Path, metavar="RECORD", help="a window's raw/<item>.jsonl, or the window"
    )
    parser.add_argument("item", nargs="?", help="the item, when RECORD is a window's folder")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Replay and compare; 1 when a value comes out otherwise or the record is now refused."""
    from ..errors import MeasurementFailed, MeasurementRefused, UsageError
    from ..measure.record import replay
    from ..text import one_line

    path: Path = args.record
    if path.is_dir():
        folder = path / "raw" if (path / "raw").is_dir() else path
        if args.item is None:
            names = ", ".join(sorted(file.stem for file in folder.glob("*.jsonl")))
            raise UsageError(f"{path}: name an item; valid: {names or 'none recorded'}")
        path = folder / f"{args.item}.jsonl"
        if path.parent != folder:
            raise UsageError(f"{args.item}: not an item's name")
    try:
        again = replay(path)
    except (MeasurementFailed, MeasurementRefused) as error:
        print(f"{path.name}: now {error.kind}: {one_line(str(error))}")
        return 1
    if args.json:
        values = {name: value.to_json() for name, value in again.values.items()}
        print(
            json.dumps(
                {
                    "record": str(path),
                    "same": again.same,
                    "differences": list(again.differences),
                    "parsed_again": again.parsed_again,
                    "values": values,
                    "missing": dict(again.missing),
                    "notes": list(again.notes),
                },
                indent=1,
            )
        )
        return 0 if again.same else 1
    for name, value in again.values.items():
        print(f"  {name:<20}{value.value:>14.3f} {value.unit}")
    for difference in again.differences:
        print(f"  {difference}")
    from_what = "bytes" if again.parsed_again else "events"
    print(f"{'same' if again.same else 'DIFFERENT'}, from the recorded {from_what}")
    return 0 if again.same else 1
