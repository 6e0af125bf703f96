"""`dsv41 init` and `dsv41 decide`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from window_values import CELLS, plan_of, values_of

from pytest_dsv41.cli import main
from pytest_dsv41.window.plan import Plan, make_plan
from pytest_dsv41.window.spec import load_spec
from pytest_dsv41.window.summary import Summary, write_summary


def run(*words: str) -> int:
    return main(list(words))


# -- init ------------------------------------------------------------------------------------------


def test_init_writes_files_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert run("init", str(folder)) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["target.toml", "window.toml"]
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"run it: pytest --window={folder}/window.toml"
    )
    spec = load_spec(folder / "window.toml")
    assert (spec.kind, spec.target.kind, spec.pairing) == ("candidate", "local", "adjacent")
    assert make_plan(spec, CELLS, window_id="a").estimate.total_s < 60


def test_init_takes_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("init") == 0
    assert load_spec("window.toml").target.where == str(tmp_path / "target.toml")


@pytest.mark.parametrize("name", ["target.toml", "window.toml"])
def test_init_overwrites_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    assert run("init", str(tmp_path)) == 4
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
    assert capsys.readouterr().err == (
        f"dsv41 init: {tmp_path / name} exists; nothing was written\n"
    )


def test_init_says_in_one_line_why_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("init", str(tmp_path / "file")) == 4
    assert capsys.readouterr().err.count("\n") == 1


# -- decide ----------------------------------------------------------------------------------------

EFFECTS = {"CANDIDATE": (0.92, 0), "INCONCLUSIVE": (1.0, 10), "NOT A CANDIDATE": (1.08, 11)}


def window_folder(folder: Path, plan: Plan, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    (folder / "values.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def summary(status: str, code: int, stopped: str | None = None) -> Summary:
    return Summary.model_validate(
        {
            "window": {"id": "L-w-W-1", "lane": "L", "name": "w"},
            "status": status,
            "exit_code": code,
            "stopped": stopped,
            "restore": {"status": "RESTORED"},
        }
    )


@pytest.mark.parametrize("status", EFFECTS)
def test_decide_ends_with_the_windows_code_wherever_the_folder_lies(
    tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    factor, code = EFFECTS[status]
    plan = plan_of(tmp_path)
    rows = values_of(plan, {("c1", "ms_per_round"): factor})
    folder = window_folder(tmp_path / "a", plan, rows)
    assert run("decide", str(folder)) == code
    first = capsys.readouterr().out
    assert first.splitlines()[0] == f"window {plan.window_id}"
    assert first.splitlines()[-1] == f"{status} (exit {code})"
    assert ("promotion: arm c1, profile single, on decode-b1" in first) == (code == 0)
    moved = folder.rename(tmp_path / "elsewhere")
    assert run("decide", str(moved)) == code
    assert capsys.readouterr().out == first


def test_decide_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, {("c1", "ms_per_round"): 0.92})
    assert run("decide", str(window_folder(tmp_path / "a", plan, rows)), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["window_id"], told["status"]) == (plan.window_id, "CANDIDATE")
    assert told["decisions"]["c1"]["rule"] == "win2-v1"


def test_decide_knows_from_the_summary_that_the_window_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path)
    folder = window_folder(tmp_path / "a", plan, values_of(plan))
    write_summary(folder, summary("INCOMPLETE", 12, "signal SIGTERM"))
    assert run("decide", str(folder)) == 12
    assert "missing: stopped: signal SIGTERM\n" in capsys.readouterr().out


def test_decide_points_at_a_summary_that_ended_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path)
    folder = window_folder(tmp_path / "a", plan, values_of(plan))
    write_summary(folder, summary("INCONCLUSIVE", 20))
    assert run("decide", str(folder)) == 10
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the window itself ended as INCONCLUSIVE (exit 20), see its summary.json"
    )


def test_decide_of_a_window_that_never_opened_is_13_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = window_folder(tmp_path / "a", plan_of(tmp_path), [])
    (folder / "values.jsonl").unlink()
    write_summary(folder, summary("REFUSED", 13, "HOLD: belongs to somebody-else"))
    assert run("decide", str(folder)) == 13
    assert capsys.readouterr().out.splitlines()[1:] == [
        "refused: HOLD: belongs to somebody-else",
        "REFUSED (exit 13)",
    ]
    assert run("decide", str(folder), "--json") == 13
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["exit_code"], told["incomplete"]) == ("REFUSED", 13, [])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("plan.json", None),
        ("plan.json", "{"),
        ("values.jsonl", "x\n{}\n"),
        ("summary.json", "{"),
        ("summary.json", '{"schema": "other"}'),
    ],
)
def test_decide_tells_a_damaged_file_in_one_line(
    tmp_path: Path, file: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(tmp_path)
    folder = window_folder(tmp_path / "a", plan, values_of(plan))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    assert run("decide", str(folder)) == 4
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"dsv41 decide: {folder / file}")
