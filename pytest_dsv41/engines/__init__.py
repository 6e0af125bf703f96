"""The dialects of the servers that can be measured: vllm, llamacpp, radiance."""

from __future__ import annotations

from pytest_dsv41.engines.base import (
    ENGINES,
    Engine,
    Health,
    InBand,
    Server,
    Snapshot,
    base_url,
    check_url,
    detect_engine,
    engine_names,
    fetch,
    get_engine,
    unix_path,
)
from pytest_dsv41.engines.llamacpp import LlamaCpp
from pytest_dsv41.engines.next_token import Greedy, NextToken
from pytest_dsv41.engines.radiance import Radiance
from pytest_dsv41.engines.vllm import Vllm

__all__ = [
    "ENGINES",
    "Engine",
    "Greedy",
    "Health",
    "InBand",
    "LlamaCpp",
    "NextToken",
    "Radiance",
    "Server",
    "Snapshot",
    "Vllm",
    "base_url",
    "check_url",
    "detect_engine",
    "engine_names",
    "fetch",
    "get_engine",
    "unix_path",
]

for _engine in (Vllm(), LlamaCpp(), Radiance()):
    ENGINES[_engine.name] = _engine
