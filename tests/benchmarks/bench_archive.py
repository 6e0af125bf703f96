"""Speed of the control archive, as ratios taken in one run on one disk.

    python -m tests.benchmarks.bench_archive [--rows 1000000] [--folder DIR]

Each line is a measured figure, its bound, and whether it holds; exit 1 if one does not. The
archive of a million rows is about 500 MB; it is made in a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_dsv41.archive import archive_append, archive_head, archive_spread
from pytest_dsv41.archive.index import index_path
from pytest_dsv41.archive.rows import FIELDS, KEY
from pytest_dsv41.archive.spread import spread_of
from pytest_dsv41.archive.verify import verify_archive

METRICS = ("ms_per_round", "accepted_per_round", "ttft_ms", "client_tok_s", "rounds")
BATCH = 50
ROUNDS = 40
DEFINITIONS = 100
APPEND_BOUND, VERIFY_BOUND, SPREAD_BOUND, MEMORY_BOUND_MB = 2.0, 3.0, 50.0, 64.0


def row(number: int) -> dict[str, Any]:
    """Return the row of a number: a hundred definitions, twelve repeats a window."""
    window, place = divmod(number, 12 * DEFINITIONS)
    definition, repeat = divmod(place, 12)
    cell, metric = divmod(definition, 5)
    return {
        "window": f"LANE-name-W-{20260101 + window}T000000Z",
        "cell": f"cell-{cell}",
        "metric": ("ms_per_round", "accepted_per_round", "ttft_ms", "client_tok_s", "rounds")[
            metric
        ],
        "value": 50 + number * 7919 % 1000 / 997,
        "max_tokens": 512,
        "commit": hashlib.sha1(b"commit", usedforsecurity=False).hexdigest(),
        "clock_cap_mhz": 2150,
        "clock_source": "start-log",
        "date": "20261027",
        "start": f"C{repeat % 2 + 1}",
        "repeat": repeat // 2,
        "prompt_sha256": hashlib.sha256(f"cell-{cell}".encode()).hexdigest(),
    }


def batches(first: int, count: int, size: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(first, first + count, size):
        yield [row(number) for number in range(start, min(start + size, first + count))]


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Lines:
    """Collects and prints the figures."""

    def __init__(self) -> None:
        self.missed = 0

    def show(
        self, what: str, value: float, unit: str = "", bound: str = "", holds: bool = True
    ) -> None:
        self.missed += not holds
        mark = "" if holds else "  <-- missed"
        print(f"{what:64} {value:10.2f} {unit:4} {bound}{mark}", flush=True)


def table(folder: Path, mode: str) -> sqlite3.Connection:
    path = folder / f"baseline-{mode}.sqlite"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"PRAGMA journal_mode={mode}")
    db.execute("PRAGMA synchronous=FULL")
    columns = ", ".join(f'"{field}"' for field in FIELDS)
    db.execute(f"CREATE TABLE row ({columns}, UNIQUE ({', '.join(KEY)}))")
    return db


def insert(db: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
    marks = ", ".join("?" for _ in FIELDS)
    db.execute("BEGIN")
    db.executemany(
        f"INSERT INTO row VALUES ({marks})", [[one.get(field) for field in FIELDS] for one in rows]
    )
    db.execute("COMMIT")


def appending(lines: Lines, folder: Path, archive: Path, label: str, first: int) -> None:
    """Compare durable batches of 50 rows, taken in turns on the same disk."""
    databases = {mode: table(folder, mode) for mode in ("delete", "wal")}
    times: dict[str, list[float]] = {"archive": [], "delete": [], "wal": []}
    for batch in batches(first, ROUNDS * BATCH, BATCH):
        times["archive"].append(seconds(lambda rows=batch: archive_append(archive, rows)))  # type: ignore[misc]
        for mode, db in databases.items():
            times[mode].append(seconds(lambda db=db, rows=batch: insert(db, rows)))  # type: ignore[misc]
    for db in databases.values():
        db.close()
    for mode in databases:
        (folder / f"baseline-{mode}.sqlite").unlink()
    middle = {name: statistics.median(some) for name, some in times.items()}
    lines.show(f"append {BATCH} rows, {label}: time", 1000 * middle["archive"], "ms")
    ratio = middle["archive"] / middle["delete"]
    lines.show(
        f"append {BATCH} rows, {label} / SQLite transaction, FULL",
        ratio,
        bound=f"at most {APPEND_BOUND:g}",
        holds=ratio <= APPEND_BOUND,
    )
    lines.show(
        f"append {BATCH} rows, {label} / SQLite transaction, FULL, WAL",
        middle["archive"] / middle["wal"],
        bound="(reported)",
    )


def hash_lines(archive: Path) -> None:
    with archive.open("rb") as file:
        for line in file:
            hashlib.sha256(line).digest()


def full_scan(archive: Path, where: dict[str, Any]) -> object:
    """Do what a filtered spread does, with nothing but the file."""
    values = []
    with archive.open("rb") as file:
        for line in file:
            found = json.loads(line)
            if all(found[field] == value for field, value in where.items()):
                values.append((found["window"], found["value"]))
    return spread_of(where, values)


PEAK = """
import sys
from pytest_dsv41.archive import archive_append, archive_head, archive_spread, iter_rows
from pytest_dsv41.archive.index import index_path
from pytest_dsv41.archive.verify import verify_archive
from pathlib import Path
path, what = Path(sys.argv[1]), sys.argv[2]
if what == "verify":
    verify_archive(path)
