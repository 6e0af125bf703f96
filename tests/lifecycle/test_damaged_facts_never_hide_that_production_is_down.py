"""Durable facts that are damaged in mid window: production comes back, or the alert says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .running import (
    PATIENCE_S,
    Ended,
    assert_ended_well,
    command,
    environment,
    keepers,
    leftovers,
    run,
    wait_for_keepers,
)
from .test_a_window_refuses_and_decides import own_cell

NEWER_LEASE = (
    "path = Path({campaign!r}) / 'lease.json'\n"
    "lease = json.loads(path.read_text())\n"
    "lease['epoch'] += 1\n"
    "path.write_text(json.dumps(lease))"
)


def damaged(folder: Path, act: str) -> Ended:
    """A window whose second item does `act` to the campaign's files."""
    campaign = str(folder / "out")
    lines = act.format(campaign=campaign).replace("\n", "\n    ")
    body = (
        "import json\nfrom pathlib import Path\n"
        f"if start.id == 'K1-mine-r1':\n    {lines}\n"
        "measure()"
    )
    return run(folder / "out", window=own_cell(folder, body))


def recover(campaign: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "recover", "--campaign", str(campaign)],
        capture_output=True,
        text=True,
        check=False,
    )
    wait_for_keepers(campaign)
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [
        "(Path({campaign!r}) / 'intent.json').write_text('{{torn')",
        "(Path({campaign!r}) / 'intent.json').write_text('[]')",
        "(Path({campaign!r}) / 'intent.json').unlink()",
    ],
    ids=["torn", "another-type", "deleted"],
)
def test_an_intent_that_is_damaged_is_made_again_from_the_journal(act: str, tmp_path: Path) -> None:
    ended = damaged(tmp_path, act)
    assert ended.returncode == 0, ended.output
    assert "intent-again:end" in ended.steps()
    assert_ended_well(ended)


@pytest.mark.slow
def test_a_window_that_lost_its_lease_does_nothing_more_and_its_keeper_ends_it(
    tmp_path: Path,
) -> None:
    ended = damaged(tmp_path, NEWER_LEASE)
    campaign = ended.campaign
    assert ended.returncode == 20, ended.output
    assert "lease lost" in ended.output
    wait_for_keepers(campaign)
    steps = ended.steps()
    # The session gave nothing back: all of the close comes after the keeper has taken over.
    assert steps.index("recover:begin") < steps.index("restore-start:begin")
    assert ended.summary["stopped"] == "the measuring process died"
    assert_ended_well(Ended(12, ended.output, campaign))


@pytest.mark.slow
def test_a_foreign_hold_in_mid_window_is_kept_and_recover_waits_for_it(tmp_path: Path) -> None:
    foreign = '{{"owner": "somebody-else"}}'
    ended = damaged(tmp_path, f"(Path({{campaign!r}}) / 'HOLD').write_text('{foreign}')")
    campaign = ended.campaign
    assert ended.returncode == 20, ended.output
    assert ended.summary["alerts"][-1] == f"next: dsv41 status --campaign {campaign}"
    assert recover(campaign).returncode == 13
    assert (campaign / "HOLD").read_text() == foreign.format()
    (campaign / "HOLD").unlink()
    assert recover(campaign).returncode == 0
    assert_ended_well(Ended(12, "", campaign))


@pytest.mark.slow
def test_a_reader_that_leaves_costs_the_window_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*command(tmp_path), "-v"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "PASSED" not in (line := process.stdout.readline()):
            assert line, "it ended without a measured item"
        process.stdout.close()
        process.wait(PATIENCE_S)
    assert process.returncode == 0
    ended = Ended(process.returncode, "", tmp_path)
    assert_ended_well(ended)
    assert not keepers(tmp_path)
    assert leftovers(tmp_path) == []
