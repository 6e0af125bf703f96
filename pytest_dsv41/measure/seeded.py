"""Seeded cells: the same seeds in every arm, on one prefix that is cold once and warm after.

Each prompt is prefilled once under the cell's salt and proved cold; then come pairs of equal
seeds, proved warm, each request exactly as long as asked. A pair is one repeat: one request at
B1, one group at B >= 2. Of the output only a hash is kept.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.cell import Cell, Request
from pytest_dsv41.measure.corpus import PROMPT_SHA256, find_prompt
from pytest_dsv41.measure.group import Endpoint, GroupResult, Progress, Reader, measure_group

__all__ = [
    "SEEDED_CELLS",
    "SeededCell",
    "SeededResult",
    "check_seeds",
    "run_seeded_cell",
    "streams_identical",
]

STEP: Final = 10
"""Seeds of one pair; a cell has at most so many members."""


@dataclass(frozen=True)
class SeededCell(Cell):
    """A cell whose repeats are registered seeds: `seed_base + 10 * pair + member`."""

    seed_base: int = 0
    pairs: int = 6
    report_only: bool = False
    """Never decides; three pairs are enough."""

    seeded = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch > STEP:
            raise ValueError(f"cell {self.name}: {self.batch} members; at most {STEP} have seeds")
        least = 3 if self.report_only else 6
        if self.pairs < least:
            raise ValueError(f"cell {self.name}: {self.pairs} pairs; at least {least}")
        if self.record == "bytes":
            raise ValueError(f"cell {self.name}: of a seeded cell no text is kept")
        if not self.sampling.ignore_eos:
            raise ValueError(f"cell {self.name}: seeded cells ask for exactly max_tokens")

    @property
    def seeds(self) -> range:
        """Every seed the cell may use."""
        return range(self.seed_base, self.seed_base + STEP * self.pairs)

    def definition(self) -> dict[str, Any]:
        """As `Cell.definition`, with the seeds' base."""
        return {**super().definition(), "seed_base": self.seed_base}

    def fill(self, salt: str) -> tuple[Request, ...]:
        """One cold request of a single token a prompt, to be sent one after the other."""
        sampling = replace(self.sampling, cache="fill")
        return tuple(
            replace(request, max_tokens=1, sampling=sampling)
            for request in self.requests(seed=None, salt=salt)
        )

    def pair(self, pair: int, salt: str) -> tuple[Request, ...]:
        """The requests of one pair on the warm prefix.

        Raises:
            UsageError: the cell has no such pair.
        """
        if not 0 <= pair < self.pairs:
            raise UsageError(f"cell {self.name}: pair {pair}; valid: 0 to {self.pairs - 1}")
        sampling = replace(self.sampling, cache="warm")
        requests = self.requests(seed=self.seed_base + STEP * pair, salt=salt)
        return tuple(replace(request, sampling=sampling) for request in requests)


SEEDED_CELLS: Final[dict[str, SeededCell]] = {
    cell.name: cell
    for cell in (
        SeededCell(
            "seeded-short-b1", ("short",), 256, seed_base=10_000, estimated_s=38 / 6,
            description="a short prompt, one request a pair",
        ),
        SeededCell(
            "seeded-32k-b1", ("32k-0",), 256, seed_base=20_000, estimated_s=56 / 6,
            description="a 32K prompt, one request a pair",
        ),
        SeededCell(
            "seeded-32k-b2", ("32k-1", "32k-2"), 256, seed_base=30_000, estimated_s=88 / 6,
            description="two 32K prompts, two requests a pair",
        ),
        SeededCell(
            "seeded-32k-b3", ("32k-1", "32k-2", "32k-3"), 256, seed_base=40_000,
            estimated_s=120 / 6, description="three 32K prompts, three requests a pair",
        ),
    )
}  # fmt: skip
"""The registered seeded cells by name."""


def check_seeds(cells: Iterable[SeededCell]) -> None:
    """Refuse seeded cells that would share a seed.

    Raises:
        UsageError: two cells' seeds overlap.
    """
    ordered = sorted(cells, key=lambda cell: cell.seed_base)
    for one, two in itertools.pairwise(ordered):
        if one.name != two.name and one.seeds.stop > two.seeds.start:
            raise UsageError(
                f"cells {one.name} and {two.name} share seeds: {one.seeds.start} to "
                f"{one.seeds.stop - 1} and {two.seeds.start} to {two.seeds.stop - 1}"
            )


