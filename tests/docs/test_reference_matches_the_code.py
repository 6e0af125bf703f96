"""The reference names what the code has and nothing else; the hooks' examples run."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_dsv41
from pytest_dsv41 import cli, fixtures, hookspecs, plugin
from pytest_dsv41.cli import COMMANDS
from pytest_dsv41.engines import LlamaCpp, Radiance, Vllm
from pytest_dsv41.errors import SpecError
from pytest_dsv41.lifecycle.finish import EXIT_ALERT, EXIT_DOWN
from pytest_dsv41.measure.record import replay
from pytest_dsv41.targets import (
    TargetContext,
    endpoints,
    local,
    local_target,
    spark_pair,
    tables,
)
from pytest_dsv41.targets.systemd_unit import table as unit_table
from pytest_dsv41.window.verdict import EXIT_CODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text("utf-8")
CODE = Path(pytest_dsv41.__file__).parent
TINY = CODE / "window" / "examples" / "demo-tiny.toml"
TITLED = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    """A section's text with its subsections."""
    marks = title.partition(" ")[0]
    start = PAGE.index(f"\n{title}\n") + len(title) + 2
    after = re.search(rf"^#{{1,{len(marks)}}} ", PAGE[start:], re.MULTILINE)
    return PAGE[start : start + after.start() if after else None]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose head's first cell is `head`."""
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"| {head} |"))
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append(re.split(r"\s*\|\s*", line.strip("| ")))
    return found


def names(text: str, head: str) -> list[str]:
    """Every `name` in the first column of that table."""
    return [name for row in rows(text, head) for name in re.findall(r"`([^`]+)`", row[0])]


