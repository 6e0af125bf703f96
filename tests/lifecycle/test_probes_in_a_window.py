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
    assert (key.key, key.control, key.candidate) == ("--round-ms", "2.0", "1.6")
    rows = {(row.cell, row.metric): row for row in cost.rows}
    decode = rows["ladder-b1-1k", "decode_tok_s"]
    # 2.0 ms a token against 1.6: 25 %, far outside 3 %.
    assert decode.delta == pytest.approx(0.25, abs=0.08)
    assert (decode.outside, decode.better, decode.n_control) == (True, True, 3)
    assert ("prefill-cold-1k", "decode_tok_s") not in rows
    shown = ended.output
    assert "cost of fast" in shown
    assert "differs in --round-ms: 2.0 → 1.6" in shown
    page = (folder / "report.html").read_text()
    assert "What it costs: fast" in page
    assert "Gate fast-enough of fast" in page
    rung = json.loads((folder / "probes" / "K1-ladder-b1-1k-r0.ladder.json").read_text())
    assert (rung["streams"], rung["depth"], rung["corpus"]) == (1, 1024, "varied")
    assert main(["decide", str(folder)]) == code
    assert "fast-enough" in capsys.readouterr().out
