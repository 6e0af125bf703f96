"""The two-window cap: what counts, what satisfies it, and the document's own history."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import ArchiveError
from pytest_dsv41.archive.window_cap import CapAnswer, window_cap
from pytest_dsv41.cli import main

SINCE = "2026-10-26"


def window(campaign: Path, lane: str, name: str, utc: str, status: str, **more: Any) -> Path:
    """Write a window's summary as an older runner writes it: named by its folder."""
    folder = campaign / f"{lane}-{name}-W-{utc}"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"status": status, **more}))
    return folder


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """The history of 26 and 27 October 2026, by lane."""
    c = tmp_path / "campaign"
    for lane, name, utc, status in (
        ("PC1", "threshold1024", "20261026T090000Z", "INCONCLUSIVE"),
        ("PC1", "threshold2048", "20261026T150000Z", "NOT A CANDIDATE"),
        ("PC1", "threshold512", "20261027T181314Z", "INCONCLUSIVE"),
        ("UP3", "a", "20261026T110000Z", "CANDIDATE"),
        ("UP3", "b", "20261027T020000Z", "COMPLETE"),
        ("UP3", "c", "20261027T040000Z", "INCOMPLETE"),
        ("NBW", "a", "20261025T230000Z", "INCONCLUSIVE"),
        ("NBW", "b", "20261026T050000Z", "INCONCLUSIVE"),
        ("NBW", "c", "20261026T070000Z", "INCOMPLETE"),
        ("PP4", "941-admission", "20261027T192339Z", "COMPLETE"),
        ("PP4", "smoke", "20261027T200000Z", "COMPLETE"),
        ("PP4", "a", "20261027T220000Z", "CANDIDATE"),
        ("DEP1", "fixed2", "20261027T120000Z", "INCOMPLETE"),
    ):
        window(c, lane, name, utc, status, decision={"verdict": "CANDIDATE"})
    (c / "PC1-running-W-20261028T000000Z").mkdir()
    return c


def cap(campaign: Path, lane: str, **more: Any) -> CapAnswer:
    return window_cap(lane, campaign, since=SINCE, **more)


@pytest.mark.parametrize(
    ("lane", "counted", "allow"),
    [("PC1", 3, False), ("UP3", 2, False), ("NBW", 1, True), ("PP4", 1, True), ("DEP1", 0, True)],
)
def test_the_documents_history_refuses_pc1_and_up3_alone(
    campaign: Path, capsys: pytest.CaptureFixture[str], lane: str, counted: int, allow: bool
) -> None:
    answer = cap(campaign, lane)
    assert (len(answer.counted), answer.allow) == (counted, allow)
    command = ["window-cap", lane, "--campaign", str(campaign), "--since", SINCE]
    assert main(command) == (0 if allow else 2)
    out = capsys.readouterr().out
    assert out.startswith("ALLOW: " if allow else "REFUSE: ")
    assert f"{counted} counted window(s) of {lane} since 2026-10-26T00:00:00Z" in out
    if lane == "PC1":
        assert "PC1-threshold512-W-20261027T181314Z: INCONCLUSIVE, ended" in out
        assert "HYPOTHESIS PC1 <text> <UTC>, dated after 2026-10-27T18:13:14Z" in out
    if lane == "PP4":
        assert "not counted (admission windows never count)" in out
        assert "not counted (smoke windows never count)" in out
    if lane == "DEP1":
        assert "INCOMPLETE, ended 2026-10-27T12:00:00Z: not counted (stopped)" in out


def test_without_an_adoption_it_is_not_in_force_and_says_so(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["window-cap", "PC1", "--campaign", str(campaign)]) == 0
    assert "ALLOW: the cap is not in force: no WINDOW-CAP.json" in capsys.readouterr().out
    (campaign / "WINDOW-CAP.json").write_text('{"adopted_utc": "2026-10-26T00:00:00Z"}')
    assert main(["window-cap", "PC1", "--campaign", str(campaign), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["answer"], found["in_force_since"]) == ("REFUSE", "2026-10-26T00:00:00Z")
    # A later adoption leaves earlier windows out.
    assert main(["window-cap", "PC1", "--campaign", str(campaign), "--since", "2026-10-27"]) == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"adopted": 1}', '{"adopted_utc": "soon"}'])