class _Parser:
    """Takes down what the plugin declares."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.ini: list[str] = []

    def getgroup(self, *_words: str) -> _Parser:
        return self

    def addoption(self, name: str, *, dest: str, **_settings: Any) -> None:
        self.options[name] = dest

    def addini(self, name: str, *_words: str, **_settings: Any) -> None:
        self.ini.append(name)


def test_every_option_with_its_ini_key() -> None:
    parser: Any = _Parser()
    plugin.pytest_addoption(parser)
    table = rows(section("## Options"), "option")
    documented = {row[0].strip("`"): row[1].strip("`") for row in table}
    assert documented.keys() == parser.options.keys()
    assert [key for key in documented.values() if key] == parser.ini
    for name, key in documented.items():
        assert parser.options[name] == key or name == "--json"


def test_every_marker() -> None:
    declared = [marker.partition(":")[0] for marker in plugin.MARKERS]
    assert names(section("## Markers"), "marker") == declared


def test_every_fixture() -> None:
    public = {name for name in fixtures.__all__ if name.islower()}
    assert set(names(section("## Fixtures"), "fixture")) == public


def test_every_hook() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", section("## Hooks"), re.MULTILINE)) == sorted(
        hookspecs.__all__
    )


def test_every_command() -> None:
    listed = {name for name, text in COMMANDS.items() if text}
    assert set(names(section("## Commands"), "command")) == listed
    for name in COMMANDS:
        assert (CODE / "cli" / f"{name.replace('-', '_')}.py").exists()


def _without_help(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                if not sub.description:
                    yield f"{path} {name}"
                yield from _without_help(sub, f"{path} {name}")
        elif not action.help:
            yield f"{path} {action.metavar or action.option_strings or action.dest}"


@pytest.mark.parametrize("command", [name for name, text in COMMANDS.items() if text])
def test_help_says_what_every_argument_is(command: str) -> None:
    module = importlib.import_module(f"pytest_dsv41.cli.{command.replace('-', '_')}")
    parser = cli._Parser()
    module.configure(parser)
    assert list(_without_help(parser, f"dsv41 {command}")) == []


def _with_json(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _with_json(sub, f"{path} {name}")
        elif "--json" in action.option_strings:
            yield path


def test_every_command_that_prints_json() -> None:
    found = set()
    for command in (name for name, text in COMMANDS.items() if text):
        module = importlib.import_module(f"pytest_dsv41.cli.{command.replace('-', '_')}")
        parser = cli._Parser()
        module.configure(parser)
        found |= set(_with_json(parser, command))
    text = section("## Commands")
    sentence = text[text.index("`--json` prints") :].partition("; `archive head`")[0]
    assert set(re.findall(r"`([a-z][a-z -]+)`", sentence)) == found


def test_every_exit_code_of_a_window() -> None:
    documented = [int(name) for name in names(section("## Exit codes of a window"), "code")]
    assert documented[:2] == [EXIT_DOWN, EXIT_ALERT]
    assert set(documented) == {*EXIT_CODES.values(), EXIT_DOWN, EXIT_ALERT, 13}


def test_every_environment_variable() -> None:
    reads = re.compile(r"environ(?:\.get\(|\[)\"([A-Z0-9_]+)\"")
    read = {name for path in CODE.rglob("*.py") for name in reads.findall(path.read_text("utf-8"))}
    assert set(names(section("## Environment variables"), "variable")) == read - {"PYTHONPATH"}
    text = (TINY.parent / "llamacpp.toml").read_text("utf-8")
    for variable in tomllib.loads(text)["variables"].values():
        assert f"`{variable['env']}`" in section("## Environment variables")


def test_every_key_of_the_targets() -> None:
    text = section("## Target `local`")
    assert set(names(text, "key")) == set(local._Table.model_fields)
    inner = text[text.index("Keys of `[target.production]`") :]
    assert set(names(inner, "key")) == set(local._Production.model_fields)
    assert set(local._Production.model_fields) - set(local._Server.model_fields) == {"serve"}
    keys = names(section("## Target `endpoints`"), "key")
    assert set(keys) == set(endpoints._Table.model_fields)
    text = section("## Target `spark-pair`")
    found = [set(names(part, "key")) for part in text.split("Keys of ")]
    assert found == [
        set(spark_pair._Table.model_fields),
        set(tables.HostTable.model_fields),
        set(spark_pair._Production.model_fields),
    ]
    assert set(spark_pair._Server.model_fields) < set(spark_pair._Production.model_fields)
    text = section("## Target `systemd-unit`")
    found = [set(names(part, "key")) for part in text.split("Keys of ")]
    assert found == [
        set(unit_table.UnitTable.model_fields),
        set(unit_table.Knobs.model_fields),
        set(unit_table.UnitHost.model_fields),
    ]


def test_every_placeholder(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        base=tmp_path, campaign=tmp_path, folder=tmp_path, window_id="W", seed=1, limits={},
        state={}, variables={}, log=None, pause=None, epoch=0,
    )  # fmt: skip
    assert set(TargetContext.__dataclass_fields__) == set(vars(context))
    table = {"command": ["serve", "{nonsense}"], "production": {"serve": "window"}}
    with pytest.raises(SpecError, match="unknown placeholder") as caught:
        local_target(table, context)
    valid = str(caught.value).partition("valid: ")[2].split(", ")
    assert sorted(names(section("### Placeholders"), "placeholder")) == valid


def test_every_engine() -> None:
    shipped = {engine.name for engine in (Vllm, LlamaCpp, Radiance)}
    assert set(names(section("## Engines"), "engine")) == shipped


def test_words_that_do_not_parse_and_work_that_cannot_be_done(tmp_path: Path) -> None:
    codes = [
        subprocess.run(
            [sys.executable, "-m", "pytest_dsv41", *words],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        ).returncode
        for words in (["status", "--nonsense"], ["status"], ["decide", "nowhere"])
    ]
    assert codes == [4, 4, 4]


# -- the hooks' examples ------------------------------------------------------------------------


def example(hook: str) -> dict[str, str]:
    """The files of a hook's docstring: each begins with a comment that is its name."""
    doc = inspect.cleandoc(getattr(hookspecs, hook).__doc__ or "")
    files: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(doc.partition("::\n")[2]).strip("\n").splitlines():
        title = re.fullmatch(r"# (\w+\.py)", line)
        if title:
            name = title[1]
            files[name] = ""
        else:
            files[name] += f"{line}\n"
    return {name: f"{text.strip()}\n" for name, text in files.items()}


