"""A top-k reference recorded from a server: every position once, on the document's own tokens."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from wire_groups import endpoint, stub

from pytest_dsv41.cli import main
from pytest_dsv41.engines import get_engine
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.quality.reference import (
    TopkRecording,
    corpus_plan,
    open_recording,
    plan_like,
    record_topk,
    score_topk,
    verify,
)
from pytest_dsv41.stub import Serving

TEXTS = (
    ("wiki", "rivers meet where nobody counts the steps", 2),
    ("code", "bells and gates, bells and gates", 0),
    ("wiki", "rivers meet where nobody sleeps", 1),
)


@pytest.fixture(scope="module", params=["vllm", "llamacpp"])
def served(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with stub(
        engine=request.param, round_ms=0.0, prefill_ms=0.0, perturb=0.3, block_size=4
    ) as running:
        yield running


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    lines = [
        json.dumps({"prompt": text, "source": source, "score_from": start})
        for source, text, start in TEXTS
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def words(served: Serving, folder: Path, *more: str) -> list[str]:
    engine = served.server.profile.engine
    return ["kl", "record", served.url, str(folder), "--engine", engine, *more]


def test_each_row_is_the_servers_answer_to_the_tokens_before_it(
    served: Serving, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ref"
    assert main(words(served, folder, "--corpus", str(corpus))) == 0
    recording = TopkRecording(folder)
    engine, where = get_engine(served.server.profile.engine), endpoint(served)
    row = first = 0
    with httpx.Client(trust_env=False) as client:
        for (source, text, start), document in zip(TEXTS, recording.documents, strict=True):
            ids = engine.tokenize(where.url, where.model, text, client=client)
            assert (document.source, document.tokens, document.score_from, document.row0) == (
                source, len(ids), start, row,
            )  # fmt: skip
            assert recording.tokens[first : first + len(ids)].tolist() == ids
            first += len(ids)
            for at in range(start, len(ids) - 1):
                again = engine.next_token(
                    where.url, where.model, ids[: at + 1], 20, cache="any", salt=None, client=client
                ).top
                expected = sorted(again, key=lambda one: (-one[1], one[0]))[:20]
                found = recording.stored_top(row, 1)[0]
                assert found["id"].tolist() == [token for token, _ in expected]
                np.testing.assert_allclose(
                    found["logp"], [value for _, value in expected], rtol=1e-6
                )
                known = dict(expected).get(ids[at + 1])
                nll = recording.stored_rows(row, 1)[0, 0]
                assert np.isnan(nll) if known is None else nll == pytest.approx(-known, rel=1e-6)
                row += 1
    assert row == recording.rows
    assert verify(recording) == []
    fields = recording.manifest.fields
    assert (fields["engine"], fields["conditions"]) == (
        engine.name, {"cache": "cached", "concurrency": 1},
    )  # fmt: skip
    assert "is a lower bound" in fields["cannot_see"][0]


def test_the_same_server_scores_zero_and_another_model_does_not(
    served: Serving, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(served, tmp_path / "p", "--corpus", str(corpus))) == 0
    assert main(words(served, tmp_path / "again", "--like", str(tmp_path / "p"))) == 0
    same = score_topk(TopkRecording(tmp_path / "p"), TopkRecording(tmp_path / "again"))
    assert (same.scores.kl == 0).all()
    assert same.scores.top1.all()
    with stub(
        engine=served.server.profile.engine, round_ms=0.0, prefill_ms=0.0, perturb=0.4
    ) as other:
        assert main(words(other, tmp_path / "q", "--like", str(tmp_path / "p"))) == 0
    near = score_topk(TopkRecording(tmp_path / "p"), TopkRecording(tmp_path / "q"))
    assert (near.scores.kl > 0).all()
    assert main(words(served, tmp_path / "p", "--corpus", str(corpus))) == 4
    assert "never overwritten" in capsys.readouterr().err
    # A recording that cannot be read is a wrong argument, not a fault of the server.
    (tmp_path / "again" / "top.bin").unlink()
    assert main(words(served, tmp_path / "new", "--like", str(tmp_path / "again"))) == 4
    assert "top.bin: is missing" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_documents_at_a_time_and_cold_positions_give_the_same_lists(
    served: Serving, corpus: Path, tmp_path: Path
) -> None:
    where = endpoint(served)
    with httpx.Client(trust_env=False) as client:
        plan = corpus_plan(
            corpus,
            lambda text: get_engine(where.engine).tokenize(
                where.url, where.model, text, client=client
            ),
        )
    told: list[tuple[int, int]] = []
    record_topk(where, plan, tmp_path / "one", deadline_s=60)
    record_topk(
        where, plan, tmp_path / "three", deadline_s=60, concurrency=3,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    record_topk(where, plan, tmp_path / "cold", deadline_s=60, cache="cold")
    one = (tmp_path / "one" / "top.bin").read_bytes()
    assert (tmp_path / "three" / "top.bin").read_bytes() == one
    assert (tmp_path / "cold" / "top.bin").read_bytes() == one
    assert told == [(done, plan.rows) for done in range(1, plan.rows + 1)]
    assert plan_like(TopkRecording(tmp_path / "cold")).rows == plan.rows
    with pytest.raises(UsageError, match="cache 'warm': valid: cached, cold"):
        record_topk(where, plan, tmp_path / "x", deadline_s=60, cache="warm")
    assert not (tmp_path / "x").exists()


def test_the_deadline_holds_for_splitting_the_corpus_too(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        more = ["--corpus", str(corpus), "--deadline", "0.3"]
        for model in ([], ["--model", "m"]):
            assert main(["kl", "record", url, str(tmp_path / "ref"), *more, *model]) == 1
            assert "FAILED deadline: not finished at the deadline" in capsys.readouterr().err
    assert not (tmp_path / "ref").exists()


def test_a_server_that_began_anew_in_the_middle_leaves_the_recording_unfinished(
    corpus: Path, tmp_path: Path
) -> None:
    with stub(round_ms=0.0, prefill_ms=0.0, perturb=0.3) as running:

        def at(done: int, _total: int) -> None:
            if done == 3:
                running.faults("/metrics:metrics-restart")

        where = endpoint(running)
        plan = corpus_plan(
            corpus, lambda text: get_engine("vllm").tokenize(where.url, where.model, text)
        )
        with pytest.raises(MeasurementRefused) as refused:
            record_topk(where, plan, tmp_path / "ref", deadline_s=60, progress=at)
    assert refused.value.kind == "reset"
    assert not (tmp_path / "ref" / "topk.json").exists()


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_stopped_recording_is_unfinished_and_the_next_one_takes_it_over(
    served: Serving, corpus: Path, tmp_path: Path, concurrency: int
) -> None:
    where = endpoint(served)
    with httpx.Client(trust_env=False) as client:
        plan = corpus_plan(
            corpus,
            lambda text: get_engine(where.engine).tokenize(
                where.url, where.model, text, client=client
            ),
        )
    stop = threading.Event()
    with pytest.raises(MeasurementFailed) as caught:
        record_topk(
            where, plan, tmp_path / "ref", deadline_s=60, concurrency=concurrency, stop=stop,
            progress=lambda done, _total: stop.set() if done == 3 else None,
        )  # fmt: skip
    assert caught.value.kind == "stopped"
    assert not (tmp_path / "ref" / "topk.json").exists()
    with pytest.raises(MeasurementRefused, match=r"no topk\.json: no recording"):
        open_recording(tmp_path / "ref")
    record_topk(where, plan, tmp_path / "ref", deadline_s=60)
    assert verify(TopkRecording(tmp_path / "ref")) == []


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("duplicate", "duplicate-id"), ("zeros", "all-zero"), ("fewer", "fewer"), ("nan", "nan")],
)
def test_a_wrong_answer_ends_the_recording_with_its_place(
    served: Serving,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    kind: str,
) -> None:
    path = "/v1/completions" if served.server.profile.engine == "vllm" else "/completion"
    served.faults(f"{path}:logprobs={fault}")
    try:
        assert main(words(served, tmp_path / "ref", "--corpus", str(corpus))) == 1
    finally:
        served.faults()
    error = capsys.readouterr().err
    assert error.startswith(f"dsv41 kl record: REFUSED {kind}: document 0, 3 tokens: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "ref" / "topk.json").exists()
