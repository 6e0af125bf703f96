"""KL of a candidate against a reference (FORMATS): the formula, the report, what is refused."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_files import Documents, draw, expected_kl, following, write_base, write_kld
from scipy.special import log_softmax, rel_entr

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.reference import (
    build_report,
    open_recording,
    read_report,
    score,
    write_report,
)

DOCS: Documents = [
    ("wiki", [3, 1, 4, 1, 5, 9], 2),
    ("code", [2, 6, 5, 3], 0),
    ("wiki", [7, 7, 7], 1),
]
ROWS = 3 + 3 + 1
FLOAT32 = 5e-8
"""Nats by which a KL may be off, as everything but the likeliest tokens is summed in float32."""


def pair(tmp_path: Path, p: np.ndarray, q: np.ndarray, docs: Documents = DOCS) -> tuple[Path, Path]:
    return write_kld(tmp_path / "p", docs, p), write_kld(tmp_path / "q", docs, q, model="w4")


@settings(max_examples=25, deadline=None)
@given(
    n_vocab=st.sampled_from([16, 17, 33, 900, 8192, 8193]),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 2.0, 8.0]),
    change=st.sampled_from([0.0, 0.01, 0.3, 5.0]),
)
def test_the_kl_is_that_of_the_stored_values(
    tmp_path_factory: pytest.TempPathFactory, n_vocab: int, seed: int, spread: float, change: float
) -> None:
    tmp_path = tmp_path_factory.mktemp("kl")
    p = draw(seed, DOCS, n_vocab, spread)
    noise = np.random.default_rng(seed + 1).normal(0, change, p.shape)
    q = log_softmax(p.astype(np.float64) + noise, axis=1).astype(np.float32)
    left, right = pair(tmp_path, p, q)

    found = score(open_recording(left), open_recording(right), threads=1 + seed % 3)

    np.testing.assert_allclose(found.kl, expected_kl(p, q), rtol=1e-6, atol=FLOAT32)
    assert (found.kl >= -FLOAT32).all()
    if change == 0.0:
        assert np.abs(found.kl).max() < 1e-12
    assert found.top1.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    at = (np.arange(ROWS), following(DOCS))
    assert np.array_equal(found.candidate_nll, -q[at])
    assert np.array_equal(found.reference_nll, -p[at])


def test_the_stored_kl_is_near_the_true_one(tmp_path: Path) -> None:
    """float16 and the exact 16 together cost less than 1 % of a requantisation's KL."""
    p = draw(4, DOCS, 20_000, 3.0)
    noise = np.random.default_rng(5).normal(0, 0.1, p.shape)
    q = log_softmax(p + noise, axis=1).astype(np.float32)
    left, right = pair(tmp_path, p, q)
    true = rel_entr(np.exp(p.astype(np.float64)), np.exp(q.astype(np.float64))).sum(axis=1)
    np.testing.assert_allclose(
        score(open_recording(left), open_recording(right)).kl, true, rtol=0.01
    )


def test_the_exact_values_stand_in_for_the_stored_ones_on_both_sides(tmp_path: Path) -> None:
    """Without them the KL of two nearby models is off by half; worked in 2 tokens and a rest."""
    p = np.full((ROWS, 64), -30.0, np.float32)
    q = p.copy()
    p[:, 9], p[:, 30] = math.log(0.6), math.log1p(-0.6)
    q[:, 9], q[:, 30] = math.log(0.601), math.log1p(-0.601)
    left, right = pair(tmp_path, p, q)
    true = 0.6 * math.log(0.6 / 0.601) + 0.4 * math.log(0.4 / 0.399)
    assert true < 3e-6
    np.testing.assert_allclose(
        score(open_recording(left), open_recording(right)).kl, true, rtol=0.05
    )
    rough = np.exp(p.astype(np.float16).astype(float)), np.exp(q.astype(np.float16).astype(float))
    assert not np.allclose(rel_entr(*rough).sum(axis=1), true, rtol=0.3)


