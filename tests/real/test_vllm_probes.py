"""The probes against a real vLLM: its shape, its cache, a prompt too long, a ladder.

Needs a server of one's own, of which nobody else asks anything, named by DSV41_VLLM_URL:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --max-model-len 1024 --max-num-seqs 3 --enable-prompt-tokens-details
    DSV41_VLLM_URL=http://127.0.0.1:8000 pytest -m slow tests/real/test_vllm_probes.py
"""

from __future__ import annotations

import json
import os

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.measure.probes import PromptMaker, read_shape
from pytest_dsv41.measure.probes.capacity import too_long

URL = os.environ.get("DSV41_VLLM_URL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not URL,
        reason="set DSV41_VLLM_URL to a running server: VLLM_SERVER_DEV_MODE=1 python -m "
        "vllm.entrypoints.openai.api_server --model MODEL --max-model-len 1024 --max-num-seqs 3 "
        "--enable-prompt-tokens-details",
    ),
]


def test_slots_and_window_are_read_and_a_prompt_too_long_is_refused() -> None:
    here = Endpoint(URL, "vllm")
    shape = read_shape(here)
    assert (shape.slots, shape.window) == (3, 1024)
    assert shape.told == {"slots": "/server_info", "window": "/v1/models max_model_len"}
    refusal = too_long(PromptMaker.on(here), shape, deadline_s=60)
    assert (refusal.refused, refusal.tokens) == (True, 1025)


def test_prefill_and_a_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", URL, "prefill", "--depth", "512", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cached_tokens"] for row in rows[:2]] == [0, 0]
    assert rows[2]["cached_tokens"] > 256
    assert main(["probe", URL, "ladder", "--depth", "512", "--tokens", "128", "--json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    assert [len(rung["rates"]) for rung in rungs] == [1, 3]