@dataclass(frozen=True)
class SeededResult:
    """One arm's run of a seeded cell: the cold prefills, then one result a pair."""

    cell: str
    prompt_sha256: str
    prompt_members: tuple[str, ...]
    fills: tuple[GroupResult, ...]
    pairs: tuple[GroupResult, ...]

    def values(self, metric: str) -> list[float]:
        """The metric's value of every pair, in order.

        Raises:
            MeasurementRefused: kind `no-<metric>`: a pair has none.
        """
        found = []
        for index, pair in enumerate(self.pairs):
            if metric not in pair.values:
                reason = pair.missing.get(metric, "not a metric")
                raise MeasurementRefused(f"no-{metric}", f"pair {index}: {metric}: {reason}")
            found.append(pair.values[metric].value)
        return found

    @property
    def outputs(self) -> list[list[str]]:
        """The sha256 of every output, by pair and member."""
        return [[stream.output_sha256 for stream in pair.streams] for pair in self.pairs]

    def to_json(self) -> dict[str, Any]:
        """Return everything; there is no text in it."""
        return {
            "cell": self.cell,
            "prompt_sha256": self.prompt_sha256,
            "prompt_members": list(self.prompt_members),
            "fills": [fill.to_json() for fill in self.fills],
            "pairs": [pair.to_json() for pair in self.pairs],
            "outputs": self.outputs,
        }


def run_seeded_cell(
    endpoint: Endpoint,
    cell: SeededCell,
    *,
    salt: str,
    deadline_s: float,
    stop: threading.Event | None = None,
    progress: Callable[[int, Progress], None] | None = None,
    reader: Reader | None = None,
) -> SeededResult:
    """Run a whole seeded cell on one arm: prefill cold, prove it, then every pair, proved warm.

    `salt` is new for every start (a window and start name). `progress` gets the pair's number.
    `reader` as in `measure_group`.

    Raises:
        UsageError: no corpus has a prompt.
        MeasurementRefused: a prompt is not the pinned one (before the first request), a prefill
            was not cold, a pair not warm, or the counters cannot be trusted.
        MeasurementFailed: a request did not deliver.
    """
    _pinned(cell)
    until = time.monotonic() + deadline_s
    fills = fill_seeded(endpoint, cell, salt=salt, deadline_s=deadline_s, stop=stop)
    pairs: list[GroupResult] = []
    for pair in range(cell.pairs):
        pairs.append(
            measure_group(
                endpoint,
                cell.pair(pair, salt),
                deadline_s=max(0.0, until - time.monotonic()),
                stop=stop,
                progress=_numbered(progress, pair),
                reader=reader,
            )
        )
        if pairs[-1].prompt_sha256 != pairs[0].prompt_sha256:
            raise MeasurementRefused("prompt-pin", f"pair {pair} ran on another prompt")
    first = pairs[0]
    return SeededResult(
        cell.name, first.prompt_sha256, first.prompt_members, tuple(fills), tuple(pairs)
    )


def fill_seeded(
    endpoint: Endpoint,
    cell: SeededCell,
    *,
    salt: str,
    deadline_s: float,
    stop: threading.Event | None = None,
) -> list[GroupResult]:
    """Prefill every prompt of a seeded cell once, one after the other, each proved cold.

    Raises:
        MeasurementRefused: kind `warm-cache` when one was not cold; else as `measure_group`.
    """
    until = time.monotonic() + deadline_s
    return [
        measure_group(endpoint, [request], deadline_s=max(0.0, until - time.monotonic()), stop=stop)
        for request in cell.fill(salt)
    ]


def _numbered(
    progress: Callable[[int, Progress], None] | None, pair: int
) -> Callable[[Progress], None] | None:
    return None if progress is None else lambda now: progress(pair, now)


def _pinned(cell: SeededCell) -> None:
    """Hold every prompt against its pin before anything is sent."""
    for name in cell.prompts:
        if name in cell.builders:
            cell.text(name)
            continue
        prompt = find_prompt(name)
        PROMPT_SHA256.setdefault(name, prompt.sha256)
        if prompt.sha256 != PROMPT_SHA256[name]:
            raise MeasurementRefused(
                "prompt-pin", f"prompt {name} is another one than the cell began with"
            )


def streams_identical(one: SeededResult, two: SeededResult) -> bool:
    """Whether two starts gave the same token streams: outputs and rounds, request by request."""
    return one.outputs == two.outputs and _rounds(one.pairs) == _rounds(two.pairs)


def _rounds(pairs: Sequence[GroupResult]) -> list[int | None]:
    return [pair.server.rounds for pair in pairs]
