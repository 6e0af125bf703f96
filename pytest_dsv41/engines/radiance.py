"""radiance: llama.cpp's timings and counters, reasoning in `reasoning_content`.

Only `/v1/models` tells the truth about the served name: any other name is accepted in silence,
so a window reads it from there.
"""

from __future__ import annotations

from typing import ClassVar

from pytest_dsv41.engines.llamacpp import LlamaCpp

__all__ = ["Radiance"]


class Radiance(LlamaCpp):
    """The dialect of radiance's server."""

    name: ClassVar[str] = "radiance"
    preempted: ClassVar[int | None] = None
    """It moves what overflows its pool to the prefix tiers, and counts that nowhere."""
    counters_hint: ClassVar[str] = "start the server with its metrics on"
