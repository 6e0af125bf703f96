"""pytest-dsv41: A/B windows for self-hosted LLM servers as pytest sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measure import Cell, Sampling, for_cells

__version__ = "0.1.0"

__all__ = ["Cell", "Sampling", "__version__", "for_cells"]


def __getattr__(name: str) -> Any:
    # pytest imports this package in every session; what a cell module needs is loaded when asked.
    if name in ("Cell", "Sampling", "for_cells"):
        from . import measure

        return getattr(measure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
