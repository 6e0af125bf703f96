"""Nothing that happens in the restore's seam keeps the HOLD, or the watch (SAFETY, WIN2 pilot)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hold_sites import sites_of

from pytest_dsv41.durable import dump_json, write_atomic
from pytest_dsv41.hosts import Probe
from pytest_dsv41.lifecycle import closing, seam
from pytest_dsv41.lifecycle.closing import CloseResult, close_window
from pytest_dsv41.lifecycle.hold import Hold, HoldState
from pytest_dsv41.lifecycle.intent import Intent, read_intent, write_intent
from pytest_dsv41.lifecycle.journal import Journal
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.production import Check
from pytest_dsv41.lifecycle.record import TargetRecord
from pytest_dsv41.lifecycle.seam import Seam
from pytest_dsv41.targets import HoldSite, ProbeResult, Target

WINDOW = "L-w-W-20261101T000000Z"
AFTER = ["restore-check", "restore-seam", "hold-close", "watch", "intent-clear"]


class Serving:
    """Machines whose production comes back; the six answers are another test's business."""

    holds = True
    ephemeral = False

    def __init__(self, campaign: Path) -> None:
        self._hold = campaign / "HOLD"

    def hold_sites(self) -> tuple[HoldSite, ...]:
        return sites_of(self._hold)

    def stop_all(self) -> None: ...

    def start_production(self) -> None: ...

    def probe(self) -> ProbeResult:
        return ProbeResult(Probe.UP, "serves")

    def live_experiments(self) -> list[str]:
        return []

    def leftovers(self) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def _identical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "check", lambda *_a, **_k: Check(True, 6, 6))
    monkeypatch.setattr(closing, "read_rollback", lambda *_a: {})
    monkeypatch.setattr(seam, "_GRACE_S", 0.05)


def gone_down(campaign: Path) -> None:
    Hold(sites_of(campaign / "HOLD")).create(WINDOW, 1)
    journal = Journal(campaign)
    for step in ("hold", "intent", "production-stop"):
        with journal.step(step):
            pass
    where = str(campaign / "rollback.json")
    write_intent(campaign, Intent(WINDOW, str(campaign), "DOWN", 1, "host", 1.0, where, "", 1, 1.0))


def closed_with(
    campaign: Path, work: Seam | None, *, planned: bool = True, epoch: int | None = None
) -> CloseResult:
    lease = Lease(campaign)
    lease.acquire(WINDOW, 60.0)
    if epoch is not None:
        lease.epoch = epoch
    try:
        return close_window(
            cast(Target, Serving(campaign)),
            window_id=WINDOW,
            folder=campaign,
            campaign=campaign,
            journal=Journal(campaign),
            lease=lease,
            limits={"watch_s": 0.0, **({"seam_s": 5.0} if planned else {})},
            seam=work,
        )
    finally:
        lease.release()


def seam_of(
    campaign: Path, work: Callable[[threading.Event], Mapping[str, Any]], deadline_s: float = 5.0
) -> Seam:
    def keep(result: Mapping[str, Any]) -> None:
        write_atomic(campaign / "B.json", dump_json(result))

    return Seam("pilot-b", work, keep, deadline_s)


def assert_given_back(campaign: Path, closed: CloseResult) -> None:
    """The HOLD and the intent are gone, the watch passed, and nobody is alarmed."""
    assert closed.clean
    assert not closed.open
    assert closed.restore["status"] == "RESTORED"
    assert closed.watch is not None
    assert closed.watch["status"] == "PASS"
    assert Hold(sites_of(campaign / "HOLD")).owner()[0] is HoldState.NONE
    assert read_intent(campaign) is None


def ends(campaign: Path) -> list[str]:
    """The steps from the check on, in the order in which they came to an end."""
    lines = Journal(campaign).lines()
    return [
        x["step"] for x in lines if x["event"] in ("end", "fail", "skip") and x["step"] in AFTER
    ]


def test_the_work_runs_under_the_hold_after_the_check_and_before_the_close(tmp_path: Path) -> None:
    gone_down(tmp_path)
    seen: list[Any] = []

    def work(_stop: threading.Event) -> dict[str, Any]:
        seen.append(Hold(sites_of(tmp_path / "HOLD")).state_for_window(WINDOW)[0])
        seen.append(ends(tmp_path))
        return {"cells": 4}

    closed = closed_with(tmp_path, seam_of(tmp_path, work))
    assert_given_back(tmp_path, closed)
    assert seen == [HoldState.OWN, ["restore-check"]]
    assert ends(tmp_path) == AFTER
    assert closed.seam == "DONE"
    assert json.loads((tmp_path / "B.json").read_text()) == {"cells": 4}


def _raises(error: BaseException) -> Callable[[threading.Event], dict[str, Any]]:
    def work(_stop: threading.Event) -> dict[str, Any]:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (_raises(ValueError("three pairs")), "FAILED: ValueError: three pairs"),
        (_raises(KeyboardInterrupt()), "FAILED: KeyboardInterrupt"),
        (_raises(SystemExit(3)), "FAILED: SystemExit: 3"),
        (lambda _stop: {"value": float("nan")}, "FAILED: Out of range float values"),
        (lambda _stop: {"value": object()}, "FAILED: Object of type object"),
    ],
    ids=["error", "interrupt", "exit", "not-finite", "not-json"],
)
def test_a_failure_keeps_neither_the_hold_nor_the_watch(
    work: Callable[[threading.Event], dict[str, Any]], why: str, tmp_path: Path
) -> None:
    gone_down(tmp_path)
    closed = closed_with(tmp_path, seam_of(tmp_path, work))
    assert_given_back(tmp_path, closed)
    assert closed.seam is not None
    assert closed.seam.startswith(why)
    assert ends(tmp_path) == AFTER
    assert not (tmp_path / "B.json").exists()
    assert [x["event"] for x in Journal(tmp_path).lines() if x["step"] == "restore-seam"] == [
        "begin",
        "fail",
    ]


