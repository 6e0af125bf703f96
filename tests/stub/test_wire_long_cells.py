"""The shipped cells with 32K and 150K prompts, whole, against the stub over real sockets."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from cells.test_shared import test_seeded as seeded_cells
from cells.test_shared import test_shared as shared_cells
from cells.test_shared import test_shared_prefill as prefill_cells
from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure import Builder, Cell, Endpoint, Reader, measure_group
from pytest_dsv41.measure.corpus import find_prompt, text_sha256
from pytest_dsv41.measure.prose import prose
from pytest_dsv41.measure.seeded import SeededCell, run_seeded_cell
from pytest_dsv41.stub import Spawned, spawn

CELLS: dict[str, Cell] = {
    cell.name: cell
    for function in (shared_cells, prefill_cells, seeded_cells)
    for cell in function.__dsv41_cells__  # type: ignore[attr-defined]
}
LENGTHS = {"32k-0": 32768, "32k-1": 32768, "32k-2": 32768, "32k-3": 32768, "150k": 153600}


def test_prose_is_the_same_everywhere_and_pinned_by_its_hash() -> None:
    text = prose(2000, seed=3)
    # By hand, from the first bytes of sha256("3-0"): 91 140 101 192 70 98 178.
    assert text.startswith("The silver market gathers a saddle on the third day. ")
    assert text == prose(2000, seed=3)
    assert text != prose(2000, seed=4)
    assert 2000 <= len(text.split()) < 2020
    place = "pytest_dsv41.measure.prose:prose"
    made = Builder(place, text_sha256(text), {"words": 2000, "seed": 3})
    assert made.build() == text
    other = Builder(place, text_sha256(text), {"words": 2000, "seed": 5})
    with pytest.raises(MeasurementRefused) as refused:
        other.build()
    assert refused.value.kind == "prompt-pin"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of the lengths the cells name, cut by the stub's own tokenizer."""
    folder = tmp_path_factory.mktemp("long")
    assert main(["corpus", "prose", str(folder / "text.txt"), "--words", "330000"]) == 0
    with spawn() as server:
        words = [f"--cut={name}={tokens}" for name, tokens in LENGTHS.items()]
        text = str(folder / "text.txt")
        assert main(["corpus", "cut", server.url, text, str(folder / "corpus"), *words]) == 0
    return folder / "corpus"


@pytest.fixture
def found(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CORPUS", str(corpus))


def quick(**settings: Any) -> AbstractContextManager[Spawned]:
    return spawn(**({"round_ms": 20.0, "prefill_ms_per_token": 0.005} | settings))


def cut(cell: Cell) -> list[int | None]:
    """The tokens of a cell's prompts, as they were cut: at most so many, and hardly less."""
    tokens = [find_prompt(name).tokens for name in cell.prompts]
    for name, count in zip(cell.prompts, tokens, strict=True):
        assert LENGTHS[name] - 8 < (count or 0) <= LENGTHS[name]
    return tokens


def here(server: Spawned) -> Endpoint:
    return Endpoint(server.url, "vllm", "stub")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4, 3])
def test_the_150k_document_must_be_admitted_beside_three_decoders(found: None, limit: int) -> None:
    cell = CELLS["ctl-mixed150k-4user"]
    with quick(max_running=limit) as server, Reader() as reader:
        sent = cell.requests(seed=1, salt="w")
        assert [request.late for request in sent] == [False, False, False, True]
        if limit == 3:
            with pytest.raises(MeasurementRefused) as refused:
                measure_group(here(server), sent, deadline_s=240, reader=reader)
            assert refused.value.kind == "not-admitted"
            assert "at most 3 requests ran" in str(refused.value)
            return
        result = measure_group(here(server), sent, deadline_s=240, reader=reader)
    *early, late = result.streams
    assert [stream.prompt_tokens for stream in result.streams] == cut(cell)
    assert late.start_ns > max(stream.first_token_ns for stream in early)
    assert late.first_token_ns < min(stream.last_token_ns for stream in early)
    assert result.server.tokens == 4 * cell.max_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["32k-b1", "32k-b3", "prefill-32k-b1"])
def test_a_long_cell_is_measured_whole(found: None, name: str) -> None:
    cell = CELLS[name]
    with quick(round_ms=4.0) as server, Reader() as reader:
        sent = cell.requests(seed=1, salt="w")
        result = measure_group(here(server), sent, deadline_s=120, reader=reader)
    assert [stream.prompt_tokens for stream in result.streams] == cut(cell)
    assert result.server.tokens == cell.max_tokens * cell.batch
    assert result.server.cached_tokens == 0
    # Where another process may not be read before (no root), a busy machine may merge it: named.
    assert "prefill_tok_s" in result.values or "merged" in result.missing["prefill_tok_s"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seeded-32k-b1", "seeded-32k-b2"])
def test_a_seeded_long_cell_is_cold_once_and_warm_after(found: None, name: str) -> None:
    cell = CELLS[name]
    assert isinstance(cell, SeededCell)
    with quick(round_ms=2.0) as server:
        result = run_seeded_cell(here(server), cell, salt="w", deadline_s=240)
    assert [fill.server.cached_tokens for fill in result.fills] == [0] * cell.batch
    assert all((pair.server.cached_tokens or 0) > 32000 * cell.batch for pair in result.pairs)
