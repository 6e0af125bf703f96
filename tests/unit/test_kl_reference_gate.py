"""`dsv41 kl`: the gate against its user's limits, its receipt, the scored shape, exit codes."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kl_files import Documents, draw, write_base, write_kld

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference import Limits, judge, left_shape
from pytest_dsv41.quality.reference.report import build_report, write_report
from pytest_dsv41.quality.reference.score import Scores

DOCS: Documents = [("wiki", list(range(30)), 9)]


def report(path: Path, kl: float, agreed: int, candidate_nll: float = 0.5) -> Path:
    """A report of 20 positions: a mean KL, so many agreements, NLLs of 0.5 and the candidate's."""
    scores = Scores(
        kl=np.full(20, kl, np.float32),
        candidate_nll=np.full(20, candidate_nll, np.float32),
        reference_nll=np.full(20, 0.5, np.float32),
        top1=np.arange(20) < agreed,
    )
    documents = judged_documents()
    made = build_report(
        scores, documents, model="w4", reference="bf16", ref_dir="ref", corpus="mixed.jsonl"
    )
    write_report(path, made, scores)
    return path


def judged_documents() -> Any:
    from pytest_dsv41.quality.reference.manifest import lay_out

    return lay_out([("wiki", 30, 9)])


@pytest.mark.parametrize(
    ("kl", "agreed", "nll", "verdict", "broken"),
    [
        (0.0146, 20, 0.5126, "PASS", []),  # ratio 1.0127
        (0.03125, 20, 0.5, "FAIL", ["mean KL"]),
        (0.0146, 19, 0.5, "PASS", []),  # 95 % exactly is kept
        (0.0146, 18, 0.5, "FAIL", ["top-1 agreement"]),
        (0.0146, 20, 0.53, "FAIL", ["perplexity ratio"]),  # e^0.03 = 1.0305
        (1.5, 0, 2.5, "FAIL", ["mean KL", "top-1 agreement", "perplexity ratio"]),
    ],
)
def test_every_limit_that_is_not_kept_fails(
    tmp_path: Path, kl: float, agreed: int, nll: float, verdict: str, broken: list[str]
) -> None:
    path = report(tmp_path / "r.json", kl, agreed, nll)
    receipt = judge(path, Limits(ppl_ratio_max=1.02), {})
    assert receipt.verdict == verdict
    assert [check.name for check in receipt.checks if check.passed is False] == broken
    ratio = next(check for check in receipt.checks if check.name == "perplexity ratio")
    assert ratio.value == pytest.approx(math.exp(nll - 0.5), rel=1e-6)


def test_a_limit_that_is_not_given_is_reported_and_does_not_decide(tmp_path: Path) -> None:
    receipt = judge(report(tmp_path / "r.json", 0.001, 20, 3.0), Limits(), {})
    assert receipt.verdict == "PASS"
    (ratio,) = [check for check in receipt.checks if check.limit is None]
    assert (ratio.name, ratio.passed) == ("perplexity ratio", None)


def test_a_report_with_further_keys_is_judged_as_well(tmp_path: Path) -> None:
    """radiance's own reports count the documents of each source."""
    path = report(tmp_path / "r.json", 0.0146, 20)
    said = json.loads(path.read_text())
    said["by_source"]["wiki"]["docs"] = 1
    path.write_text(json.dumps(said, indent=1) + "\n")
    assert judge(path, Limits(), {}).verdict == "PASS"


SPEC = """\
mean_kl_max = 0.02
top1_min = 0.9
ppl_ratio_max = 1.05

[shape]
kv_cache_dtype = "fp8"
max_num_batched_tokens = 2048
speculation = false
"""


