"""The page about the payload: its gate file loads, its tables name the code's keys and answers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.payload import gates
from pytest_dsv41.payload.gates import load_gate
from pytest_dsv41.quality.fleet import PROBES
from pytest_dsv41.unit import UNITS
from tests.docs.test_reference_matches_the_code import rows

PAGE = (Path(__file__).parents[2] / "docs" / "payload.md").read_text("utf-8")


def test_the_gate_file_on_the_page_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "gate.toml"
    path.write_text(text)
    gate = load_gate(path)
    assert (len(gate.before), len(gate.after)) == (4, 2)


def test_every_key_of_a_gate_file_and_of_its_checks() -> None:
    section = PAGE.partition("## A command between gates")[2]
    keys = [row[0].strip("`") for row in rows(section, "key")]
    assert keys == list(gates._Table.model_fields)
    checks = {
        row[0].strip("`"): set(re.findall("`([a-z_]+)`", row[1])) for row in rows(section, "check")
    }
    assert checks == {
        kind: set(model.model_fields) - {"check", "name"} for kind, model in gates._KINDS.items()
    }


def test_every_probe_and_every_unit() -> None:
    section = PAGE.partition("## What a server offers")[2]
    assert [row[0].strip("`") for row in rows(section, "probe")] == list(PROBES)
    assert all(f"`{unit}`" in PAGE for unit in UNITS)


def test_the_knob_gates_lines_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Read-only, on knobs this machine may have: an answer of the gate, never wrong use."""
    (line,) = re.findall(r"^ExecStartPre=\+\S+/dsv41 (.*?--raise)$", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    words.remove("--raise")
    assert main(words) in (0, 2)
    assert "knob-gate: " in "".join(capsys.readouterr())