def test_a_damaged_adoption_file_is_named_and_never_taken_for_none(
    campaign: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (campaign / "WINDOW-CAP.json").write_text(text)
    assert main(["window-cap", "PC1", "--campaign", str(campaign)]) == 4
    assert "WINDOW-CAP.json" in capsys.readouterr().err


NEW = "2026-10-27T19:00:00Z"
OLD = "2026-10-27T18:13:14Z"


def hypothesis(campaign: Path, text: str, name: str = "hypothesis-3.md", lane: str = "PC1") -> None:
    folder = campaign / "experiments" / lane
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("text", "allow"),
    [
        (f"# Threshold and prefill share a queue\n\n{NEW}\n\nBecause …\n", True),
        ("Date: 2026-10-27 19:00 UTC\n", True),
        (f"# After PC1-threshold512-W-20261027T181314Z\n{NEW}\n", True),
        (f"# After PC1-threshold512-W-20261028T181314Z\n{OLD}\n", False),
        (f"{OLD}\n", False),
        ("# No date\n", False),
        ("\n" * 10 + NEW, False),
    ],
)
def test_a_hypothesis_file_dated_after_the_latest_counted_window_satisfies(
    campaign: Path, text: str, allow: bool
) -> None:
    hypothesis(campaign, text)
    assert cap(campaign, "PC1").allow is allow


def test_only_the_lanes_own_hypothesis_files_count(campaign: Path, tmp_path: Path) -> None:
    for name in ("hypothesis.md", "hypothesis-x.md", "notes.md", "hypothesis-1.txt"):
        hypothesis(campaign, NEW, name)
    hypothesis(campaign, NEW, lane="PC10")
    assert not cap(campaign, "PC1").allow
    elsewhere = tmp_path / "repository"
    hypothesis(elsewhere, NEW, "hypothesis-12.md")
    answer = cap(campaign, "PC1", experiments=[elsewhere / "experiments"])
    assert answer.allow
    assert [reason.kind for reason in answer.reasons if reason.satisfies] == ["hypothesis file"]


def test_the_command_looks_in_the_current_folder_too(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["window-cap", "PC1", "--campaign", str(campaign), "--since", SINCE]
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    hypothesis(tmp_path, NEW)
    assert main(command) == 0
    (tmp_path / "experiments" / "PC1" / "hypothesis-3.md").unlink()
    (tmp_path / "LANES.md").write_text(f"HYPOTHESIS PC1 the queue is shared {NEW}\n")
    assert main(command) == 0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"HYPOTHESIS PC1 the queue is shared {NEW}", "register line"),
        (f"- **HYPOTHESIS PC1** the queue is shared, {NEW}.", "register line"),
        (f"WINDOW-CAP OVERRIDE PC1 {NEW}", "override"),
        (f"  `WINDOW-CAP OVERRIDE PC1 {NEW}`", "override"),
        (f"HYPOTHESIS PC1 the queue is shared {OLD}", None),
        (f"HYPOTHESIS PC1 from {NEW} the queue, filed {OLD}", None),
        (f"HYPOTHESIS PC10 the queue is shared {NEW}", None),
        (f"HYPOTHESIS PC1-b the queue is shared {NEW}", None),
        (f"HYPOTHESIS UP3 as in PC1 {NEW}", None),
        (f"We need a HYPOTHESIS PC1 {NEW}", None),
        ("HYPOTHESIS PC1 the queue is shared", None),
        (f"WINDOW-CAP OVERRIDE UP3 {NEW}", None),
        (f"OVERRIDE PC1 {NEW}", None),
        (f"WINDOW-CAP OVERRIDE PC1: {NEW} for the demo", "override"),
        (f"WINDOW-CAP OVERRIDE PC1 was asked for on {NEW}", None),
        (f"HYPOTHESIS PC1 {NEW} as in PC1-b-W-20261026T150000Z", "register line"),
        ("HYPOTHESIS PC1 see PC1-threshold512-W-20261028T181314Z", None),
    ],
)
def test_a_line_in_the_register_satisfies_in_the_documents_forms_alone(
    campaign: Path, capsys: pytest.CaptureFixture[str], text: str, kind: str | None
) -> None:
    (campaign / "LANES.md").write_text(f"# Lanes\n\nPC1 is one.\n{text}\n")
    answer = cap(campaign, "PC1")
    assert answer.allow is (kind is not None)
    if kind is not None:
        assert [reason.kind for reason in answer.reasons if reason.satisfies] == [kind]
        assert f"{kind} {campaign / 'LANES.md'}:4 of {NEW}" in answer.reason
        assert main(["window-cap", "PC1", "--campaign", str(campaign), "--since", SINCE]) == 0
        assert "satisfies the cap" in capsys.readouterr().out