@pytest.mark.parametrize("hook", hookspecs.__all__)
def test_a_hooks_example_is_the_same_in_the_code_and_on_the_page(hook: str) -> None:
    assert dict(TITLED.findall(section(f"### `{hook}`"))) == example(hook)


CELL = """\
import asyncio

import pytest

from pytest_dsv41 import Cell, for_cells


@for_cells(Cell("own-b1", prompts=("demo-1",), max_tokens=48, estimated_s=0.3))
async def test_own(measure, window, hold, start, endpoint, restore):
    assert asyncio.get_running_loop().is_running()
    assert hold == window.window_id
    assert start in window.items
    assert endpoint.engine == "mine"
    assert len(restore["answers"]) == 6
    with pytest.raises(ValueError, match="unknown metric 'joules'; valid: .*joules_per_token"):
        measure.value("joules", 1.0)
    with pytest.raises(ValueError, match="joules_per_token: nan is not a finite number"):
        measure.value("joules_per_token", float("nan"))
    await asyncio.sleep(0)
    result = measure()
    # As if a meter had counted: a tenth less in the candidate.
    per_round = 2.0 if start.arm == "control" else 1.8
    measure.value("joules_per_token", per_round / result.values["accepted_per_round"].value)
"""


def test_all_hooks_examples_run_in_one_window(tmp_path: Path) -> None:
    conftest = ""
    for hook in hookspecs.__all__:
        files = example(hook)
        conftest += f"{files.pop('conftest.py')}\n\n"
        for name, text in files.items():
            (tmp_path / name).write_text(text)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "my_cells.py").write_text(CELL)
    window = TINY.read_text("utf-8")
    for old, new in (
        ('schedule = "K/I/K/I"', 'schedule = "K/I/K/I"\ncell_modules = ["my_cells.py"]'),
        ('name = "decode-b1"', 'name = "own-b1"'),
        ('primary = "ms_per_round"', 'primary = "joules_per_token"'),
        ('kind = "local"', 'kind = "rack"'),
        ('engine = "vllm"', 'engine = "mine"'),
    ):
        assert window.count(old) == 1
        window = window.replace(old, new)
    (tmp_path / "window.toml").write_text(window)

    done = _pytest(tmp_path, "--window=window.toml", "--window-seed=0")

    assert done.returncode == 0, done.stdout
    folder = next(path for path in (tmp_path / "dsv41-windows").iterdir() if "-W-" in path.name)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "CANDIDATE"
    assert summary["window"]["seed"] == 0
    assert summary["target"]["kind"] == "rack"
    assert summary["target"]["engine"] == "mine"
    assert summary["advisory"]["count"] == ["8 of 8 items have a row"]
    assert "8 of 8 items have a row" in done.stdout
    assert (folder / "mail.txt").read_text() == (folder / "summary.json").read_text()
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    steps = (tmp_path / "steps.txt").read_text().splitlines()
    assert steps == [f"{line['step']} {line['event']}" for line in journal]
    # Equal seeds give both arms of a pair equal acceptance: the gain is the meter's alone.
    primary = summary["decisions"]["fast"]["cells"]["own-b1"]["series"][0]
    assert primary["metric"] == "joules_per_token"
    assert primary["gain"] == pytest.approx(0.1)
    rows_ = [json.loads(line) for line in (folder / "values.jsonl").read_text().splitlines()]
    for row in rows_:
        value = row["values"]["joules_per_token"]
        assert (value["unit"], value["lower_is_better"], value["source"]) == ("J", True, "cell")
    assert {path.stem for path in (folder / "raw").iterdir()} == {row["item"] for row in rows_}