def test_the_receipt_holds_the_answer_the_shape_and_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = report(tmp_path / "r.json", 0.0146, 19)
    spec, out = tmp_path / "gate.toml", tmp_path / "receipt.json"
    spec.write_text(SPEC)
    words = ["kl", "gate", str(path), "--spec", str(spec), "--receipt", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("PASS: w4\n")
    said = json.loads(out.read_text())
    assert (said["schema"], said["verdict"]) == ("dsv41-kl-gate-1", "PASS")
    assert {one["name"]: one["limit"] for one in said["checks"]} == {
        "mean KL": 0.02, "top-1 agreement": 0.9, "perplexity ratio": 1.05,
    }  # fmt: skip
    assert said["shape"] == {
        "kv_cache_dtype": "fp8", "max_num_batched_tokens": 2048, "speculation": False,
    }  # fmt: skip
    assert said["report"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    rows = Path(f"{path}.rows").read_bytes()
    assert said["report"]["rows_sha256"] == hashlib.sha256(rows).hexdigest()
    assert (said["report"]["positions"], said["report"]["model"]) == (20, "w4")
    assert main(words) == 4
    assert "a receipt is never overwritten" in capsys.readouterr().err
    failing = report(tmp_path / "f.json", 0.0201, 20)
    assert main(["kl", "gate", str(failing), "--spec", str(spec), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["verdict"] == "FAIL"


def test_a_server_that_has_left_the_scored_shape_is_told_key_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = report(tmp_path / "r.json", 0.0146, 19)
    spec, out = tmp_path / "gate.toml", tmp_path / "receipt.json"
    spec.write_text(SPEC)
    assert main(["kl", "gate", str(path), "--spec", str(spec), "--receipt", str(out)]) == 0
    capsys.readouterr()
    assert main(["kl", "shape", str(out), str(spec)]) == 0
    assert "the scored shape: 3 keys, none differs" in capsys.readouterr().out
    now = tmp_path / "now.toml"
    now.write_text('[shape]\nkv_cache_dtype = "bf16"\nspeculation = false\nseqs = 3\n')
    assert main(["kl", "shape", str(out), str(now)]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "WARNING: kv_cache_dtype: scored with 'fp8', now 'bf16'",
        "WARNING: max_num_batched_tokens: scored with 2048, now not set",
        "WARNING: seqs: scored without, now 3",
    ]
    assert left_shape({"a": 1}, {"a": True}) == ["a: scored with 1, now True"]
    assert main(["kl", "shape", str(path), str(now)]) == 4
    assert "is no dsv41-kl-gate-1 receipt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean_kl = 0.03\n", "gate.toml:1: mean_kl: unknown key; did you mean 'mean_kl_max'?"),
        ("\ntop1_min = 95\n", "gate.toml:2: top1_min: 95 is above 1; 95 % is written 0.95"),
        ('mean_kl_max = "low"\n', "gate.toml:1: mean_kl_max: a number of at least 0 is needed"),
        ("mean_kl_max = -1\n", "gate.toml:1: mean_kl_max: a number of at least 0 is needed"),
        ("top1_min = true\n", "gate.toml:1: top1_min: a number of at least 0 is needed"),
        ("mean_kl_max = nan\n", "gate.toml:1: mean_kl_max: nan is not a finite number"),
        ("ppl_ratio_max = inf\n", "gate.toml:1: ppl_ratio_max: inf is not a finite number"),
        ("ppl_ratio_max = 0\n", "gate.toml:1: ppl_ratio_max: 0 cannot be kept"),
        ("shape = 3\n", "gate.toml:1: shape: is no table"),
        ("[shape]\nkv = [1]\n", "gate.toml:2: shape.kv: a text, number, true or false is needed"),
    ],
)
def test_a_wrong_spec_is_one_line_that_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = report(tmp_path / "r.json", 0.0146, 19)
    (tmp_path / "gate.toml").write_text(text)
    words = ["kl", "gate", str(path), "--spec", str(tmp_path / "gate.toml")]
    assert main([*words, "--receipt", str(tmp_path / "out.json")]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_a_top_k_report_passes_only_where_its_kl_can_be_trusted(tmp_path: Path) -> None:
    path = report(tmp_path / "r.json", 0.001, 20)
    said = json.loads(path.read_text())
    for share, verdict in ((0.99, "PASS"), (0.5, "FAIL")):
        path.write_text(json.dumps({**said, "topk": {"trusted_share": share}}))
        assert judge(path, Limits(), {}).verdict == verdict
    assert judge(path, Limits(trusted_share_min=0.4), {}).verdict == "PASS"
    for topk in ({}, {"trusted_share": True}, *({"trusted_share": v} for v in (1.01, -0.1, "1"))):
        path.write_text(json.dumps({**said, "topk": topk}))
        with pytest.raises(MeasurementRefused, match=r"topk\.trusted_share: is no share"):
            judge(path, Limits(), {})


def test_the_commands_and_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logp = draw(1, DOCS, 40)
    good = write_kld(tmp_path / "good", DOCS, logp)
    assert main(["kl", "verify", str(tmp_path / "mistyped")]) == 4
    assert main(["kl", "verify", str(good)]) == 0
    assert "whole: 20 rows of 40 tokens, documents: 1, small-bf16" in capsys.readouterr().out
    raw = bytearray((good / "logp.f16").read_bytes())
    raw[80 * 3 : 80 * 3 + 2] = raw[80 * 9 : 80 * 9 + 2] = b"\x00\x7e"
    (good / "logp.f16").write_bytes(raw)
    assert main(["kl", "verify", str(good)]) == 1
    assert [line.partition(": row ")[2][:2] for line in capsys.readouterr().out.splitlines()] == [
        "3 ", "9 ",
    ]  # fmt: skip
    (good / "kld.json").unlink()
    assert main(["kl", "verify", str(good)]) == 1
    assert "has no kld.json" in capsys.readouterr().out
    other = write_kld(tmp_path / "other", DOCS, logp)
    words = ["kl", "score", str(other), "--out", str(tmp_path / "x")]
    assert main([*words, str(good)]) == 4
    assert "has no kld.json" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(other)
    for same in (other, tmp_path / "link"):
        assert main([*words, str(same)]) == 4
        assert f"{same}: is the reference itself: two" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()

    chunk = [list(range(20))]
    base = write_base(tmp_path / "q4.base", chunk, draw(1, [("", chunk[0], 10)], 40))
    (tmp_path / "text.txt").write_text("one\ntwo\n")
    words = ["kl", "convert", str(base), str(tmp_path / "ref"), "--text"]
    assert main([*words, str(tmp_path / "text.txt"), "--model", "small"]) == 0
    assert main([*words, str(tmp_path / "text.txt")]) == 4
    assert "never overwritten" in capsys.readouterr().err
    out = tmp_path / "r.json"
    words = ["kl", "score", str(tmp_path / "ref"), str(base), "--out", str(out), "--threads"]
    assert main([*words, "0"]) == 4
    assert main([*words, "1", "--model", "small-q4", "--json"]) == 0
    said = json.loads(out.read_text())
    assert (said["model"], said["reference"]) == ("small-q4", "small")
    assert said["all"]["kld"]["max"] < 1e-3
    assert main(["kl", "gate", str(out)]) == 0


@pytest.mark.parametrize("value", [10**400, -(10**400), True, "1", [], float("inf"), float("nan")])
def test_a_figure_that_is_no_number_is_refused_by_its_key(tmp_path: Path, value: object) -> None:
    path = report(tmp_path / "r.json", 0.0146, 20)
    said = json.loads(path.read_text())
    said["all"]["kld"]["mean"] = value
    path.write_text(json.dumps(said))
    with pytest.raises(MeasurementRefused, match=r"all\.kld\.mean: is no finite number"):
        judge(path, Limits(), {})