def test_the_next_counted_window_uses_the_hypothesis_up(campaign: Path) -> None:
    hypothesis(campaign, NEW)
    assert cap(campaign, "PC1").allow
    window(campaign, "PC1", "d", "20261027T200000Z", "INCOMPLETE")
    assert cap(campaign, "PC1").allow
    window(campaign, "PC1", "e", "20261027T210000Z", "NOT A CANDIDATE")
    assert not cap(campaign, "PC1").allow


def test_it_is_the_end_of_the_latest_window_that_a_hypothesis_must_follow(campaign: Path) -> None:
    window(
        campaign,
        "NBW",
        "d",
        "20261027T180000Z",
        "INCONCLUSIVE",
        started_utc="2026-10-27T18:00:00Z",
        ended_utc="2026-10-27T20:00:00Z",
    )
    hypothesis(campaign, NEW, lane="NBW")
    assert not cap(campaign, "NBW").allow
    hypothesis(campaign, "2026-10-27T20:00:01Z", "hypothesis-4.md", lane="NBW")
    assert cap(campaign, "NBW").allow


@pytest.mark.parametrize(
    ("status", "kind", "counts"),
    [
        ("COMPLETE", "report", True),
        ("COMPLETE", "admission", False),
        ("CANDIDATE", "smoke", False),
        ("INCONCLUSIVE", "candidate", True),
        ("NOT A CANDIDATE", "candidate", True),
        ("CANDIDATE", "candidate", True),
        ("INCOMPLETE", "candidate", False),
        ("INCOMPLETE", "report", False),
        ("REFUSED", "candidate", False),
        ("", "candidate", False),
    ],
)
def test_what_counts_by_status_and_kind(
    tmp_path: Path, status: str, kind: str, counts: bool
) -> None:
    folder = tmp_path / "some-folder"
    folder.mkdir()
    block = {"id": "Q-smoke-test-W-20261027T000000Z", "lane": "LANE", "kind": kind}
    (folder / "summary.json").write_text(json.dumps({"window": block, "status": status}))
    answer = window_cap("LANE", tmp_path, since=SINCE)
    assert [one.counts for one in answer.windows] == [counts]
    assert window_cap("Q", tmp_path, since=SINCE).windows == ()
    assert len(window_cap("LANE", tmp_path, since=SINCE, prefix="Q-smoke").windows) == 1


def test_a_prefix_counts_by_name(campaign: Path) -> None:
    assert len(cap(campaign, "PC1", prefix="PC1-threshold").counted) == 3
    assert len(cap(campaign, "PC1", prefix="UP3-").counted) == 2


def test_a_window_that_the_campaign_registers_elsewhere_is_seen(
    campaign: Path, tmp_path: Path
) -> None:
    elsewhere = window(tmp_path / "other", "NBW", "z", "20261027T090000Z", "INCONCLUSIVE")
    register = campaign / "windows"
    register.mkdir()
    (register / "z.json").write_text(json.dumps({"folder": str(elsewhere)}))
    assert len(cap(campaign, "NBW").counted) == 2


