"""What a window costs beside its cells, and how soon a kill is noticed, on two real hosts.

    python -m tests.benchmarks.bench_lab [--rounds 3] [--json]

Brings up the lab (root; see tests/lab), lets a stub serve on both hosts, and reports

- overhead: seconds of a C/X/C window outside of its cells, beyond the servers' own starts and
  stops, the watch, and Python's own start; by the journal's time since boot (goal: under 10 s)
- recovery: seconds from SIGKILL of the coordinator to the keeper's first act (goal: under 5 s)
- status: seconds of `dsv41 status` from start to end, ssh to both hosts included (goal: under 1 s)

Not a test: nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lab.lab import Lab, missing, sweep
from tests.lab.pair import Pair

_OWN_TIME = ("production-stop", "restore-start", "watch")


def journal(pair: Pair) -> list[dict[str, Any]]:
    """The newest window's journal."""
    newest = max(pair.campaign.glob("*-W-*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
    return [json.loads(line) for line in newest.read_text().splitlines()]


def overhead(pair: Pair) -> dict[str, float]:
    """One whole window: where its seconds went."""
    begun = time.monotonic()
    ended = pair.run(window=pair.write_window("pair", deciding=True))
    wall = time.monotonic() - begun
    assert ended.returncode in (0, 10, 11), ended.output
    lines = journal(pair)
    rows = (ended.folder / "values.jsonl").read_text().splitlines()
    cells = sum(json.loads(row)["duration_s"] for row in rows)
    servers = sum(
        line["seconds"]
        for line in lines
        if line["event"] == "end"
        and (line["step"] in _OWN_TIME or line["step"].startswith(("start:", "stop:")))
    )
    inside = lines[-1]["boottime"] - lines[0]["boottime"]
    return {
        "window_s": inside,
        "cells_s": cells,
        "servers_and_watch_s": servers,
        "overhead_s": inside - cells - servers,
        "process_s": wall,
    }


def recovery(pair: Pair) -> float:
    """Kill the coordinator while an experiment runs; seconds to the keeper's first line."""
    with pair.start(at="start:X:end") as process:
        pair.reached(process)
        process.kill()
        killed = time.clock_gettime(time.CLOCK_BOOTTIME)
        process.communicate()
    pair.keepers_end()
    first = next(line for line in journal(pair) if line["step"] == "recover")
    return float(first["boottime"]) - killed


def status(pair: Pair) -> float:
    """One `dsv41 status` over a campaign that has ended."""
    begun = time.monotonic()
    done = pair.dsv41("status")
    assert done.returncode == 0, done.stdout
    return time.monotonic() - begun


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="windows and kills (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    reason = missing()
    if reason:
        print(reason)
        return 4
    sweep()
    lab = Lab(os.getpid())
    try:
        lab.up()
        with tempfile.TemporaryDirectory() as folder, lab.entered():
            pair = Pair(lab, Path(folder))
            pair.serve()
            windows = [overhead(pair) for _ in range(args.rounds)]
            kills = [recovery(pair) for _ in range(args.rounds)]
            looks = [status(pair) for _ in range(2 * args.rounds + 1)]
            pair.clean()
    finally:
        lab.down()
    found = {
        **{key: statistics.median(w[key] for w in windows) for key in windows[0]},
        "kill_to_recovery_s": statistics.median(kills),
        "status_s": statistics.median(looks),
    }
    if args.json:
        print(json.dumps({"median": found, "windows": windows, "kills": kills, "status": looks}))
        return 0
    for key, value in found.items():
        print(f"{key:22} {value:7.2f}")
    print(f"medians of {args.rounds} windows, {args.rounds} kills, {len(looks)} looks")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
