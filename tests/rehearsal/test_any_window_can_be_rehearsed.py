"""`--window-rehearse`: the real session over simulated hosts, broken at a step where asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.hosts.fake import FakeWorld
from pytest_dsv41.rehearsing import Fault


def rehearse(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "WINDOW_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--window=demo-tiny", "--window-rehearse",
         f"--window-out={folder}", f"--rootdir={folder.parent}", "-p", "no:cacheprovider", *words],
        cwd=folder.parent, env={**kept, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def servers(folder: Path) -> list[int]:
    """Stub servers of the rehearsal's world that still run."""
    world = FakeWorld(folder / "world")
    addresses = {world.machine(name).address for name in world.names()}
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if addresses & set(process.info["cmdline"] or ())
    ]


def newest(folder: Path) -> dict[str, object]:
    paths = sorted(folder.glob("*-W-*/summary.json"), key=lambda p: p.stat().st_mtime_ns)
    record: dict[str, object] = json.loads(paths[-1].read_text())
    return record


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("partition@start:K1", Fault("partition", "two", "start:K1")),
        ("reboot/one@restore-start", Fault("reboot", "one", "restore-start")),
    ],
)
def test_a_fault_names_a_host_and_a_step(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@pytest.mark.parametrize("text", ["reboot", "@x", "reboot@", "earthquake@hold", "reboot/x@hold"])
def test_a_wrong_fault_is_told_with_the_valid_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"valid names: partition, reboot, .*hosts: one, two"):
        Fault.parse(text)


@pytest.mark.parametrize("step", ["start:X", "stop:k1", "quiet:"])
def test_a_fault_at_a_start_that_the_window_has_not_is_refused(step: str) -> None:
    with pytest.raises(UsageError, match=rf"no such start; valid: {step.partition(':')[0]}:K1, "):
        Fault.parse(f"reboot@{step}").check(["K1", "I1"])
    for good in ("start:K1", "stop:I1", "hold", "restore-start"):
        Fault.parse(f"reboot@{good}").check(["K1", "I1"])


@pytest.mark.slow
def test_a_chain_is_rehearsed_to_its_end_with_nothing_real_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = rehearse(out, "--window-chain")
    assert "REHEARSAL on simulated hosts" in first.stdout
    assert newest(out)["chain"] == "CHAINED", first.stdout
    assert "over simulated hosts: the verdict is nobody's" in str(newest(out)["notes"])
    last = rehearse(out, WINDOW_CHAIN="1", WINDOW_CHAIN_LAST="1")
    record = newest(out)
    assert (record["chain"], record["alerts"]) == ("ENDED", []), last.stdout
    for _ in range(200):
        if not servers(out):
            break
        time.sleep(0.05)
    assert servers(out) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reboot/one@quiet:K1", "clock-back@start:I1"])
def test_a_rehearsal_survives_a_fault(fault: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = rehearse(out, f"--window-fault={fault}")
    restore = newest(out)["restore"]
    assert isinstance(restore, dict)
    assert restore["status"] == "RESTORED", done.stdout
    assert "has no such step" not in done.stdout


@pytest.mark.slow
def test_a_partition_is_an_alert_and_a_killed_rehearsal_is_finished_by_its_keeper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    done = rehearse(cut, "--window-fault=partition/two@start:I1")
    assert done.returncode == 20, done.stdout
    assert main(["status", "--campaign", str(cut)]) == 20
    assert "cannot see production" in capsys.readouterr().out
    killed = tmp_path / "killed"
    assert rehearse(killed, "--window-fault=kill@start:I1").returncode == -9
    for _ in range(600):
        if list(killed.glob("*-W-*/summary.json")):
            break
        time.sleep(0.1)
    restore = newest(killed)["restore"]
    assert isinstance(restore, dict)
    assert restore["status"] == "RESTORED"


@pytest.mark.slow
def test_a_fault_without_a_rehearsal_is_wrong_use(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--window=demo-tiny", "--window-fault=reboot@hold"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "add --window-rehearse" in done.stderr