def test_incomplete_windows_with_both_arms_measured_are_listed(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = campaign / "UP3-c-W-20261027T040000Z"
    (folder / "summary.json").write_text(
        json.dumps({"status": "INCOMPLETE", "decision_cells": ["short-b1", "32k-b1"]})
    )
    lines = [
        {"start": "C1", "arm": "control", "cell": "short-b1", "repeat": 0, "values": {"m": 1}},
        {"start": "X", "arm": "fast", "cell": "short-b1", "repeat": 0, "values": {"m": 1}},
        {"start": "C1", "arm": "control", "cell": "32k-b1", "repeat": 0, "values": {"m": 1}},
    ]
    (folder / "values.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert cap(campaign, "UP3").peeked == ("UP3-c-W-20261027T040000Z: short-b1",)
    main(["window-cap", "UP3", "--campaign", str(campaign), "--since", SINCE])
    out = capsys.readouterr().out
    assert "INCOMPLETE with both arms of a decision cell measured: UP3-c-W" in out


def test_a_window_that_nothing_dates_and_a_missing_campaign_are_named(tmp_path: Path) -> None:
    (tmp_path / "PC1-x").mkdir()
    (tmp_path / "PC1-x" / "summary.json").write_text('{"status": "COMPLETE"}')
    with pytest.raises(ArchiveError, match="neither the id nor started_utc dates this window"):
        window_cap("PC1", tmp_path, since=SINCE)
    with pytest.raises(ArchiveError, match="there is no such campaign folder"):
        window_cap("PC1", tmp_path / "none", since=SINCE)
    with pytest.raises(ArchiveError, match="since: 'tomorrow' is no UTC date; valid: 2026-10-26"):
        window_cap("PC1", tmp_path, since="tomorrow")


@pytest.mark.parametrize("lane", ["", " ", "../PC1", "/", "PC1\n", "P*", "L" * 65, "\x1b[31m"])
def test_what_is_no_lanes_name_is_never_allowed(
    campaign: Path, capsys: pytest.CaptureFixture[str], lane: str
) -> None:
    assert main(["window-cap", "--campaign", str(campaign), "--", lane]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "is no lane's name; valid: " in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_editors_marks_do_not_hide_the_first_line(campaign: Path, mark: str, end: str) -> None:
    (campaign / "LANES.md").write_bytes(
        f"{mark}HYPOTHESIS PC1 draft four 2026-10-28T08:00:00Z{end}".encode()
    )
    assert cap(campaign, "PC1").allow


def test_files_of_the_cap_that_cannot_be_read_are_named(campaign: Path) -> None:
    register = campaign / "LANES.md"
    register.write_text("HYPOTHESIS PC1 x 2026-10-28T08:00:00Z\n", encoding="utf-16")
    with pytest.raises(ArchiveError, match=r"LANES\.md: is UTF-16.* save it as UTF-8"):
        cap(campaign, "PC1")
    register.unlink()
    os.mkfifo(register)
    with pytest.raises(ArchiveError, match=r"LANES\.md: is no regular file"):
        cap(campaign, "PC1")
    register.unlink()
    register.symlink_to(register)
    with pytest.raises(OSError, match="symbolic links"):
        cap(campaign, "PC1")
    register.unlink()
    os.mkfifo(campaign / "WINDOW-CAP.json")
    with pytest.raises(ArchiveError, match=r"WINDOW-CAP\.json: is no regular file"):
        window_cap("PC1", campaign)


def test_a_damaged_summary_of_the_lane_is_never_taken_for_a_free_window(campaign: Path) -> None:
    summary = next(campaign.glob("PC1-threshold1024-*")) / "summary.json"
    summary.write_bytes(summary.read_bytes()[:9])
    with pytest.raises(ArchiveError, match=r"threshold1024.*summary\.json: damaged, whether"):
        cap(campaign, "PC1")
    with pytest.raises(ArchiveError, match="damaged, whether"):
        cap(campaign, "X", prefix="PC1-thr")
    assert not cap(campaign, "UP3").allow  # the other lanes' answers stay
    (summary.parent / "plan.json").write_text(json.dumps({"spec": {"lane": "other"}}))
    assert cap(campaign, "PC1").in_force_since is not None


@pytest.mark.parametrize("flag", ["--lanes", "--experiments"])
def test_a_named_register_that_is_not_there_is_wrong_use(
    campaign: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main(["window-cap", "PC1", "--campaign", str(campaign), flag, "none"]) == 4
    assert f"{flag} none: there is no such file or folder" in capsys.readouterr().err
