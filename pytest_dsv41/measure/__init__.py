"""How a value comes about: cells, streams, counters, and what they add up to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_dsv41.identity import prompt_identity

if TYPE_CHECKING:
    from pytest_dsv41.measure.cell import (
        Builder,
        Cell,
        Request,
        Sampling,
        for_cells,
    )
    from pytest_dsv41.measure.corpus import PROMPT_SHA256, Corpus, Prompt
    from pytest_dsv41.measure.endpoint import Endpoint
    from pytest_dsv41.measure.greedy import Answer, greedy_answers
    from pytest_dsv41.measure.group import GroupResult, measure_group
    from pytest_dsv41.measure.metrics import METRICS, Metric, Value
    from pytest_dsv41.measure.progress import Progress
    from pytest_dsv41.measure.reader import Reader
    from pytest_dsv41.measure.stream import StreamRecord

__all__ = [
    "METRICS",
    "PROMPT_SHA256",
    "Answer",
    "Builder",
    "Cell",
    "Corpus",
    "Endpoint",
    "GroupResult",
    "Metric",
    "Progress",
    "Prompt",
    "Reader",
    "Request",
    "Sampling",
    "StreamRecord",
    "Value",
    "for_cells",
    "greedy_answers",
    "measure_group",
    "prompt_identity",
]

_HOMES = {
    "cell": ("Builder", "Cell", "Request", "Sampling", "for_cells"),
    "corpus": ("PROMPT_SHA256", "Corpus", "Prompt"),
    "endpoint": ("Endpoint",),
    "greedy": ("Answer", "greedy_answers"),
    "group": ("GroupResult", "measure_group"),
    "metrics": ("METRICS", "Metric", "Value"),
    "progress": ("Progress",),
    "reader": ("Reader",),
    "stream": ("StreamRecord",),
}


def __getattr__(name: str) -> Any:
    # The reader process imports `measure.wire` and little else of this room.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