def test_a_tie_for_the_likeliest_goes_to_the_lower_id(tmp_path: Path) -> None:
    p, q = np.full((2, ROWS, 20), math.log(0.05), np.float32)
    p[:, [4, 11]] = math.log(0.1)
    q[:, [4, 11]] = math.log(0.1)
    q[0, 4] = math.log(0.0999)
    p, q = (log_softmax(one, axis=1).astype(np.float32) for one in (p, q))
    left, right = pair(tmp_path, p, q)
    found = score(open_recording(left), open_recording(right))
    assert found.top1.tolist() == [False, *[True] * (ROWS - 1)]


def test_a_probability_of_zero_costs_nothing_in_the_reference_and_is_refused_in_the_candidate(
    tmp_path: Path,
) -> None:
    p = draw(1, DOCS, 40)
    p[:, 20] = -np.inf
    p = log_softmax(p, axis=1).astype(np.float32)
    q = p.copy()
    left, right = pair(tmp_path, p, q)
    assert np.abs(score(open_recording(left), open_recording(right)).kl).max() < 1e-12

    q[2, 7] = -np.inf
    q = log_softmax(q, axis=1).astype(np.float32)
    damaged = write_kld(tmp_path / "zero", DOCS, q)
    with pytest.raises(
        MeasurementRefused, match=r"row 2 .*token 7 has the probability 0, and .* infinite"
    ) as caught:
        score(open_recording(left), open_recording(damaged))
    assert caught.value.kind == "zero"
    # The other way round the reference has no mass there.
    assert np.isfinite(score(open_recording(damaged), open_recording(left)).kl).all()


@pytest.mark.parametrize(
    ("docs", "n_vocab", "kind", "message"),
    [
        (DOCS, 41, "vocabulary", "41 tokens in the vocabulary, not 40"),
        (DOCS[:2], 40, "documents", "2 documents, not 3"),
        ([*DOCS[:2], ("wiki", [7, 7, 7], 0)], 40, "documents", "document 2 has 3 tokens scored"),
        ([*DOCS[:2], ("wiki", [7, 7, 8], 1)], 40, "tokens", "token 12 is 8, not 7"),
    ],
)
def test_a_candidate_of_something_else_is_refused(
    tmp_path: Path, docs: Documents, n_vocab: int, kind: str, message: str
) -> None:
    left = write_kld(tmp_path / "p", DOCS, draw(1, DOCS, 40))
    right = write_kld(tmp_path / "q", docs, draw(1, docs, n_vocab))
    with pytest.raises(MeasurementRefused, match=message) as caught:
        score(open_recording(left), open_recording(right))
    assert caught.value.kind == kind


