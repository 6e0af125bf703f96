"""Running real windows in real pytest processes, and looking at what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
PATIENCE_S = 120.0


@dataclasses.dataclass
class Ended:
    """A finished pytest process and the campaign it worked on."""

    returncode: int
    output: str
    campaign: Path

    @property
    def folder(self) -> Path:
        """The newest window folder."""
        folders = sorted(p for p in self.campaign.iterdir() if "-W-" in p.name)
        return folders[-1]

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of the newest window."""
        record: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return record

    def journal(self) -> list[dict[str, Any]]:
        """The journal's lines."""
        return [json.loads(x) for x in (self.folder / "journal.jsonl").read_text().splitlines()]

    def steps(self) -> list[str]:
        """`step:event` in order."""
        return [f"{line['step']}:{line['event']}" for line in self.journal()]


def command(campaign: Path, *words: str, window: str = "demo-tiny") -> list[str]:
    """The command line of a window."""
    return [
        sys.executable,
        "-m",
        "pytest",
        f"--window={window}",
        f"--window-out={campaign}",
        f"--rootdir={campaign}",
        "-p",
        "no:cacheprovider",
        *words,
    ]


def environment(at: str = "", do: str = "") -> dict[str, str]:
    """The process's environment, with the fault plugin importable."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "FAULT_"))}
    return {**kept, "PYTHONPATH": str(HERE), "FAULT_AT": at, "FAULT_DO": do}


def run(
    campaign: Path,
    *words: str,
    at: str = "",
    do: str = "",
    window: str = "demo-tiny",
    patience_s: float = PATIENCE_S,
) -> Ended:
    """Run a window to its end, and wait for a keeper that had to take over."""
    campaign.mkdir(exist_ok=True)
    extra = ("-p", "phase_fault") if at else ()
    with subprocess.Popen(
        command(campaign, *extra, *words, window=window),
        cwd=campaign,
        env=environment(at, do),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        output, _ = process.communicate(timeout=patience_s)
    wait_for_keepers(campaign)
    return Ended(process.returncode, output, campaign)


def keepers(campaign: Path) -> list[psutil.Process]:
    """Keepers of the campaign's windows that still live."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "keeper" in words and any(word.startswith(str(campaign)) for word in words):
                found.append(process)
    return found


def wait_for_keepers(campaign: Path) -> None:
    """Block until every keeper has ended."""
    _, alive = psutil.wait_procs(keepers(campaign), timeout=PATIENCE_S)
    assert not alive, "a keeper did not end"


def leftovers(campaign: Path) -> list[str]:
    """Processes that carry a scope of the campaign; another campaign's windows are not ours."""
    mine = hashlib.sha1(os.fsencode(campaign.resolve()), usedforsecurity=False).hexdigest()[:8]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            scope = process.environ().get("DSV41_SCOPE", "")
            if process.status() != psutil.STATUS_ZOMBIE and f"-{mine}-" in scope:
                found.append(f"{process.pid} {process.cmdline()}")
    return found


def status(campaign: Path) -> tuple[int, dict[str, Any]]:
    """`dsv41 status --json`: its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "status", "--json", "--campaign", str(campaign)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def assert_ended_well(ended: Ended, *, touched: bool = True) -> None:
    """Production is back and itself, and nothing is left, whatever happened on the way."""
    summary = ended.summary
    if touched:
        assert summary["restore"]["status"] == "RESTORED", summary
        assert summary["restore"]["answers_identical"] == 6
        assert summary["watch"]["status"] == "PASS"
        steps = ended.steps()
        order = [steps.index(f"{s}:end") for s in ("restore-start", "restore-check", "hold-close")]
        assert order == sorted(order)
        assert steps.index("watch:end") < steps.index("intent-clear:end")
    else:
        assert summary["restore"]["status"] == "NOT NEEDED: production untouched", summary
    assert not summary["alerts"], summary["alerts"]
    assert not (ended.campaign / "HOLD").exists()
    assert not (ended.campaign / "intent.json").exists()
    assert leftovers(ended.campaign) == []
    assert keepers(ended.campaign) == []
    code, facts = status(ended.campaign)
    assert code == 0, facts
    assert facts["answer"] == "CLEAN"
    assert facts["unfinished"] == []
