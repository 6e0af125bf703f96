"""Speed and memory of KL scoring, as ratios taken in one run on one disk, from a cold cache.

    python -m tests.benchmarks.bench_kl [--rows 7000] [--vocab 150000] [--folder DIR]

A reference and a candidate of 2 GB each are made in a temporary folder and removed. Their pages are
dropped from the cache before each reading. What decides counts the reference's bytes alone over the
whole time of scoring, in which as many of the candidate's are read and summed: a scorer that cost
nothing but its reading would come to half of a cold read's rate. Each line is a measured figure,
its bound, and whether it holds; exit 1 if one does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from pytest_dsv41.quality.reference import KldRecording, KldWriter

RATE_BOUND, MEMORY_BOUND_MB = 0.25, 500.0
DISTINCT = 40
"""Rows that differ; they are repeated, which neither the disk nor the cache can tell."""
ROUNDS = 3

SCORE = """
import os, sys, time
from pathlib import Path
from pytest_dsv41.quality.reference import open_recording, score
reference, candidate = (open_recording(Path(path)) for path in sys.argv[1:3])
start, before = time.perf_counter(), sum(os.times()[:2])
found = score(reference, candidate)
took, used = time.perf_counter() - start, sum(os.times()[:2]) - before
# Not getrusage: its maximum is inherited from the process that started this one.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(took, used, int(status["VmHWM"].split()[0]) / 1024, float(found.kl.mean()))
"""


def make(folder: Path, rows: int, n_vocab: int, change: float) -> None:
    """Record a reference of one long document; `change` is the noise on its logits."""
    random = np.random.default_rng(1)
    noise = np.random.default_rng(2)
    made = []
    documents = [("bench", random.integers(0, n_vocab, DISTINCT + 1).tolist(), 0)]
    small = folder.with_name(f"{folder.name}-small")
    with writer(small, documents, n_vocab) as one:
        for _ in range(DISTINCT):
            logits = random.normal(0, 3, n_vocab) + noise.normal(0, change, n_vocab)
            one.append(log_softmax(logits).astype(np.float32))
        one.finish()
    recording = KldRecording(small)
    with recording.reader() as reader:
        for row in range(DISTINCT):
            block = reader.read(row, 1)
            made.append((block.codes.copy(), recording.stored_top(row, 1)))
    stored = recording.stored_rows(0, DISTINCT)
    tokens = np.resize(np.array(documents[0][1][1:]), rows)
    with writer(folder, [("bench", np.r_[documents[0][1][0], tokens], 0)], n_vocab) as long:
        for row in range(rows):
            long.append_encoded(*made[row % DISTINCT], stored[row % DISTINCT])
        long.finish()
    shutil.rmtree(small)


def writer(folder: Path, documents: list, n_vocab: int) -> KldWriter:  # type: ignore[type-arg]
    return KldWriter(
        folder,
        model=folder.name,
        corpus="bench",
        corpus_fnv1a64="0" * 16,
        n_vocab=n_vocab,
        documents=documents,
    )


def drop(folder: Path) -> None:
    """Drop a recording's pages from the cache; they are on the disk."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_cold(folder: Path) -> float:
    """Return the bytes per second of a plain read, start to end, in pieces of 4 MiB."""
    drop(folder)
    buffer, read = bytearray(4 << 20), 0
    fd = os.open(folder / "logp.f16", os.O_RDONLY)
    start = time.perf_counter()
    while got := os.readv(fd, [buffer]):
        read += got
    took = time.perf_counter() - start
    os.close(fd)
    return read / took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=7000)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--folder", type=Path, help="make the sample in a folder here")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-kl-", dir=args.folder))
    missed = 0

    def show(what: str, value: float, unit: str, bound: str = "", holds: bool = True) -> None:
        nonlocal missed
        missed += not holds
        print(
            f"{what:56} {value:10.3f} {unit:5} {bound}{'' if holds else '  <-- missed'}", flush=True
        )

    try:
        reference, candidate = folder / "reference", folder / "candidate"
        make(reference, args.rows, args.vocab, 0.0)
        make(candidate, args.rows, args.vocab, 0.1)
        size = (reference / "logp.f16").stat().st_size
        show("reference", size / 1e9, "GB")
        ratios = []
        for _ in range(ROUNDS):
            cold = read_cold(reference)
            drop(reference)
            drop(candidate)
            words = [sys.executable, "-c", SCORE, str(reference), str(candidate)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            took, used, memory, kl = (float(word) for word in done.stdout.split())
            ratios.append(size / took / cold)
            show("cold read", cold / 1e6, "MB/s")
            show("scoring, bytes of the reference", size / took / 1e6, "MB/s", f"mean KL {kl:.4f}")
            show("scoring, bytes of both recordings", 2 * size / took / 1e6, "MB/s")
            show("scoring the reference / cold read", size / took / cold, "")
            show("processor time a pair of log-probabilities", 2e9 * used / size, "ns")
        best = sorted(ratios)[len(ratios) // 2]
        bound = f"at least {RATE_BOUND:g}"
        show("scoring the reference / cold read, median", best, "", bound, best >= RATE_BOUND)
        bound = f"at most {MEMORY_BOUND_MB:g}"
        show("peak memory of scoring", memory, "MB", bound, memory <= MEMORY_BOUND_MB)
    finally:
        shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
