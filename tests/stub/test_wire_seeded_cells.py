"""Seeded cells, late arrivals, records and replay: whole runs against the stub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from wire_groups import endpoint, kind_of, requests, stub

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure import Cell, Sampling, measure_group
from pytest_dsv41.measure.record import replay, write_record
from pytest_dsv41.measure.seeded import (
    SEEDED_CELLS,
    SeededCell,
    check_seeds,
    run_seeded_cell,
    streams_identical,
)

CELL = SeededCell("s", ("demo-1",), 24, seed_base=700)
PAIR = SeededCell("s2", ("demo-1", "demo-2"), 24, seed_base=900)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize("cell", [CELL, PAIR], ids=["b1", "b2"])
def test_a_seeded_cell_is_cold_once_and_warm_after(engine: str, cell: SeededCell) -> None:
    with stub(engine=engine, draft_tokens=3) as served:
        result = run_seeded_cell(endpoint(served), cell, salt="w-C1", deadline_s=60)
    assert [fill.server.cached_tokens for fill in result.fills] == [0] * cell.batch
    assert len(result.pairs) == 6
    assert all((pair.server.cached_tokens or 0) > 0 for pair in result.pairs)
    assert all(pair.server.tokens == 24 * cell.batch for pair in result.pairs)
    assert len(result.values("ms_per_round")) == 6
    assert len({digest for pair in result.outputs for digest in pair}) == 6 * cell.batch
    text = json.dumps(result.to_json())
    assert result.pairs[0].streams[0].text
    assert result.pairs[0].streams[0].text not in text


def test_two_starts_with_the_same_seeds_have_identical_streams() -> None:
    runs = []
    for round_ms in (2.0, 3.0):
        with stub(draft_tokens=3, round_ms=round_ms) as served:
            runs.append(run_seeded_cell(endpoint(served), CELL, salt="w", deadline_s=60))
    assert streams_identical(*runs)
    assert not streams_identical(runs[0], replace(runs[1], pairs=runs[1].pairs[::-1]))


def test_a_salt_used_before_is_not_cold() -> None:
    with stub() as served:
        run_seeded_cell(endpoint(served), CELL, salt="w", deadline_s=60)
        with pytest.raises(MeasurementRefused) as refused:
            run_seeded_cell(endpoint(served), CELL, salt="w", deadline_s=60)
    assert refused.value.kind == "warm-cache"


def test_seeds_are_the_registered_ones() -> None:
    assert [[r.seed for r in PAIR.pair(i, "s")] for i in (0, 1, 5)] == [
        [900, 901], [910, 911], [950, 951],
    ]  # fmt: skip
    with pytest.raises(UsageError):
        PAIR.pair(6, "s")


def test_seed_ranges_that_overlap_are_refused() -> None:
    check_seeds(SEEDED_CELLS.values())
    check_seeds([CELL, PAIR, replace(CELL, name="next", seed_base=760)])
    with pytest.raises(UsageError, match="share seeds"):
        check_seeds([CELL, PAIR, replace(CELL, name="near", seed_base=759)])


def test_too_few_pairs_are_refused_and_reports_need_three() -> None:
    with pytest.raises(ValueError):
        SeededCell("x", ("demo-1",), 8, pairs=5)
    assert SeededCell("x", ("demo-1",), 8, pairs=3, report_only=True).pairs == 3
    with pytest.raises(ValueError):
        SeededCell("x", ("demo-1",), 8, pairs=2, report_only=True)
    with pytest.raises(ValueError):
        SeededCell("x", ("demo-1",), 8, sampling=Sampling(ignore_eos=False))
    with pytest.raises(ValueError):
        SeededCell("x", ("demo-1",), 8, record="bytes")


def test_the_registered_cells_are_the_documents() -> None:
    assert {name: cell.prompts for name, cell in SEEDED_CELLS.items()} == {
        "seeded-short-b1": ("short",),
        "seeded-32k-b1": ("32k-0",),
        "seeded-32k-b2": ("32k-1", "32k-2"),
        "seeded-32k-b3": ("32k-1", "32k-2", "32k-3"),
    }
    assert {cell.max_tokens for cell in SEEDED_CELLS.values()} == {256}
    assert {cell.pairs for cell in SEEDED_CELLS.values()} == {6}


@pytest.mark.parametrize("limit", [4, 3])
def test_the_late_one_must_be_admitted_beside_the_decoders(limit: int) -> None:
    cell = Cell("mixed", ("demo-1", "demo-2", "demo-3", "short"), 60, late=1)
    with stub(max_running=limit, round_ms=12.0) as served:
        sent = cell.requests(seed=1, salt="x")
        assert [request.late for request in sent] == [False, False, False, True]
        if limit == 3:
            with pytest.raises(MeasurementRefused) as refused:
                measure_group(endpoint(served), sent, deadline_s=30)
            assert refused.value.kind == "not-admitted"
            return
        result = measure_group(endpoint(served), sent, deadline_s=30)
        *early, late = result.streams
        assert late.start_ns > max(stream.first_token_ns for stream in early)
        assert late.first_token_ns < min(stream.last_token_ns for stream in early)


CLIENT = """
import json, sys, urllib.request as u
body = {"model": "stub", "prompt": "hello", "max_tokens": int(sys.argv[2]), "stream": True}
while True:
    r = u.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(),
                  {"Content-Type": "application/json"})
    with u.urlopen(r, timeout=60) as answer:
        answer.readline()
        print("began", flush=True)
        answer.read()
