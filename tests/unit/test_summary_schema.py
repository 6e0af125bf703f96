"""summary.json: what is written is read back; old files are read, odd ones named in one line."""

from __future__ import annotations

import json
import math
import shutil
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_folder import decide, demo_folder, make_plan, make_summary, make_values

from pytest_dsv41 import durable
from pytest_dsv41.archive.verify import read_checkpoints
from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.window import summary as module
from pytest_dsv41.window.summary import (
    COUNTED_STATUSES,
    STATUSES,
    Restore,
    Summary,
    json_schema,
    read_summary,
    write_summary,
)

SCHEMAS = Path(module.__file__).parent / "schemas"


@pytest.fixture
def whole() -> Summary:
    plan = make_plan()
    values = make_values(plan, {"fast": 0.08})
    return make_summary(plan, {"fast": decide(plan, values, "fast")})


def test_written_and_read_back_is_the_same(tmp_path: Path, whole: Summary) -> None:
    path = write_summary(tmp_path, whole)
    assert path == tmp_path / "summary.json"
    assert read_summary(tmp_path) == whole
    assert read_summary(path) == whole


def test_the_file_fits_the_shipped_schema(tmp_path: Path, whole: Summary) -> None:
    schema = json.loads((SCHEMAS / "summary-v1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(write_summary(tmp_path, whole).read_text())
    jsonschema.validate(data, schema)
    assert data["schema"] == "dsv41-summary-v1"
    for field in ("status", "restore", "window", "exit_code"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({key: data[key] for key in data if key != field}, schema)


def test_the_shipped_schema_has_the_models_fields() -> None:
    # Versions of pydantic word a schema differently; what it allows and asks for is the same.
    shipped, own = json.loads((SCHEMAS / "summary-v1.json").read_text()), json_schema()
    for name, table in {"": own, **own["$defs"]}.items():
        other = shipped["$defs"][name] if name else shipped
        assert set(table["properties"]) == set(other["properties"]), name
        assert table.get("required") == other.get("required"), name


def test_every_field_is_described() -> None:
    schema = json.loads((SCHEMAS / "summary-v1.json").read_text())
    for name, table in {"Summary": schema, **schema["$defs"]}.items():
        for field, about in table["properties"].items():
            own = about.get("description")
            of_kind = schema["$defs"].get(about.get("$ref", "").rpartition("/")[2], {})
            assert own or of_kind.get("description"), f"{name}.{field} has no description"


def test_the_contract_fields_are_all_there(tmp_path: Path, whole: Summary) -> None:
    data = json.loads(write_summary(tmp_path, whole).read_text())
    assert set(data) >= {
        *("schema", "window", "status", "exit_code", "started_utc", "ended_utc", "target", "arms"),
        *("starts", "decision_cells", "decisions", "promotion", "incomplete", "stopped", "restore"),
        *("watch", "chain", "production_commit", "archive", "spreads", "alerts", "software"),
    }
    assert set(data["window"]) >= {
        *("id", "lane", "name", "hypothesis", "kind", "seed", "plan_digest", "folder"),
    }
    assert data["archive"]["before"] == {"rows": 120, "sha256": "aa" * 32}


def test_only_the_cap_statuses_count() -> None:
    # WIN2 "Process rules as code" item 2: INCOMPLETE windows and refusals do not count.
    assert frozenset(STATUSES) - {"INCOMPLETE", "REFUSED"} == COUNTED_STATUSES


@pytest.mark.parametrize(
    ("status", "up"),
    [
        ("RESTORED", True),
        ("RESTORED: after one retry", True),
        ("NOT NEEDED: production untouched", True),
        ("CHAINED: production left down", False),
        ("FAILED", False),
        ("FAILED: no answer on port 8000", False),
        ("a word of a later version", False),
    ],
)
def test_only_known_words_say_that_production_is_up(status: str, up: bool) -> None:
    assert Restore(status=status).production_up is up


def test_fields_of_a_later_writer_are_kept(tmp_path: Path, whole: Summary) -> None:
    data = json.loads(write_summary(tmp_path, whole).read_text())
    data["later"] = {"a": 1}
    data["starts"][0]["clock_cap_mhz"] = 2300
    (tmp_path / "summary.json").write_text(json.dumps(data))
    again = read_summary(tmp_path)
    assert again.starts[0].extras() == {"clock_cap_mhz": 2300}
    assert again.to_json()["later"] == {"a": 1}


def test_odd_values_do_not_cost_the_summary(tmp_path: Path) -> None:
    plan = make_plan()
    odd = make_summary(
        plan,
        {},
        decisions={"fast": {"verdict": "WIN", "low": math.nan, "list": [math.inf, "\ud800x"]}},
        spreads={"a/b": {"in_window_cv": math.nan, "archive_cv": None}},
        stopped="half a pair \udcff",
    )
    data = json.loads(write_summary(tmp_path, odd).read_text())
    assert data["decisions"]["fast"] == {"verdict": "WIN", "low": None, "list": [None, "\\ud800x"]}
    assert data["spreads"]["a/b"]["in_window_cv"] is None
    assert data["stopped"] == "half a pair \\udcff"


def test_the_file_is_private_and_plain_ascii(tmp_path: Path) -> None:
    plan = make_plan()
    path = write_summary(tmp_path, make_summary(plan, {}, stopped="\x1b[2J \u202eevil é"))
    assert path.read_bytes().isascii()
    assert b"\x1b" not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failed_write_leaves_the_old_summary(
    tmp_path: Path, whole: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_summary(tmp_path, whole)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_summary(tmp_path, whole.model_copy(update={"exit_code": 20}))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def runner_summary(**changes: Any) -> dict[str, Any]:
    """A summary as a WIN2 runner writes it: no schema, one decision, no window table."""
    return {
        "status": "NOT A CANDIDATE",
        "decision": {
            "rule": "win2-v1",
            "rule_revision": 3,
            "verdict": "NOT A CANDIDATE",
            "decision_cells": ["short-b1"],
            "cells": {"short-b1": {"verdict": "LOSS", "decides": True, "series": []}},
        },
        "production": "596ba1c" + "0" * 33,
        "restore": {"status": "RESTORED"},
        "chain": None,
        **changes,
    }


def test_a_runners_summary_without_a_schema_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "PC1-threshold512-W-20261027T181314Z"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(runner_summary()))
    summary = read_summary(folder)
    assert (summary.window.lane, summary.window.name) == ("PC1", "threshold512")
    assert summary.window.id == "PC1-threshold512-W-20261027T181314Z"
    assert (summary.status, summary.exit_code) == ("NOT A CANDIDATE", 11)
    assert summary.decision_cells == ("short-b1",)
    assert summary.production_commit == "596ba1c" + "0" * 33
    assert summary.restore.production_up


@pytest.mark.parametrize(
    ("said", "commit", "restore"),
    [
        ({"production": {"commit": "5" * 40}}, "5" * 40, "RESTORED"),
        ({"production_commit": "4" * 40, "production": ["K1"]}, "4" * 40, "RESTORED"),
        ({"production": {"arm": "K1"}}, None, "RESTORED"),
        ({"restore": {"identical": 6}}, "596ba1c" + "0" * 33, "NOT RECORDED"),
        ({"restore": {"status": None}, "exit_code": None}, "596ba1c" + "0" * 33, "NOT RECORDED"),
        ({"decision": {"decision_cells": None}}, "596ba1c" + "0" * 33, "RESTORED"),
    ],
)
def test_what_a_runners_summary_leaves_open_does_not_make_it_unreadable(
    tmp_path: Path, said: dict[str, Any], commit: str | None, restore: str
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(runner_summary(**said)))
    summary = read_summary(tmp_path)
    assert (summary.production_commit, summary.restore.status) == (commit, restore)
    assert summary.restore.production_up is (restore == "RESTORED")
    assert (summary.status, summary.exit_code) == ("NOT A CANDIDATE", 11)


OLDER = Path(__file__).parent / "data" / "older-window"
"""A window's files as the first version wrote them."""


def within(old: Any, new: Any) -> bool:
    """Whether everything that `old` says stands in `new`, which may say more."""
    if isinstance(old, dict):
        return old.keys() <= new.keys() and all(within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(within, old, new))
    return bool(old == new)


def test_a_stored_summary_of_the_first_version_is_read_by_all_that_read_summaries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "DEMO-demo-tiny-W-20261130T002557Z"
    shutil.copytree(OLDER, folder)
    data = json.loads((folder / "summary.json").read_text())
    assert "process_rules" not in data
    jsonschema.validate(data, json.loads((SCHEMAS / "summary-v1.json").read_text()))
    found = read_summary(folder)
    assert (found.window.id, found.status, found.exit_code) == (folder.name, "CANDIDATE", 0)
    assert found.process_rules is None
    assert found.restore.production_up
    # What it has no name for stays.
    assert found.watch.extras()["passed"] is True
    assert within(data, found.to_json())
    campaign = ["--campaign", str(tmp_path)]
    assert main(["windows", *campaign]) == 0
    assert "CANDIDATE" in capsys.readouterr().out
    assert main(["window-cap", "DEMO", *campaign, "--since", "2026-11-30"]) == 0
    assert "1 counted window(s) of DEMO" in capsys.readouterr().out
    assert main(["compare", str(folder), str(folder)]) == 0
    capsys.readouterr()
    assert main(["decide", str(folder), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["decisions"]["fast"]["verdict"] == data["decisions"]["fast"]["verdict"]
    points = read_checkpoints([tmp_path])
    assert [point.head.rows for point in points] == [0, 25]


def test_a_runners_chained_summary_is_read(tmp_path: Path) -> None:
    data = runner_summary(chain="CHAINED", restore={"status": "CHAINED: production left down"})
    (tmp_path / "summary.json").write_text(json.dumps(data))
    summary = read_summary(tmp_path)
    assert summary.chain == "CHAINED"
    assert summary.restore.head == "CHAINED"
    assert not summary.restore.production_up


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "damaged, not JSON"),
        ('{"schema": "dsv41-summary-v1"', "damaged, not JSON"),
        ("[]", "a JSON object is expected"),
        ("[" * 100_000, "damaged, not JSON"),
        ('{"schema": "dsv41-summary-v9"}', "'dsv41-summary-v9' is unknown"),
        ('{"schema": 7}', "7 is unknown"),
        ('{"schema": "dsv41-summary-v1"}', "window: Field required"),
        ('{"status": "WON"}', "status: Input should be 'CANDIDATE'"),
        ("\x00\xff", "damaged, not JSON"),
    ],
)
def test_a_damaged_summary_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError) as caught:
        read_summary(tmp_path)
    message = str(caught.value)
    assert told in message
    assert message.startswith(str(tmp_path / "summary.json"))
    assert "\n" not in message


def test_a_summary_cut_at_any_byte_is_never_read_as_another(tmp_path: Path) -> None:
    raw = (demo_folder(tmp_path / "w") / "summary.json").read_bytes().rstrip()
    cut = tmp_path / "summary.json"
    for size in range(0, len(raw), 97):
        cut.write_bytes(raw[:size])
        with pytest.raises(UsageError, match="damaged"):
            read_summary(tmp_path)


def test_a_missing_summary_says_what_that_means(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="still running or was killed"):
        read_summary(tmp_path)


def test_an_unreadable_summary_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_summary(tmp_path)


def test_the_page_about_files_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
    section = page.partition("\n## `summary.json`")[2].partition("\n## ")[0]
    schema = json_schema()
    for key in schema["properties"]:
        assert f"`{key}`" in section, key
    for status in STATUSES:
        assert f"| `{status}` |" in section
