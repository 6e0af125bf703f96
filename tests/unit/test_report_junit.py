"""junit.xml: every planned item is one case, the window's own end another, rebuilt from files."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import junitparser
import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from report_folder import (
    broken,
    decide,
    demo_folder,
    make_plan,
    make_summary,
    make_values,
    write_folder,
)

from pytest_dsv41.errors import UsageError
from pytest_dsv41.report import write_views
from pytest_dsv41.report.junit import write_junit

RESTORED = {"status": "RESTORED", "answers_identical": 6, "seconds": 3.2}


def suite_of(folder: Path) -> junitparser.TestSuite:
    (suite,) = JUnitXml.fromfile(str(write_junit(folder)))
    return suite


def cases_of(folder: Path) -> dict[str, junitparser.TestCase]:
    suite = suite_of(folder)
    cases = {case.name: case for case in suite}
    assert len(cases) == suite.tests == len(list(suite))
    return cases


def test_a_whole_window_passes_with_all_its_properties(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w")
    suite = suite_of(folder)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (25, 0, 0, 0)
    # 24 items of 1.25 s, and the restore's 3.2 s.
    assert suite.time == pytest.approx(24 * 1.25 + 3.2)
    assert suite.timestamp == "2026-11-29T20:33:11"
    properties = {entry.name: entry.value for entry in suite.properties()}
    assert properties["window"] == "DEMO-demo-W-20261129T203311Z"
    assert (properties["lane"], properties["name"]) == ("DEMO", "demo")
    assert (properties["status"], properties["exit_code"]) == ("CANDIDATE", "0")
    assert properties["arms"] == "control (control), fast (candidate)"
    assert properties["seed"] == "7"
    assert properties["plan_digest"] == "d1" * 32
    assert properties["archive_head_before"] == f"120 {'aa' * 32}"
    assert properties["archive_head_after"] == f"168 {'bb' * 32}"
    assert properties["decision.fast"] == "CANDIDATE"
    assert properties["promotion"] == "fast single short-b1"
    assert properties["software.python"] == "3.12.4"


def test_a_verdict_is_no_test_failure(tmp_path: Path) -> None:
    suite = suite_of(demo_folder(tmp_path / "w", gain=-0.08))
    assert (suite.failures, suite.errors) == (0, 0)
    properties = {entry.name: entry.value for entry in suite.properties()}
    assert (properties["status"], properties["exit_code"]) == ("NOT A CANDIDATE", "11")


def test_each_outcome_of_an_item(tmp_path: Path) -> None:
    plan = make_plan()
    values = make_values(plan, {"fast": 0.08})
    values[0] = broken(values[0], "failed", "timeout", "no token within 20 s")
    values[1] = broken(values[1], "refused", "foreign_request", "the counter moved by 2")
    values[2] = broken(values[2], "skipped", "start", "start K1 did not come up")
    gone = values.pop(3)
    summary = make_summary(
        plan, {}, status="INCOMPLETE", exit_code=12, incomplete=[f"{gone['item']} was deselected"]
    )
    cases = cases_of(write_folder(tmp_path / "w", plan, values, summary))
    assert cases["K1-short-b1-r0"].result == [Failure("no token within 20 s", "failed.timeout")]
    (refused,) = cases["K1-short-b1-r1"].result
    assert isinstance(refused, Error)
    assert (refused.type, refused.message) == ("refused.foreign_request", "the counter moved by 2")
    (skipped,) = cases["K1-short-b1-r2"].result
    assert isinstance(skipped, Skipped)
    assert skipped.message == "start K1 did not come up"
    (missing,) = cases["K1-32k-b1-r0"].result
    assert isinstance(missing, Skipped)
    assert missing.message == "K1-32k-b1-r0 was deselected"
    assert cases["K1-32k-b1-r1"].result == []
    assert "ms_per_round 20.08 ms (server)" in str(cases["K1-32k-b1-r1"].system_out)


def test_an_item_is_not_taken_for_a_longer_named_one(tmp_path: Path) -> None:
    plan = make_plan(cells={"short-b1": True, "xshort-b1": False}, repeats=11)
    summary = make_summary(
        plan,
        {},
        status="INCOMPLETE",
        exit_code=12,
        incomplete=["K1-short-b1-r10 was refused"],
    )
    cases = cases_of(write_folder(tmp_path / "w", plan, [], summary))
    assert cases["K1-short-b1-r10"].result[0].message == "K1-short-b1-r10 was refused"
    assert cases["K1-short-b1-r1"].result[0].message == "deselected"


def test_an_incomplete_window_is_never_all_green(tmp_path: Path) -> None:
    plan = make_plan()
    summary = make_summary(
        plan,
        {},
        status="INCOMPLETE",
        exit_code=12,
        stopped="SIGTERM",
        incomplete=[
            "stopped: SIGTERM",
            "K1-short-b1-r0, K1-short-b1-r1 and 22 more not measured",
        ],
    )
    folder = write_folder(tmp_path / "w", plan, [], summary)
    cases = cases_of(folder)
    (error,) = cases["window::complete"].result
    assert isinstance(error, Error)
    assert (
        error.message == "stopped: SIGTERM; K1-short-b1-r0, K1-short-b1-r1 and 22 more not measured"
    )
    assert cases["K1-short-b1-r0"].result[0].message == "not reached: SIGTERM"
    assert cases["window::restore"].result == []


def test_an_item_of_a_start_that_never_came_up_says_so(tmp_path: Path) -> None:
    plan = make_plan()
    summary = make_summary(
        plan,
        {},
        status="INCOMPLETE",
        exit_code=12,
        starts=[{"name": "I1", "arm": "fast", "reason": "not healthy within 20 s"}],
    )
    cases = cases_of(write_folder(tmp_path / "w", plan, [], summary))
    (skipped,) = cases["I1-short-b1-r0"].result
    assert skipped.message == "start I1 did not come up: not healthy within 20 s"
    assert cases["I2-short-b1-r0"].result[0].message == "deselected"


@pytest.mark.parametrize(
    ("restore", "watch", "kind"),
    [
        (RESTORED, {"status": "PASS"}, None),
        (RESTORED, {"status": "FAIL", "reason": "no answer"}, Failure),
        ({"status": "FAILED", "reason": "5 of 6 answers"}, {"status": "NOT RUN"}, Failure),
        ({"status": "a later word"}, {"status": "PASS"}, Failure),
        ({"status": "CHAINED: production left down"}, {"status": "NOT RUN"}, Skipped),
        ({"status": "NOT NEEDED: production untouched"}, {"status": "NOT RUN"}, Skipped),
    ],
)
def test_the_restore_is_a_case_of_its_own(
    tmp_path: Path, restore: dict[str, object], watch: dict[str, object], kind: type | None
) -> None:
    folder = demo_folder(tmp_path / "w", restore=restore, watch=watch)
    cases = cases_of(folder)
    results = cases["window::restore"].result
    assert [type(result) for result in results] == ([kind] if kind else [])
    # No cell is ever blamed for it.
    assert all(not case.result for name, case in cases.items() if not name.startswith("window::"))


def test_the_restores_time_comes_from_the_journal_if_the_summary_lacks_it(tmp_path: Path) -> None:
    plan = make_plan()
    journal = [
        {"step": "restore-start", "event": "begin"},
        {"step": "restore-start", "event": "end", "seconds": 1.5},
        {"step": "restore-check", "event": "end", "seconds": 0.75},
        {"step": "watch", "event": "end", "seconds": 2.0},
    ]
    summary = make_summary(plan, {}, restore={"status": "RESTORED"})
    cases = cases_of(write_folder(tmp_path / "w", plan, [], summary, journal))
    assert cases["window::restore"].time == 2.25


def test_a_refused_window_says_why_in_a_case_of_its_own(tmp_path: Path) -> None:
    plan = make_plan()
    summary = make_summary(
        plan,
        {},
        status="REFUSED",
        exit_code=13,
        stopped="HOLD of OTHER-window, 312 s old",
        restore={"status": "NOT NEEDED: production untouched"},
        watch={"status": "NOT RUN"},
    )
    cases = cases_of(write_folder(tmp_path / "w", plan, [], summary))
    (error,) = cases["window::open"].result
    assert isinstance(error, Error)
    assert (error.type, error.message) == ("REFUSED", "HOLD of OTHER-window, 312 s old")
    assert isinstance(cases["window::restore"].result[0], Skipped)
    assert isinstance(cases["K1-short-b1-r0"].result[0], Skipped)


def test_a_refusal_before_any_plan_is_reported_too(tmp_path: Path) -> None:
    summary = make_summary(make_plan(), {}, status="REFUSED", exit_code=13, stopped="the lease")
    cases = cases_of(write_folder(tmp_path / "w", None, [], summary))
    assert set(cases) == {"window::open", "window::restore"}


def test_alerts_are_a_case_of_their_own(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w", exit_code=21, alerts=["foreign HOLD on host b"])
    (error,) = cases_of(folder)["window::alert"].result
    assert error.message == "foreign HOLD on host b"


def test_a_killed_window_shows_what_was_measured(tmp_path: Path) -> None:
    plan = make_plan()
    folder = write_folder(tmp_path / "w", plan, make_values(plan, {})[:5], None)
    with (folder / "values.jsonl").open("a") as file:
        file.write('{"item": "K1-32k-b1-r2", "outcome": "meas')
    cases = cases_of(folder)
    assert [len(case.result) for case in list(cases.values())[:6]] == [0, 0, 0, 0, 0, 1]
    assert "killed" in str(cases["K1-32k-b1-r2"].result[0].message)
    assert isinstance(cases["window::restore"].result[0], Error)
    properties = {entry.name: entry.value for entry in suite_of(folder).properties()}
    assert properties["status"] == "INCOMPLETE"


def test_the_last_line_of_an_item_counts(tmp_path: Path) -> None:
    plan = make_plan()
    values = make_values(plan, {})
    folder = write_folder(
        tmp_path / "w",
        plan,
        [broken(values[0], "failed", "timeout", "slow"), *values],
        make_summary(plan, {"fast": decide(plan, values, "fast")}),
    )
    assert suite_of(folder).failures == 0


HOSTILE = "\x1b[31m<b>&\"'\x00\x08\ufffe\uffff\ud800 \u202eevil\n]]>"


def test_hostile_texts_give_well_formed_xml(tmp_path: Path) -> None:
    plan = make_plan()
    values = make_values(plan, {})
    values[0] = broken(values[0], "failed", "k", "placeholder")
    values[0]["reason"] = HOSTILE
    values[1]["values"]["ms_per_round"]["unit"] = HOSTILE
    summary = make_summary(
        plan,
        {},
        status="INCOMPLETE",
        exit_code=12,
        stopped=HOSTILE,
        alerts=[HOSTILE],
        software={HOSTILE: HOSTILE},
    )
    folder = write_folder(tmp_path / "w", plan, values, summary)
    raw = write_junit(folder).read_bytes()
    ElementTree.fromstring(raw)
    text = raw.decode()
    assert not {char for char in text if ord(char) < 32} - {"\n", "\t"}
    assert "\u202e" not in text
    assert "\\x1b[31m" in text


def test_rebuilding_gives_the_same_bytes_anywhere(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w")
    views = [path.read_bytes() for path in write_views(folder)]
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, moved)
    for path in moved.glob("*.xml"), moved.glob("*.html"):
        next(path).unlink()
    assert [path.read_bytes() for path in write_views(moved)] == views


def test_only_the_four_fact_files_are_read(tmp_path: Path) -> None:
    folder = demo_folder(tmp_path / "w")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"plan.json", "values.jsonl", "journal.jsonl", "summary.json"}
    write_views(folder)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert {path.name for path in folder.iterdir()} == {*before, "junit.xml", "report.html"}


@pytest.mark.parametrize("name", ["plan.json", "summary.json"])
@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    folder = demo_folder(tmp_path / "w")
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match=rf"{name}: damaged") as caught:
        write_views(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a window's folder"):
        write_views(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        write_views(tmp_path / "missing")
