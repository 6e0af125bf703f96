"""The whole A/A pilot on a real vLLM: the command on two starts, its comparison, its band.

Needs a Python with vLLM (and so with transformers), named by DSV41_VLLM_PYTHON:

    python3 -m venv vllm && vllm/bin/pip install vllm
    DSV41_VLLM_PYTHON=vllm/bin/python pytest -m slow -s tests/real/test_vllm_pilot.py

The registered cells are scaled: prompts of some hundred tokens under the names of the 32K ones,
and answers of a tenth of the registered length, by a model of two layers that is made on the spot.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pilot_scale import scale
from test_quality_vllm import MODELS, PYTHON, serving

from pytest_dsv41.cli import main
from pytest_dsv41.quality.bands import load_band
from tests.real_vllm import ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="set DSV41_VLLM_PYTHON to a Python with: pip install vllm"
    ),
]
PROMPTS = 4
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ONE_AT_A_TIME = ("seeded-short-b1", "seeded-32k-b1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    scale(tmp_path / "corpus", monkeypatch, 400)
    text = Path(__file__).resolve().parents[2] / "LICENSE"
    subprocess.run(
        [PYTHON, "-c", MODELS, str(tmp_path), str(text)],
        check=True, env=ENVIRONMENT, timeout=300,
    )  # fmt: skip
    return tmp_path / "first"


def test_two_starts_pass_and_their_probes_register_as_a_band(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    # The bridge asks with production's priority.
    words = ("--chat-template", str(tmp_path / "chat.jinja"), "--scheduling-policy", "priority")
    files = {start: tmp_path / f"{start}.json" for start in "AB"}
    for start, path in files.items():
        with serving(model, *words) as where:
            code = main(
                [
                    "aa-pilot", "run", "--execute", "--url", where.url, "--start", start,
                    "--out", str(path), "--subset", "short", "--each", str(PROMPTS),
                    "--deadline", "1800",
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
    start = json.loads(files["A"].read_text("utf-8"))
    for name in ONE_AT_A_TIME:
        cell = record["cells"][name]
        assert (cell["outputs_identical"], cell["rounds_identical"]) == (6, 6)
        assert record["diff_cv"][f"{name}/decode_tok_s"] > 0
        # Without a drafter a round is a token after the first (RULES section 0).
        assert [pair["rounds"] for pair in start["cells"][name]["pairs"]] == [24] * 6
    # Cold before the first pair, one prompt a member; other seeds, other texts.
    outputs = [str(pair["outputs"]) for pair in start["cells"]["seeded-short-b1"]["pairs"]]
    assert len(set(outputs)) == 6
    bridge = record["bridge"]["cells"]["bridge-short-1500"]
    assert bridge["missing"] == "the server does not speculate"
    assert [len(one["pairs"]) for one in start["bridge"].values() if "pairs" in one] == [3] * 4
    band = tmp_path / "band.json"
    probes = [str(path.with_name(f"{path.stem}.probe.json")) for path in files.values()]
    assert main(["dist-gate", "band", *probes, "--out", str(band)]) == 0
    print(capsys.readouterr().out)
    registered, _ = load_band(band)
    assert (registered.k, len(registered.prefixes)) == (1, PROMPTS * 8)
    assert registered.engine == "vllm"