@pytest.mark.parametrize("listens", [True, False])
def test_work_that_hangs_ends_at_its_deadline_and_writes_nothing_later(
    listens: bool, tmp_path: Path
) -> None:
    gone_down(tmp_path)
    let_go = threading.Event()

    def work(stop: threading.Event) -> dict[str, Any]:
        (stop if listens else let_go).wait(60.0)
        return {"late": True}

    closed = closed_with(tmp_path, seam_of(tmp_path, work, deadline_s=0.1))
    assert_given_back(tmp_path, closed)
    abandoned = "" if listens else " and does not stop; it is abandoned"
    assert closed.seam == f"FAILED: did not end within 0.1 s{abandoned}"
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "dsv41-seam-pilot-b":
            thread.join(10.0)
    assert not (tmp_path / "B.json").exists()


def test_somebody_who_wants_to_leave_ends_the_work_early(tmp_path: Path) -> None:
    gone_down(tmp_path)
    mine: list[Seam] = []

    def work(stop: threading.Event) -> dict[str, Any]:
        mine[0].stop.set()  # what a signal's handler does
        stop.wait()
        threading.Event().wait(0.01)
        raise RuntimeError("cut off")

    mine.append(seam_of(tmp_path, work, deadline_s=3600.0))
    closed = closed_with(tmp_path, mine[0])
    assert_given_back(tmp_path, closed)
    assert closed.seam is not None
    assert closed.seam.startswith("FAILED: ")


def test_somebody_who_asked_before_is_not_kept_waiting(tmp_path: Path) -> None:
    gone_down(tmp_path)
    work = seam_of(tmp_path, _raises(AssertionError("began")))
    work.stop.set()
    closed = closed_with(tmp_path, work)
    assert_given_back(tmp_path, closed)
    assert closed.seam == "FAILED: was told to stop before it began"


def test_a_caller_without_the_work_skips_it_and_says_so(tmp_path: Path) -> None:
    gone_down(tmp_path)
    closed = closed_with(tmp_path, None)
    assert_given_back(tmp_path, closed)
    assert closed.seam == "SKIPPED: only the window's own session runs it"
    assert ends(tmp_path) == AFTER


def test_a_window_that_planned_none_has_none(tmp_path: Path) -> None:
    gone_down(tmp_path)
    work = seam_of(tmp_path, _raises(AssertionError("not planned")))
    closed = closed_with(tmp_path, work, planned=False)
    assert_given_back(tmp_path, closed)
    assert closed.seam is None
    assert "restore-seam" not in ends(tmp_path)


@pytest.mark.parametrize(
    ("event", "told"),
    [("begin", "FAILED: its process died"), ("fail", "FAILED: no answer"), ("end", "DONE")],
)
def test_what_an_earlier_close_began_is_not_tried_twice(
    event: str, told: str, tmp_path: Path
) -> None:
    gone_down(tmp_path)
    Journal(tmp_path).note("restore-seam", "begin")
    if event != "begin":
        reason = {"reason": "no answer"} if event == "fail" else {}
        Journal(tmp_path).note("restore-seam", event, **reason)
    closed = closed_with(tmp_path, seam_of(tmp_path, _raises(AssertionError("twice"))))
    assert_given_back(tmp_path, closed)
    assert closed.seam == told


def test_a_lost_lease_does_not_touch_production(tmp_path: Path) -> None:
    gone_down(tmp_path)
    asked: list[str] = []

    def work(_stop: threading.Event) -> dict[str, Any]:
        asked.append("asked")
        return {}

    closed = closed_with(tmp_path, seam_of(tmp_path, work), epoch=99)
    assert not asked
    assert closed.seam == "SKIPPED: production was not restored and checked"
    assert (tmp_path / "HOLD").exists()


def test_an_answer_that_differs_is_no_occasion_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_down(tmp_path)
    monkeypatch.setattr(closing, "check", lambda *_a, **_k: Check(False, 5, 6, "1 of 6 differs"))
    closed = closed_with(tmp_path, seam_of(tmp_path, _raises(AssertionError("not itself"))))
    assert closed.restore["status"] == "FAILED"
    assert closed.seam == "SKIPPED: production was not restored and checked"
    assert (tmp_path / "HOLD").exists()


def test_the_keepers_patience_covers_the_seam() -> None:
    limits = {"stop_s": 60.0, "start_s": 600.0, "watch_s": 900.0}
    without = _record(limits).close_budget_s
    assert _record({**limits, "seam_s": 900.0}).close_budget_s == without + 900.0


def _record(limits: dict[str, float]) -> TargetRecord:
    return TargetRecord(WINDOW, "m:f", {}, "", "", 1, limits, {}, {}, "", "20261101")
