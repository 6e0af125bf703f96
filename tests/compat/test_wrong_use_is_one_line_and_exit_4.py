"""Wrong use of pytest or of a neighbour plugin: one line, exit code 4, nothing touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"


def run(folder: Path, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"--rootdir={folder}", *words],
        cwd=folder,
        env={**kept, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def assert_refused(folder: Path, code: int, output: str, *parts: str) -> None:
    assert code == 4, output
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    assert len(lines) == 1, output
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in output
    assert not (folder / "dsv41-windows").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-n1"], "pytest-xdist"),
        pytest.param(["-n2", "--dist", "each"], "pytest-xdist", marks=pytest.mark.slow),
        pytest.param(["-d"], "pytest-xdist", marks=pytest.mark.slow),
        pytest.param(["--tx", "popen"], "pytest-xdist", marks=pytest.mark.slow),
        (["--timeout-method=thread", "--timeout=5"], "thread method"),
        pytest.param(["-o", "timeout_method=thread"], "thread method", marks=pytest.mark.slow),
        (["-p", "no:timeout"], "pytest-timeout is off"),
        (["--reruns", "2"], "reruns"),
        (["--count", "2"], "--count"),
        (["--forked"], "forked"),
        (["--setup-plan"], "--window-plan"),
        pytest.param(["--setup-only"], "--window-plan", marks=pytest.mark.slow),
        (["--window-set", "novalue"], "NAME=VALUE"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_a_neighbour_that_would_break_a_window_is_refused(
    words: list[str], part: str, tmp_path: Path
) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", *words)
    assert_refused(tmp_path, code, output, part)


def test_the_thread_method_in_the_environment_is_refused(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", env={"PYTEST_TIMEOUT_METHOD": "thread"})
    assert_refused(tmp_path, code, output, "thread method")


def test_faulthandler_that_exits_is_refused(tmp_path: Path) -> None:
    major = int(pytest.__version__.partition(".")[0])
    if major < 9:
        pytest.skip("faulthandler_exit_on_timeout came with pytest 9")
    code, output = run(tmp_path, "--window=demo-tiny", "-o", "faulthandler_exit_on_timeout=true")
    assert_refused(tmp_path, code, output, "faulthandler_exit_on_timeout")


@pytest.mark.parametrize("mark", ["flaky(reruns=2)", "repeat(2)", "timeout(5, method='thread')"])
def test_a_cell_marked_to_run_twice_or_to_exit_is_refused(mark: str, tmp_path: Path) -> None:
    (tmp_path / "my_cells.py").write_text(
        "import pytest\nfrom pytest_dsv41 import Cell, for_cells\n\n"
        f"@pytest.mark.{mark}\n"
        "@for_cells(Cell(name='mine', prompts=('demo-1',), max_tokens=8))\n"
        "def test_mine(measure):\n    measure()\n"
    )
    (tmp_path / "w.toml").write_text(
        TINY.read_text()
        .replace('name = "decode-b1"', 'name = "mine"')
        .replace("[window]", '[window]\ncell_modules = ["my_cells.py"]')
    )
    code, output = run(tmp_path, "--window=w.toml")
    assert_refused(
        tmp_path, code, output, mark.partition("(")[0] if "time" not in mark else "thread"
    )


EDITS = {
    "unknown key": ('kind = "candidate"', 'kind = "candidate"\nkindd = 1', "kindd"),
    "wrong type": ("repeats = 2", 'repeats = "two"', "repeats"),
    "too few repeats": ("repeats = 2", "repeats = 1", "3"),
    "unknown metric": ('"ms_per_round"', '"speed"', "speed"),
    "unknown cell": ('name = "decode-b1"', 'name = "nosuch"', "nosuch"),
    "a window name with a slash": ('name = "demo-tiny"', 'name = "a/b"', "a/b"),
    "invalid TOML": ("[limits]", "[limits", "w.toml"),
    "an arm twice": ("[arms.fast]", "[arms.control]", "arms"),
    "unknown target kind": ('kind = "local"', 'kind = "cloud"', "cloud"),
    "unknown target key": ('engine = "vllm"', 'engine = "vllm"\ncolour = 1', "colour"),
    "unknown engine": ('engine = "vllm"', 'engine = "tgi"', "tgi"),
    "unknown placeholder": ('"{port}"', '"{prot}"', "prot"),
    "unknown schedule token": ('"K/I/K/I"', '"K/Z/K/Z"', "Z"),
    "three decision cells": (
        "[limits]",
        '[[cells]]\nname = "decode-b2"\ndecision = true\nprimary = "ms_per_round"\n'
        '[[cells]]\nname = "decode-b3"\ndecision = true\nprimary = "ms_per_round"\n[limits]',
        "decision",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        # Each through a pytest process: two by default, the reader's own tests have all of them.
        pytest.param(
            name, marks=() if name in ("unknown key", "invalid TOML") else pytest.mark.slow
        )
        for name in EDITS
    ],
)
def test_a_wrong_window_file_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    old, new, part = EDITS[name]
    text = TINY.read_text()
    assert old in text
    (tmp_path / "w.toml").write_text(text.replace(old, new))
    code, output = run(tmp_path, "--window=w.toml")
    assert_refused(tmp_path, code, output, "w.toml", part)


def test_a_missing_file_names_the_shipped_windows(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=nosuch.toml")
    assert_refused(tmp_path, code, output, "nosuch.toml", "demo")


@pytest.mark.parametrize("name", ["out", "campaign"])
def test_a_folder_that_cannot_be_made_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, output = run(tmp_path, "--window=demo-tiny", f"--window-{name}=file")
    assert code == 4, output
    (line,) = (line for line in output.splitlines() if line.startswith("ERROR:"))
    assert f"--window-{name}" in line
    assert "Traceback" not in output
    assert not list(tmp_path.glob("*/*-W-*"))


@pytest.mark.parametrize("plugin", ["terminal", "junitxml"])
def test_a_plugin_of_pytest_that_is_off_costs_nothing(plugin: str, tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", "--window-plan", "-p", f"no:{plugin}")
    assert code == 0, output


@pytest.mark.parametrize("word", ["--json", "--window-json"])
def test_json_without_a_plan_is_refused(word: str, tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", word)
    assert_refused(tmp_path, code, output, "--window-plan")


def test_nothing_selected_is_pytests_5_and_touches_nothing(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", "-k", "nothing_has_this_name")
    assert code == 5, output
    assert not (tmp_path / "dsv41-windows").exists()


@pytest.mark.parametrize("words", [["--window-plan"], ["--co", "-q"], ["--window-plan", "--json"]])
def test_looking_at_a_window_touches_nothing(words: list[str], tmp_path: Path) -> None:
    code, output = run(tmp_path, "--window=demo-tiny", *words)
    assert code == 0, output
    assert not (tmp_path / "dsv41-windows").exists()


def test_without_a_window_the_plugin_is_inert(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_unconfigure():\n"
        "    names = {'numpy', 'scipy', 'paramiko', 'httpx', 'pydantic', 'rich'}\n"
        "    heavy = names & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy))\n"
    )
    # Other installed plugins load what they like: only this one is looked at.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    code, output = run(tmp_path, "--co", "-q", "-p", "pytest_dsv41.plugin", env=alone)
    assert code == 5
    assert "HEAVY []" in output
    assert "window" not in output