elif what == "index":
    index_path(path).unlink()
    archive_head(path)
elif what == "spread":
    archive_spread(path, "cell-7", "ms_per_round")
elif what == "rows":
    sum(1 for _ in iter_rows(path, {"date": "20261027"}))
# Not getrusage: its maximum is inherited from the process that started this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def peak(archive: Path, what: str) -> float:
    command = [sys.executable, "-c", PEAK, str(archive), what]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="make the archive in a folder here")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-archive-", dir=args.folder))
    lines = Lines()
    try:
        small, archive = folder / "small.jsonl", folder / "control-archive.jsonl"
        appending(lines, folder, small, "small archive", 0)
        for batch in batches(0, args.rows, 20_000):
            archive_append(archive, batch)
        assert archive_head(archive).rows == args.rows
        name = f"{args.rows:,} rows"
        appending(lines, folder, archive, name, args.rows)

        # In turns, and the quickest of each: what else the machine does slows both or neither.
        hashing, verifying = [], []
        for _ in range(5):
            hashing.append(seconds(lambda: hash_lines(archive)))
            verifying.append(seconds(lambda: verify_archive(archive)))
        lines.show(f"hash the lines of {name} one by one: time", min(hashing), "s")
        lines.show(f"verify {name}: time", min(verifying), "s")
        ratio = min(verifying) / min(hashing)
        lines.show(
            f"verify {name} / hashing them one by one",
            ratio,
            bound=f"at most {VERIFY_BOUND:g}",
            holds=ratio <= VERIFY_BOUND,
        )

        where = {"cell": "cell-7", "metric": "ms_per_round"}
        scanning = seconds(lambda: full_scan(archive, where))
        warm = [seconds(lambda: archive_spread(archive, **where)) for _ in range(5)]
        assert archive_spread(archive, **where) == full_scan(
            archive, {**where, **archive_spread(archive, **where).definition}
        )
        lines.show(f"filtered spread on {name}: time", 1000 * min(warm), "ms", "goal under 100")
        ratio = scanning / statistics.median(warm)
        lines.show(
            f"full scan / filtered spread on {name}",
            ratio,
            bound=f"at least {SPREAD_BOUND:g}",
            holds=ratio >= SPREAD_BOUND,
        )
        index_path(archive).unlink()
        lines.show(f"index of {name} built anew: time", seconds(lambda: archive_head(archive)), "s")
        for what in ("verify", "index", "rows", "spread"):
            more = peak(archive, what) - peak(small, what)
            lines.show(
                f"peak memory of {what}: {name} more than {ROUNDS * BATCH:,} rows",
                more,
                "MB",
                f"at most {MEMORY_BOUND_MB:g}",
                more <= MEMORY_BOUND_MB,
            )
    finally:
        shutil.rmtree(folder)
    return 1 if lines.missed else 0


if __name__ == "__main__":
    sys.exit(main())
