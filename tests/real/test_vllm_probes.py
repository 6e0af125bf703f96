"""The probes against a real vLLM: its shape, its cache, a prompt too long, a ladder.

Needs a Python with vLLM, named by DSV41_VLLM_PYTHON; the server is started here:

    python3 -m venv vllm && vllm/bin/pip install vllm
    DSV41_VLLM_PYTHON=vllm/bin/python pytest -m slow tests/real/test_vllm_probes.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.measure.probes import PromptMaker, read_shape
from pytest_dsv41.measure.probes.capacity import too_long
from tests.real_vllm import serving

PYTHON = os.environ.get("DSV41_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="set DSV41_VLLM_PYTHON to a Python with: pip install vllm"
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(PYTHON, tmp_path_factory.mktemp("vllm")) as url:
        yield url


def test_slots_and_window_are_read_and_a_prompt_too_long_is_refused(url: str) -> None:
    here = Endpoint(url, "vllm")
    shape = read_shape(here)
    assert (shape.slots, shape.window) == (4, 1024)
    assert shape.told == {"slots": "/server_info", "window": "/v1/models max_model_len"}
    refusal = too_long(PromptMaker.on(here), shape, deadline_s=60)
    assert (refusal.refused, refusal.tokens) == (True, 1025)


def test_prefill_and_a_ladder(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url, "prefill", "--depth", "512", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cached_tokens"] for row in rows[:2]] == [0, 0]
    assert rows[2]["cached_tokens"] > 256
    assert main(["probe", url, "ladder", "--depth", "480", "--json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    assert [len(rung["rates"]) for rung in rungs] == [1, 4]
    assert [set(rung["tokens"]) for rung in rungs] == [{512}, {512}]
