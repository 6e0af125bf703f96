"""The close goes by the durable facts: it never claims what they do not prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hold_sites import sites_of
from window_values import plan_of, values_of

from pytest_dsv41.archive import archive_head, archive_rows, archive_spreads
from pytest_dsv41.archive.history import backfill
from pytest_dsv41.durable import append_json_line, dump_json, write_atomic
from pytest_dsv41.errors import RefusedByWorld, TransportError
from pytest_dsv41.hosts import Probe
from pytest_dsv41.lifecycle.closing import CloseResult, close_window
from pytest_dsv41.lifecycle.finish import ARCHIVE_NAME, finish_window
from pytest_dsv41.lifecycle.hold import Hold
from pytest_dsv41.lifecycle.intent import Intent, read_intent, write_intent
from pytest_dsv41.lifecycle.journal import Journal
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.record import TargetRecord, read_record
from pytest_dsv41.lifecycle.session import WindowRun
from pytest_dsv41.targets import HoldSite, ProbeResult, Target, local_target
from pytest_dsv41.window.plan import Plan

WINDOW = "L-w-W-20261101T000000Z"


class Machines:
    """A target of which only what a close asks for is there."""

    holds = True
    ephemeral = False

    def __init__(self, campaign: Path, *, up: bool, stuck: bool = False) -> None:
        self._hold = campaign / "HOLD"
        self._up = up
        self._stuck = stuck
        self.started = False

    def hold_sites(self) -> tuple[HoldSite, ...]:
        return sites_of(self._hold)

    def stop_all(self) -> None:
        if self._stuck:
            raise TransportError("the host does not answer")

    def probe(self) -> ProbeResult:
        return ProbeResult(Probe.UP if self._up else Probe.DOWN, "as the test says")

    def start_production(self) -> None:
        self.started = True

    def live_experiments(self) -> list[str]:
        return []

    def leftovers(self) -> list[str]:
        return []


def closed_by(campaign: Path, machines: Machines) -> CloseResult:
    lease = Lease(campaign)
    lease.acquire(WINDOW, 60.0)
    try:
        return close_window(
            cast(Target, machines),
            window_id=WINDOW,
            folder=campaign,
            campaign=campaign,
            journal=Journal(campaign),
            lease=lease,
            limits={"watch_s": 0.0},
        )
    finally:
        lease.release()


def went_down(campaign: Path, *, intent: bool) -> None:
    """The facts of a window that has stopped production."""
    Hold(sites_of(campaign / "HOLD")).create(WINDOW, 1)
    journal = Journal(campaign)
    for step in ("hold", "intent", "production-stop"):
        with journal.step(step):
            pass
    if intent:
        where = str(campaign / "rollback.json")
        write_intent(
            campaign, Intent(WINDOW, str(campaign), "DOWN", 1, "host", 1.0, where, "", 1, 1.0)
        )


@pytest.mark.parametrize("up", [True, False])
def test_an_experiment_that_does_not_stop_leaves_production_down_and_says_so(
    up: bool, tmp_path: Path
) -> None:
    went_down(tmp_path, intent=True)
    machines = Machines(tmp_path, up=up, stuck=True)
    closed = closed_by(tmp_path, machines)
    assert not machines.started
    assert closed.restore["status"] == "FAILED"
    assert "the host does not answer" in closed.restore["reason"]
    assert closed.production_down is not up
    assert Hold(sites_of(tmp_path / "HOLD")).state_for_window(WINDOW)[1] == WINDOW
    assert read_intent(tmp_path) is not None


def test_a_second_close_tells_what_the_first_one_proved(tmp_path: Path) -> None:
    went_down(tmp_path, intent=False)
    Hold(sites_of(tmp_path / "HOLD")).close(WINDOW)
    journal = Journal(tmp_path)
    with journal.step("restore-check") as detail:
        detail.update(passed=True, identical=6, asked=6, reason="")
    with journal.step("watch") as detail:
        detail.update(passed=True, watched_s=900.5, samples=61, largest_gap_s=15.2, reason="")
    # Killed between the removal of the intent and its journal line.
    journal.note("intent-clear", "begin")
    closed = closed_by(tmp_path, Machines(tmp_path, up=True))
    assert closed.clean
    assert (closed.restore["status"], closed.restore["answers_identical"]) == ("RESTORED", 6)
    assert closed.watch is not None
    assert (closed.watch["status"], closed.watch["seconds"]) == ("PASS", 900.5)


@pytest.mark.parametrize("up", [True, False])
def test_an_intent_that_somebody_deleted_is_an_alert_and_the_hold_stays(
    up: bool, tmp_path: Path
) -> None:
    went_down(tmp_path, intent=False)
    closed = closed_by(tmp_path, Machines(tmp_path, up=up))
    assert closed.restore["status"] == "ALERT"
    assert closed.alerts == ["production was stopped, and no down-intent says how it came back"]
    assert closed.production_down is not up
    assert (tmp_path / "HOLD").exists()


# -- the end of the facts --------------------------------------------------------------------------


def folder_of(campaign: Path, *, clocks: dict[str, int] | None = None) -> tuple[Path, Journal]:
    """A window's folder whose items are all measured."""
    plan = plan_of(campaign)
    folder = campaign / WINDOW
    folder.mkdir()
    write_atomic(folder / "plan.json", dump_json(plan.to_json()))
    for row in values_of(plan, {("c1", "ms_per_round"): 0.9}):
        append_json_line(folder / "values.jsonl", row)
    TargetRecord(
        window=WINDOW,
        factory="m:f",
        table={"kind": "local"},
        base=str(campaign),
        campaign=str(campaign),
        seed=1,
        limits={},
        variables={},
        state={},
        commit="c" * 40,
        date="20261101",
    ).write(folder)
    journal = Journal(folder)
    for start, mhz in (clocks or {"K1": 2150, "K2": 2150}).items():
        journal.note(f"start:{start}", "end", clock_cap_mhz=mhz, clock_source="start-log")
    return folder, journal


