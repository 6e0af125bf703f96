"""A whole window of probe cells, with a gate and a cost table, as docs/probes.md has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.window.summary import read_summary

from .running import run

PAGE = (Path(__file__).parents[2] / "docs" / "probes.md").read_text("utf-8")
WINDOW = re.search(r'```toml title="probes.toml"\n(.*?)```', PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("floor", "code"), [("100.0", 0), ("100000.0", 11)])
def test_the_window_on_the_page_decides_gates_and_tells_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], floor: str, code: int
) -> None:
    assert WINDOW is not None
    text = WINDOW[1].replace("floor = 100.0", f"floor = {floor}")
    (tmp_path / "probes.toml").write_text(text)
    ended = run(tmp_path / "out", window=str(tmp_path / "probes.toml"))
    assert ended.returncode == code, ended.output[-3000:]
    folder = ended.folder
    summary = read_summary(folder)
    (decision,) = summary.decisions.values()
    gate = decision["cells"]["fast-enough"]
    assert gate["verdict"] == ("PASS" if code == 0 else "LOSS")
    assert gate["gate"]["floor"] == float(floor)
    cost = summary.costs["fast"]
    (key,) = cost.differing
    assert (key.key, key.control, key.candidate) == ("--round-ms", "4.0", "3.2")
    rows = {(row.cell, row.metric): row for row in cost.rows}
    decode = rows["ladder-b1-1k", "decode_tok_s"]
    # 4.0 ms a token against 3.2: 25 %, far outside 3 %.
    assert decode.delta == pytest.approx(0.25, abs=0.08)
    assert (decode.outside, decode.better, decode.n_control) == (True, True, 3)
    assert ("prefill-cold-1k", "decode_tok_s") not in rows
    shown = ended.output
    assert "cost of fast" in shown
    assert "differs in --round-ms: 4.0 → 3.2" in shown
    page = (folder / "report.html").read_text()
    assert "What it costs: fast" in page
    assert "Gate fast-enough of fast" in page
    rung = json.loads((folder / "probes" / "K1-ladder-b1-1k-r0.ladder.json").read_text())
    assert (rung["streams"], rung["depth"], rung["corpus"]) == (1, 1024, "varied")
    assert main(["decide", str(folder)]) == code
    assert "fast-enough" in capsys.readouterr().out


FULL = """
[window]
lane = "P"
name = "full"
hypothesis = "Both arms owe two whole windows at once."
kind = "report"
schedule = "C/X"
repeats = 1

[arms.kept]
role = "control"

[arms.forgetful]
role = "candidate"
args = ["--fault", "/v1/completions:truncate"]

[[cells]]
name = "capacity-2"

[[cells]]
name = "capacity-3"

[limits]
start_s = 60
watch_s = 0.5

[target]
kind = "local"
engine = "llamacpp"
command = [
    "{python}", "-m", "pytest_dsv41", "stub", "--port", "{port}", "--seed", "{seed}", "--engine",
    "llamacpp", "--max-model-len", "512", "--max-running", "2", "--prefill-ms", "400", "--fault",
    "/v1/completions:recall",
]

[target.production]
serve = "window"
"""


@pytest.mark.slow
def test_a_capacity_that_is_not_kept_fails_its_item(tmp_path: Path) -> None:
    (tmp_path / "full.toml").write_text(FULL)
    ended = run(tmp_path / "out", window=str(tmp_path / "full.toml"))
    assert ended.returncode == 0, ended.output[-3000:]
    lines = (ended.folder / "values.jsonl").read_text().splitlines()
    rows = {row["item"]: row for row in map(json.loads, lines)}
    good, cut = rows["C-capacity-2-r0"], rows["X-capacity-2-r0"]
    assert good["outcome"] == "measured"
    assert "prefill_tok_s" in good["values"]
    assert "client_tok_s" not in good["values"]
    assert good["missing"]["client_tok_s"].startswith("law-rate-tokens: ")
    kept = json.loads((ended.folder / good["files"]["capacity"]["file"]).read_text())
    assert (kept["verdict"], kept["shape"]["slots"], kept["height"]) == ("PASS", 2, 480)
    assert (cut["outcome"], cut["kind"]) == ("failed", "capacity")
    assert cut["reason"].startswith("FAIL: one token too many refused: 513 tokens of a window of")
    assert rows["C-capacity-3-r0"]["kind"] == "shape"
    assert "the server has 2 slots" in rows["C-capacity-3-r0"]["reason"]


@pytest.mark.slow
def test_a_cells_sampling_that_breaks_a_law_is_one_line_and_exit_4(tmp_path: Path) -> None:
    text = FULL.replace(
        'name = "capacity-2"\n', 'name = "capacity-2"\nsampling = { cache = "any" }\n'
    )
    (tmp_path / "full.toml").write_text(text)
    ended = run(tmp_path / "out", window=str(tmp_path / "full.toml"))
    assert ended.returncode == 4
    told = "cells.capacity-2.sampling: cell capacity-2: law-salt: a probe proves what was cached"
    assert told in ended.output
    assert "Traceback" not in ended.output
