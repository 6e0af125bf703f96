"""Speed of reading a recording's headers and diagonals, as ratios taken in one run on one disk.

    python -m tests.benchmarks.bench_payload [--files 24576] [--folder DIR]

Compared with reading the same files plainly, one after the other: open, read, close. 24,576 files
of the real width are 40 GB; here they are that many names of 96 files (hard links), so that both
sides find every byte in memory. Each line is a measured figure, its bound, and whether it holds;
exit 1 if one does not.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_dsv41.payload.experts import derive
from pytest_dsv41.payload.grams import read_grams

BOUND = 1.0
LAYERS = 48
K = 640
TURNS = 3


def main(argv: list[str] | None = None) -> int:
    """Make the recording, time both sides in turn, print the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=24576)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        paths = _recording(folder, args.files)

        def plain() -> None:
            for path in paths:
                with path.open("rb", buffering=0) as file:
                    file.read()

        def ours() -> None:
            grams, _ = read_grams(folder, stem="ffn_down_exps")
            if len(grams) != len(paths):
                raise SystemExit("not every file was read")

        plain()
        took = {side: _turns(side) for side in (plain, ours)}
        grams, _ = read_grams(folder, stem="ffn_down_exps")
        start = time.perf_counter()
        derive(grams)
        law = time.perf_counter() - start
    finally:
        shutil.rmtree(folder)
    ratio = statistics.median(took[ours]) / statistics.median(took[plain])
    holds = ratio <= BOUND
    each = statistics.median(took[ours]) / len(paths) * 1e6
    print(f"{len(paths)} files, k {K}: {each:.1f} µs each; the law itself {law:.2f} s")
    print(f"diagonals over plain reading: {ratio:.2f}, bound {BOUND:g}: {'ok' if holds else 'NO'}")
    return 0 if holds else 1


def _recording(folder: Path, files: int) -> list[Path]:
    body = bytearray(4 * K * K)
    for place in range(K):
        struct.pack_into("<f", body, 4 * place * (K + 1), 1.0 + place % 97)
    per_layer = -(-files // LAYERS)
    real: dict[tuple[int, int], Path] = {}
    paths = []
    for number in range(files):
        layer, expert = divmod(number, per_layer)
        rank = int(expert >= per_layer // 2)
        path = folder / f"gram.r{rank}.blk.{layer}.ffn_down_exps.{expert}.bin"
        if (layer, rank) in real:
            path.hardlink_to(real[layer, rank])
        else:
            path.write_bytes(struct.pack("<8sIIQII", b"RADGRAM2", K, rank, 1, 0, 0) + body)
            real[layer, rank] = path
        paths.append(path)
    return paths


def _turns(side: Callable[[], None]) -> list[float]:
    took = []
    for _ in range(TURNS):
        start = time.perf_counter()
        side()
        took.append(time.perf_counter() - start)
    return took


if __name__ == "__main__":
    sys.exit(main())