def test_a_stopped_window_that_left_something_is_an_alert(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path)
    closed = CloseResult(errors=["leftovers: still alive: pid 7"])
    summary = finish_window(folder, journal, closed, stopped="signal SIGTERM")
    assert (summary.status, summary.exit_code) == ("INCOMPLETE", 21)
    assert summary.alerts == ("leftovers: still alive: pid 7",)


def test_finishing_twice_keeps_the_archives_heads_and_spread(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path)
    first = finish_window(folder, journal, CloseResult(), stopped=None)
    second = finish_window(folder, journal, CloseResult(), stopped=None)
    assert first.status == second.status == "CANDIDATE"
    assert first.archive == second.archive
    assert first.archive is not None
    assert first.archive.before is not None
    assert first.archive.before.rows == 0
    assert first.archive.appended == archive_head(tmp_path / ARCHIVE_NAME).rows == 48
    assert first.spreads == second.spreads
    assert {spread.archive_cv for spread in second.spreads.values()} == {None}


def test_a_start_without_a_clock_record_is_not_archived_under_a_made_up_one(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path, clocks={"K1": 2150})
    summary = finish_window(folder, journal, CloseResult(), stopped=None)
    assert summary.exit_code == 21
    assert summary.alerts == (
        "archive: the journal has no clock cap of start K2; its values were not appended",
    )
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / ARCHIVE_NAME).read_text().splitlines()
    ]
    assert {row["start"] for row in rows if "start" in row} == {"K1"}