@pytest.mark.slow
def test_a_raw_record_gives_the_items_values_again(tmp_path: Path) -> None:
    (tmp_path / "my_cells.py").write_text(
        "from pytest_dsv41 import Cell, for_cells\n"
        "def cell(record):\n"
        '    return Cell(record, prompts=("demo-1",), max_tokens=16, record=record)\n'
        '@for_cells(cell("redacted"), cell("bytes"), cell("none"))\n'
        "def test_it(measure):\n"
        "    measure()\n"
    )
    window = TINY.read_text("utf-8").partition("[[cells]]")
    limits = window[2][window[2].index("[limits]") :]
    named = "".join(f'[[cells]]\nname = "{name}"\n' for name in ("redacted", "bytes", "none"))
    text = f"{window[0]}{named}{limits}".replace(
        "repeats = 2", 'repeats = 1\ncell_modules = ["my_cells.py"]'
    )
    text = text.replace('kind = "candidate"', 'kind = "report"').replace('"K/I/K/I"', '"K/I"')
    (tmp_path / "window.toml").write_text(text)

    done = _pytest(tmp_path, "--window=window.toml")

    assert done.returncode == 0, done.stdout
    folder = next(path for path in (tmp_path / "dsv41-windows").iterdir() if "-W-" in path.name)
    kept = sorted((folder / "raw").iterdir())
    assert [path.stem for path in kept] == [
        "I-bytes-r0", "I-redacted-r0", "K-bytes-r0", "K-redacted-r0",
    ]  # fmt: skip
    values = {
        row["item"]: row["values"]
        for row in map(json.loads, (folder / "values.jsonl").read_text().splitlines())
    }
    for path in kept:
        again = replay(path)
        assert again.same
        assert again.parsed_again == ("bytes" in path.stem)
        assert {name: value["value"] for name, value in values[path.stem].items()} == {
            name: value.value for name, value in again.values.items()
        }


# -- options in ini -----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_option_works_from_ini(tmp_path: Path) -> None:
    (tmp_path / "window.toml").write_text(
        TINY.read_text("utf-8").replace('["--round-ms", "1.6"]', '["--round-ms", "{fast}"]')
        + '\n[variables.fast]\nhelp = "the candidate\'s round"\n'
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nwindow = window.toml\nwindow_plan = files\nwindow_out = there\n"
        "window_campaign = shared\nwindow_report_only = true\nwindow_seed = 0\n"
        "window_json = true\nwindow_set =\n    fast=1.6\n"
    )
    done = _pytest(tmp_path, "-q")
    assert done.returncode == 0, done.stdout
    plan = json.loads(done.stdout)
    assert plan["seed"] == 0
    assert Path(plan["spec"]["out"]).name == "there"
    assert Path(plan["spec"]["campaign"]).name == "shared"
    assert plan["spec"]["report_only"] is True
    assert plan["spec"]["variables"] == {"fast": "1.6"}
    # The command line wins; an empty window is none.
    done = _pytest(tmp_path, "-q", "--window-seed=5", "--window-set=fast=1.7")
    assert json.loads(done.stdout)["seed"] == 5
    assert "window" not in _pytest(tmp_path, "--window=", "-o", "window_plan=").stdout
    listed = _pytest(tmp_path, "-o", "window_list=true").stdout
    assert [line.split()[0] for line in listed.splitlines()] == sorted(
        path.stem for path in TINY.parent.glob("*.toml")
    )


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("window_plan=soon", "window_plan: 'soon'; valid: files, live"),
        ("window_seed=one", "window_seed: 'one' is not a whole number"),
        ("window_set=fast", "fast: write NAME=VALUE"),
    ],
)
def test_a_wrong_value_in_ini_is_one_line_and_exit_4(key: str, part: str, tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--window=demo-tiny", "-o", key)
    assert done.returncode == 4
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 1, done.stdout
    assert part in lines[0]
    assert not any(tmp_path.iterdir())


def _pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            f"--rootdir={folder}",
            "-p",
            "no:cacheprovider",
            "-p",
            "timeout",
            "-p",
            "dsv41",
            *words,
        ],
        cwd=folder,
        # The plugins that a window needs, by their entry points; others only cost time here.
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