def test_many_blocks_come_out_in_order_and_progress_reaches_the_end(tmp_path: Path) -> None:
    docs: Documents = [("long", [at % 30 for at in range(1301)], 0)]
    p, q = draw(1, docs, 30), draw(2, docs, 30)
    left, right = pair(tmp_path, p, q, docs)
    told: list[tuple[int, int]] = []
    found = score(
        open_recording(left), open_recording(right), threads=3,
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    np.testing.assert_allclose(found.kl, expected_kl(p, q), rtol=1e-6, atol=FLOAT32)
    assert told == sorted(told)
    assert told[-1] == (1300, 1300)
    assert len(told) == 3


# -- base files -----------------------------------------------------------------------------------

CHUNKS = [[5, 1, 2, 3, 4, 9, 8, 7, 6, 6], [1, 1, 2, 3, 5, 8, 0, 4, 2, 2]]
BASE_DOCS: Documents = [("", chunk, 5) for chunk in CHUNKS]


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_base_files_give_the_true_kl_to_their_sixteen_bits(tmp_path: Path, spread: float) -> None:
    """Within the reach of 16 nothing is floored: a value is off by at most half of 16 / 65535."""
    p = draw(1, BASE_DOCS, 333, spread)
    noise = np.random.default_rng(3).normal(0, 0.3, p.shape)
    q = log_softmax(p + noise, axis=1).astype(np.float32)
    assert max((one.max(axis=1) - one.min(axis=1)).max() for one in (p, q)) < 16 or spread == 3.0
    left = open_recording(write_base(tmp_path / "p.base", CHUNKS, p))
    right = open_recording(write_base(tmp_path / "q.base", CHUNKS, q))
    true = rel_entr(np.exp(p.astype(np.float64)), np.exp(q.astype(np.float64))).sum(axis=1)
    found = score(left, right)
    np.testing.assert_allclose(found.kl, true, atol=8 / 65535)
    assert found.top1.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    at = (np.arange(8), following(BASE_DOCS))
    np.testing.assert_allclose(found.candidate_nll, -q[at], atol=8 / 65535 + 1e-6)
    assert np.abs(score(left, left).kl).max() < 1e-12


def test_what_lies_below_the_floor_has_no_mass(tmp_path: Path) -> None:
    """A peaked row of a large vocabulary: floored tokens counted as they stand would hold 0.4 %."""
    p = np.full((8, 40_000), -40.0, np.float32)
    p[:, 5], p[:, 6] = math.log(0.9), math.log(0.1)
    q = p.copy()
    q[:, 5], q[:, 6] = math.log(0.8), math.log(0.2)
    left = open_recording(write_base(tmp_path / "p.base", CHUNKS, p))
    right = open_recording(write_base(tmp_path / "q.base", CHUNKS, q))
    true = 0.9 * math.log(0.9 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    np.testing.assert_allclose(score(left, right).kl, true, atol=1e-4)


def test_a_base_file_is_a_candidate_of_a_reference_of_the_same_tokens(tmp_path: Path) -> None:
    p = draw(1, BASE_DOCS, 64)
    q = log_softmax(p + np.random.default_rng(3).normal(0, 0.3, p.shape), axis=1)
    left = open_recording(write_kld(tmp_path / "p", BASE_DOCS, p))
    right = open_recording(write_base(tmp_path / "q.base", CHUNKS, q.astype(np.float32)))
    true = rel_entr(np.exp(p.astype(np.float64)), np.exp(q)).sum(axis=1)
    np.testing.assert_allclose(score(left, right).kl, true, atol=5e-4)


# -- the report -----------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> Path:
    p, q = draw(1, DOCS, 40), draw(2, DOCS, 40)
    left, right = pair(tmp_path, p, q)
    out = tmp_path / "gate.json"
    assert main(["kl", "score", str(left), str(right), "--out", str(out)]) == 0
    return out


def test_the_report_and_its_rows_are_as_the_format_says(report: Path) -> None:
    p, q = draw(1, DOCS, 40), draw(2, DOCS, 40)
    kl = expected_kl(p, q).astype(np.float32)
    at = (np.arange(ROWS), following(DOCS))
    agreed = p.argmax(axis=1) == q.argmax(axis=1)
    rows = np.fromfile(f"{report}.rows", "<f4").reshape(ROWS, 4)
    np.testing.assert_allclose(rows[:, 0], kl, rtol=1e-6)
    assert np.array_equal(rows[:, 1], -q[at])
    assert np.array_equal(rows[:, 2], -p[at])
    assert rows[:, 3].tolist() == agreed.astype(float).tolist()

    said = json.loads(report.read_text())
    assert list(said) == [
        "model", "reference", "ref_dir", "corpus", "created", "docs", "percentile", "all",
        "by_source",
    ]  # fmt: skip
    assert (said["model"], said["reference"]) == ("w4", "small-bf16")
    assert said["ref_dir"] == str(report.parent / "p")
    assert (said["corpus"], said["docs"]) == ("/corpora/mixed.jsonl", 3)
    assert said["percentile"] == "linear interpolation between order statistics"
    assert list(said["by_source"]) == ["code", "wiki"]
    for part, chosen in (
        (said["all"], list(range(ROWS))),
        (said["by_source"]["code"], [3, 4, 5]),
        (said["by_source"]["wiki"], [0, 1, 2, 6]),
    ):
        assert list(part) == ["positions", "kld", "top1_agreement", "ppl"]
        assert part["positions"] == len(chosen)
        ordered = sorted(float(value) for value in kl[chosen])
        assert part["kld"]["mean"] == pytest.approx(sum(ordered) / len(ordered), rel=1e-6)
        assert part["kld"]["max"] == pytest.approx(ordered[-1], rel=1e-6)
        for key, share in (
            ("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p99_9", 0.999),
            ("p99_99", 0.9999),
        ):  # fmt: skip
            place = share * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            value = ordered[low] + (place - low) * (ordered[high] - ordered[low])
            assert part["kld"][key] == pytest.approx(value, rel=1e-6)
        assert set(part["kld"]) == {
            "mean", "median", "p90", "p95", "p99", "p99_9", "p99_99", "max",
        }  # fmt: skip
        assert part["top1_agreement"] == np.mean(agreed[chosen])
        ppl = {
            "candidate": math.exp(np.mean(rows[chosen, 1].astype(float))),
            "reference": math.exp(np.mean(rows[chosen, 2].astype(float))),
        }
        assert part["ppl"] == pytest.approx({**ppl, "ratio": ppl["candidate"] / ppl["reference"]})


def test_names_that_are_no_text_end_no_scoring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder may have any bytes as its name; what was scored is not lost for that."""
    p, q = draw(1, DOCS, 40), draw(2, DOCS, 40)
    folder = tmp_path / os.fsdecode(b"odd-\xff")
    folder.mkdir()
    left, right = pair(folder, p, q)
    out, receipt = tmp_path / "gate.json", tmp_path / "receipt.json"
    assert main(["kl", "score", str(left), str(right), "--out", str(out)]) == 0
    report, _ = read_report(out)
    assert report["ref_dir"] == str(left)
    assert b"odd-\\udcff/p" in out.read_bytes()
    assert main(["kl", "gate", str(out), "--receipt", str(receipt)]) == 2
    assert json.loads(receipt.read_bytes())["report"]["ref_dir"] == str(left)
    assert "Traceback" not in capfd.readouterr().err


def test_a_likelihood_that_gives_no_perplexity_is_refused(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = report.parent / "p" / "rows.f32"
    raw = rows.read_bytes()
    rows.write_bytes(struct.pack("<f", 1e30) + raw[4:])
    words = ["kl", "score", str(report.parent / "p"), str(report.parent / "q")]
    capsys.readouterr()
    assert main([*words, "--out", str(report.with_name("new.json"))]) == 4
    said = capsys.readouterr().err
    assert "the mean negative log-likelihood is" in said
    assert said.count("\n") == 1
    # The same in a report's rows, which the gate reads again.
    table = np.fromfile(f"{report}.rows", "<f4")
    table[1] = 1e30
    table.tofile(f"{report}.rows")
    assert main(["kl", "gate", str(report)]) == 4
    assert "no perplexity of a model" in capsys.readouterr().err


def test_a_report_is_never_overwritten(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = report.read_bytes()
    words = ["kl", "score", str(report.parent / "p"), str(report.parent / "q")]
    assert main([*words, "--out", str(report)]) == 4
    assert "exists; a report is never overwritten" in capsys.readouterr().err
    assert report.read_bytes() == before
    # Rows without their report are told before the scoring, not after it.
    report.rename(report.with_name("kept.json"))
    assert main([*words, "--out", str(report)]) == 4
    assert "gate.json.rows: exists; its report is missing" in capsys.readouterr().err
    report.with_name("kept.json").rename(report)
    p, q = (open_recording(report.parent / name) for name in "pq")
    scores = score(p, q)
    own = build_report(scores, p.documents, model="w4", reference="r", ref_dir="d", corpus="")
    with pytest.raises(UsageError, match="never overwritten"):
        write_report(report, own, scores)


def test_a_report_without_its_rows_or_beside_others_is_refused(report: Path) -> None:
    read_report(report)
    rows = Path(f"{report}.rows")
    kept = rows.read_bytes()
    said = json.loads(report.read_text())

    def refused(kind: str, message: str) -> None:
        with pytest.raises(MeasurementRefused, match=message) as caught:
            read_report(report)
        assert caught.value.kind == kind

    rows.write_bytes(kept[:-16])
    refused("size", "96 bytes; 7 positions of 16 bytes are stated")
    rows.unlink()
    refused("missing", r"gate\.json\.rows: is missing")
    rows.write_bytes(kept)
    said["all"]["kld"]["mean"] *= 0.9
    report.write_text(json.dumps(said))
    refused("rows", r"all\.kld\.mean: .*; its rows give")
    report.write_text(json.dumps({**said, "all": {**said["all"], "top1_agreement": "97 %"}}))
    refused("report", r"all\.top1_agreement: is no finite number")
    del said["all"]["ppl"]
    report.write_text(json.dumps(said))
    refused("report", "has no 'ppl'")
    report.write_text("[]")
    refused("report", "is no KL report")
