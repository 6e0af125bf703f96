"""The shape a probe measures: read from the server, held against whatever else states it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

import httpx

from pytest_dsv41.engines import get_engine
from pytest_dsv41.engines.served import Served, agreed
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure.group import Endpoint, control_client

__all__ = ["asking", "read_shape", "window_of"]

_ASK_S: Final = 120.0


@contextlib.contextmanager
def asking(endpoint: Endpoint) -> Iterator[httpx.Client]:
    """A client for what a probe asks beside its measured requests, with the endpoint's headers."""
    deadline_ns = time.monotonic_ns() + int(_ASK_S * 1e9)
    with control_client(endpoint, stop=None, deadline_ns=deadline_ns) as client:
        yield client


def read_shape(endpoint: Endpoint, *more: Served) -> Served:
    """Return the server's own shape; `more` are a boot ledger and the like.

    Raises:
        MeasurementRefused: kind `shape`: two sources contradict each other.
    """
    with asking(endpoint) as client:
        own = get_engine(endpoint.engine).served(endpoint.url, client=client)
    return agreed(own, *more)


def window_of(shape: Served, *, streams: int = 1) -> int:
    """Return the window in tokens that so many streams at a time have each.

    Raises:
        MeasurementRefused: kind `shape`: the server tells no window, or has fewer slots.
    """
    if shape.window is None:
        raise MeasurementRefused(
            "shape", "the server does not tell its window; give its boot ledger"
        )
    if shape.slots is not None and streams > shape.slots:
        raise MeasurementRefused(
            "shape",
            f"{streams} streams at a time, and the server has {shape.slots} slots "
            f"({shape.told['slots']})",
        )
    return shape.window