"""


@contextmanager
def second_client(url: str, tokens: int) -> Iterator[None]:
    """Another process that sends one request after the other; the first has begun."""
    argv = [sys.executable, "-c", CLIENT, url, str(tokens)]
    other = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"began\n"
        yield
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("engine", ["vllm", pytest.param("llamacpp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_second_client_in_another_process_refuses_cell_and_group(engine: str, count: int) -> None:
    # Short requests: some end beside ours, whatever was seen before the first of ours.
    with stub(engine=engine, round_ms=10.0) as served, second_client(served.url, 2):
        assert kind_of(served, tokens=60, count=count) == "refused:foreign-request"


@pytest.mark.parametrize("engine", ["vllm", pytest.param("llamacpp", marks=pytest.mark.slow)])
def test_another_process_whose_request_still_runs_refuses_before_anything_is_sent(
    engine: str,
) -> None:
    with stub(engine=engine, round_ms=50.0) as served, second_client(served.url, 4000):
        began = len(served.truth("head"))
        with pytest.raises(MeasurementRefused, match="before the first request") as refused:
            measure_group(endpoint(served), requests(), deadline_s=30)
        assert refused.value.kind == "foreign-request"
        assert len(served.truth("head")) == began


@pytest.mark.parametrize("record", ["redacted", "bytes"])
@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_record_gives_the_values_again(tmp_path: Path, engine: str, record: str) -> None:
    with stub(engine=engine, draft_tokens=3, round_ms=6.0) as served:
        result = measure_group(
            endpoint(served), requests(2, api="chat"), deadline_s=20, keep_bytes=record == "bytes"
        )
    path = tmp_path / "raw" / "C1-x-r0.jsonl"
    write_record(path, endpoint(served), result, record=record)  # type: ignore[arg-type]
    again = replay(path)
    assert again.same
    assert again.parsed_again is (record == "bytes")
    assert set(again.values) == set(result.values)
    text = path.read_text()
    assert result.streams[0].text not in text
    lines = [json.loads(line) for line in text.splitlines()]
    if record == "redacted":
        assert not any("raw" in line for line in lines)
    # A changed count changes what comes out, or is refused.
    for line in lines:
        if line["kind"] == "counters":
            name = next(
                key
                for key in line["after"]["values"]
                if "decode_time_seconds_sum" in key or "n_decode" in key
            )
            line["after"]["values"][name] += 0.01
        if line["kind"] == "stream" and engine == "llamacpp":
            # Of a record with bytes the bytes say otherwise.
            line["timings"]["predicted_ms"] += 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not replay(path).same


def test_what_is_no_record_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such record"):
        replay(tmp_path / "nothing.jsonl")
    (tmp_path / "half.jsonl").write_text('{"kind": "head"}\n')
    with pytest.raises(UsageError, match="not a whole record"):
        replay(tmp_path / "half.jsonl")