def test_the_archives_spread_is_that_of_the_windows_own_clock_cap(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path)
    finish_window(folder, journal, CloseResult(), stopped=None)
    (known,) = archive_spreads(tmp_path / ARCHIVE_NAME, "decode-b1", "ms_per_round")
    for cap, found in ((2150, known.cv_within), (2300, None)):
        (folder / "journal.jsonl").unlink()
        plan = json.loads((folder / "plan.json").read_text())
        plan["window_id"] = f"L-w-W-{cap}"
        write_atomic(folder / "plan.json", dump_json(plan))
        for start in ("K1", "K2"):
            journal.note(f"start:{start}", "end", clock_cap_mhz=cap, clock_source="start-log")
        summary = finish_window(folder, journal, CloseResult(), stopped=None)
        assert summary.spreads["decode-b1/ms_per_round"].archive_cv == found


def test_values_that_are_damaged_are_never_a_candidate_and_the_end_is_told(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path)
    lines = (folder / "values.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "values.jsonl").write_bytes(b"".join([*lines[:3], b"{torn\n", *lines[3:]]))
    summary = finish_window(folder, journal, CloseResult(), stopped=None)
    assert (summary.status, summary.exit_code) == ("INCOMPLETE", 12)
    assert summary.stopped is not None
    assert summary.stopped.endswith("values.jsonl:4: damaged: no JSON record")
    # What can be read is archived as it would have been.
    assert archive_head(tmp_path / ARCHIVE_NAME).rows == 48


def test_the_archives_own_command_finds_the_windows_rows_there_already(tmp_path: Path) -> None:
    folder, journal = folder_of(tmp_path)
    finish_window(folder, journal, CloseResult(), stopped=None)
    done = backfill(tmp_path / ARCHIVE_NAME, [folder])
    assert done.windows == ((WINDOW, 48, 0),)


class Watching:
    """A keeper that only notes whether it was dismissed."""

    dismissed = False

    def dismiss(self) -> None:
        self.dismissed = True


def test_a_window_that_lost_its_lease_closes_nothing_and_keeps_its_keeper(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    plan = Plan.from_json(json.loads((folder / "plan.json").read_text()))
    run = WindowRun(plan, read_record(folder), folder, local_target)
    run.opened = True
    run._keeper = keeper = cast(Any, Watching())
    run.lease.acquire(WINDOW, 60.0)
    # SAFETY I8: what another process has taken over is not this one's any more.
    record = json.loads((tmp_path / "lease.json").read_text())
    write_atomic(tmp_path / "lease.json", dump_json({**record, "epoch": record["epoch"] + 1}))
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(RefusedByWorld, match=r"lease lost: epoch 2 is at work"):
        run.close()
    assert not keeper.dismissed
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not (tmp_path / ARCHIVE_NAME).exists()
    run.lease.release()


@pytest.mark.parametrize(
    ("kept", "stopped", "starts"),
    [
        # K1 I1 K2 I2, six items a start. The stop came inside of K2, after it, or in I1.
        (15, "signal SIGTERM", {"K1"}),
        (18, "signal SIGTERM", {"K1", "K2"}),
        (19, "signal SIGTERM", {"K1", "K2"}),
        (7, "signal SIGTERM", {"K1"}),
        (3, "signal SIGTERM", set()),
        # Not stopped: items were deselected, and every start finished.
        (15, None, {"K1", "K2"}),
    ],
)
def test_after_a_stop_the_starts_that_finished_are_archived_and_no_other(
    tmp_path: Path, kept: int, stopped: str | None, starts: set[str]
) -> None:
    folder, journal = folder_of(tmp_path)
    lines = (folder / "values.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "values.jsonl").write_bytes(b"".join(lines[:kept]))
    for start in ("K1", "I1", "K2")[: (kept - 1) // 6]:
        journal.note(f"stop:{start}", "begin")
    finish_window(folder, journal, CloseResult(), stopped=stopped)
    rows = archive_rows(tmp_path / ARCHIVE_NAME)
    assert {row["start"] for row in rows} == starts
    # The command that appends what a killed window left says the same.
    assert sum(new for _, _, new in backfill(tmp_path / ARCHIVE_NAME, [folder]).windows) == 0
    (folder / "summary.json").unlink()
    backfill(tmp_path / "again.jsonl", [folder])
    if stopped:
        assert archive_rows(tmp_path / "again.jsonl") == rows
