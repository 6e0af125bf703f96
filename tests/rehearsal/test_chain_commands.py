"""`dsv41 chain …` and its two shell scripts: exit codes, who may, and what is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pair import FIRST, LAST, Pair, make_pair, simulated

import pytest_dsv41
from pytest_dsv41.cli import main
from pytest_dsv41.errors import RefusedByWorld, UsageError
from pytest_dsv41.lifecycle.campaign import Campaign, read_campaign
from pytest_dsv41.lifecycle.chain import (
    ChainUse,
    Mode,
    allow_unreachable,
    clear,
    end_action,
    preflight,
    refuse_overrides,
    restore_required,
)
from pytest_dsv41.lifecycle.marker import read_marker
from pytest_dsv41.lifecycle.record import windows
from pytest_dsv41.window.summary import read_summary

SCRIPTS = Path(pytest_dsv41.__file__).parent / "scripts"


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with simulated(monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        made = make_pair(tmp_path)
        made.small = True
        (made.campaign / "campaign.toml").write_text('coordinator = "night-shift"\n')
        monkeypatch.setenv("WINDOW_COORDINATOR", "night-shift")
        yield made


def real_machines(_folder: Path) -> SimpleNamespace:
    return SimpleNamespace(table={"kind": "spark-pair", "hosts": {"one": {"address": "192.0.2.1"}}})


def chain(pair: Pair, act: str, *words: str) -> int:
    return main(["chain", act, "--campaign", str(pair.campaign), *words])


def test_only_the_coordinator_may_and_nothing_is_looked_at_before(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(FIRST)
    events = len(pair.world.events())
    for given in ("somebody", ""):
        monkeypatch.setenv("WINDOW_COORDINATOR", given)
        assert chain(pair, "gate", "--prev", "nowhere", "--wait", "600") == 2
        assert chain(pair, "abort") == 2
        assert chain(pair, "end") == 2
    assert len(pair.world.events()) == events
    assert "this campaign's coordinator is another" in capsys.readouterr().err
    (pair.campaign / "campaign.toml").unlink()
    assert chain(pair, "abort") == 2
    assert 'write: coordinator = "NAME"' in capsys.readouterr().err


def test_the_gate_admits_and_refuses_by_exit_code(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(FIRST)
    assert chain(pair, "gate", "--prev", str(pair.root / "w1")) == 0
    assert capsys.readouterr().out == "ADMIT: chained\n"
    assert chain(pair, "status") == 1
    told = capsys.readouterr().out
    assert "CHAIN WAITING" in told
    assert "placeholder  alpha: UP" in told
    assert "chain        in time: the next window may begin within 60 min" in told
    gate = f"dsv41 chain gate --prev {pair.root / 'w1'} --campaign {pair.campaign}"
    assert f"next         {gate}" in told
    assert main(["status", "--campaign", str(pair.campaign)]) == 1
    assert f"next        {gate}" in capsys.readouterr().out
    assert chain(pair, "placeholders") == 0
    assert capsys.readouterr().out.count(": UP (chain-") == 2
    assert chain(pair, "gate", "--prev", "nowhere", "--wait", "0") == 3
    told = capsys.readouterr().out
    assert "CHAIN STOPPED: PRODUCTION DOWN; the one automatic recovery begins" in told
    assert "REFUSED: previous summary: " in told
    assert "chain abort: RESTORED, watch PASS" in told
    pair.nothing_is_left()
    assert chain(pair, "gate", "--prev", "nowhere", "--wait", "0") == 2
    assert chain(pair, "abort") == 0
    assert "no chain marker lies here" in capsys.readouterr().out
    assert chain(pair, "placeholders", "--owner", "chain-20260101T000000Z-00000000") == 1


def test_abort_and_end_by_exit_code(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.run(FIRST)
    pair.target().start_production()
    assert chain(pair, "abort") == 4
    assert "dsv41 chain end" in capsys.readouterr().out
    assert chain(pair, "end", "--owner", "chain-20260101T000000Z-00000000") == 4
    assert chain(pair, "end") == 0
    pair.nothing_is_left()
    assert chain(pair, "end") == 4
    assert "no chain marker lies here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("chain", "gate", "--wait", "0", "--prev", "w1"),
        ("chain", "abort"),
        ("chain", "status"),
        ("status",),
        ("watchdog",),
        ("recover",),
    ],
    ids=" ".join,
)
def test_test_only_variables_are_refused_over_real_machines(
    words: tuple[str, ...],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DSV41_CHAIN_PY", "/usr/bin/true")
    campaign = ("--campaign", str(pair.campaign))
    assert main([*words, *campaign]) == 4
    told = capsys.readouterr().err
    assert "DSV41_CHAIN_PY is for tests alone and is refused where no window has run" in told
    pair.run(FIRST)
    # This chain's hosts are simulated.
    assert main([*words[:2], *words[2:], *campaign]) != 4
    monkeypatch.setattr("pytest_dsv41.lifecycle.chain.read_record", real_machines)
    before = {path: path.read_bytes() for path in pair.campaign.iterdir() if path.is_file()}
    assert main([*words, *campaign]) == 4
    assert "is refused with target spark-pair" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in pair.campaign.iterdir() if path.is_file()}
    assert after == before


@pytest.mark.parametrize("words", [("window-cap", "L"), ("windows",), ("smoke", "w.toml")])
def test_commands_that_look_at_files_alone_refuse_them_in_one_line_too(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DSV41_CHAIN_MARKER", "elsewhere")
    campaign = () if words[0] == "smoke" else ("--campaign", str(tmp_path))
    assert main([*words, *campaign]) == 4
    assert "DSV41_CHAIN_MARKER is for tests alone" in capsys.readouterr().err


def test_a_session_over_real_machines_refuses_them_too(tmp_path: Path) -> None:
    refuse_overrides({"kind": "local"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV41_CHAIN_MARKER", str(tmp_path / "elsewhere"))
        refuse_overrides({"kind": "spark-pair", "world": "world"})
        with pytest.raises(UsageError, match="DSV41_CHAIN_MARKER is for tests alone"):
            refuse_overrides({"kind": "local"})


def test_the_marker_and_what_lies_beside_it_can_lie_elsewhere(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = pair.root / "markers" / "CHAIN"
    elsewhere.parent.mkdir()
    monkeypatch.setenv("DSV41_CHAIN_MARKER", str(elsewhere))
    pair.run(FIRST)
    assert elsewhere.is_file()
    assert not (pair.campaign / "marker.json").exists()
    assert chain(pair, "status") == 1
    assert f"marker       {elsewhere}: present" in capsys.readouterr().out
    pair.world.arm("hang", "start-production", host="beta")
    assert chain(pair, "gate", "--prev", "nowhere", "--wait", "0") == 3
    beside = {path.name for path in elsewhere.parent.iterdir()}
    assert beside == {"CHAIN", "CHAIN.abort", "CHAIN.refused"}


@pytest.mark.parametrize("code", [0, 3, 4, 1])
def test_another_program_can_stand_for_the_recovery(
    code: int, pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(FIRST)
    program = pair.root / "abort.sh"
    told = pair.root / "told"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{told}"\nexit {code}\n')
    program.chmod(0o755)
    monkeypatch.setenv("DSV41_CHAIN_ABORT", str(program))
    assert chain(pair, "gate", "--prev", "nowhere", "--wait", "0") == 3
    out, option, campaign = told.read_text().split()
    assert (option, campaign) == ("--campaign", str(pair.campaign))
    assert Path(out).name.startswith("CHAIN-ABORT-")
    said = "RESTORED" if code == 0 else "FAILED"
    assert f"chain abort: {said}, watch NOT RUN: by {program}" in capsys.readouterr().out
    # The gate itself has started nothing.
    assert pair.serving() == {"alpha": False, "beta": False}


def script(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "WINDOW_"))}
    path = str(Path(sys.executable).parent) + os.pathsep + kept.get("PATH", "")
    return subprocess.run(
        [str(SCRIPTS / name), *words],
        env={**kept, "PATH": path, "PYTHONPATH": str(Path(__file__).parent), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_scripts_are_the_same_commands(pair: Pair) -> None:
    campaign = ("--campaign", str(pair.campaign))
    assert script("chain_prev_ok.sh").returncode == 4
    denied = script("chain_prev_ok.sh", "nowhere", *campaign)
    assert (denied.returncode, "WINDOW_COORDINATOR is not set" in denied.stderr) == (2, True)
    done = script("chain_abort.sh", *campaign, WINDOW_COORDINATOR="night-shift")
    assert (done.returncode, "no chain marker lies here" in done.stdout) == (0, True), done.stderr


# -- the document's functions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stopped", "hold", "marker", "use", "action"),
    [
        (False, True, False, ChainUse(), "restore"),
        (False, True, False, FIRST, "chained"),
        (False, True, True, FIRST, "chained"),
        (False, True, True, LAST, "restore"),
        (True, True, True, FIRST, "restore"),
        (True, True, False, ChainUse(), "restore"),
        (True, False, True, FIRST, "abort"),
        (True, False, True, LAST, "abort"),
        (True, False, False, FIRST, "none"),
        (True, False, True, ChainUse(), "none"),
    ],
)
def test_what_an_end_has_to_do(
    stopped: bool, hold: bool, marker: bool, use: ChainUse, action: str
) -> None:
    asked = {"stopped": stopped, "hold_written": hold, "marker": marker, "use": use}
    assert end_action(**asked) == action  # type: ignore[arg-type]
    assert restore_required(**asked) is (action in ("restore", "abort"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("serving", "hold", "present", "marker", "mode"),
    [
        (True, False, None, False, Mode.SINGLE),
        (False, False, True, True, Mode.CHAINED),
        (False, False, None, False, "does not serve"),
        (False, False, None, True, "were not looked at"),
        (False, False, False, True, "not up on every host"),
        (True, False, True, True, "serves under a chain marker"),
        (True, True, True, False, "a HOLD lies there"),
        (False, True, True, True, "a HOLD lies there"),
    ],
)
def test_how_a_window_may_begin(
    serving: bool, hold: bool, present: bool | None, marker: bool, mode: Mode | str
) -> None:
    if isinstance(mode, Mode):
        assert preflight(serving, hold, present, marker=marker) is mode
        assert allow_unreachable(mode) is (mode is Mode.CHAINED)
        return
    with pytest.raises(RefusedByWorld, match=mode):
        preflight(serving, hold, present, marker=marker)


def test_a_marker_with_an_owner_is_never_just_cleared(pair: Pair) -> None:
    pair.run(FIRST)
    with pytest.raises(RefusedByWorld, match="dsv41 chain end"):
        clear(pair.campaign)
    path = pair.campaign / "marker.json"
    path.write_text(path.read_text().replace("chain-", "nobody-"))
    with pytest.raises(UsageError, match="it counts as present"):
        read_marker(pair.campaign)
    clear(pair.campaign)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("coordinator = 1", "coordinator: "),
        ("boss = 'x'", "boss: "),
        ("alert_repeat_hours = 0", "alert_repeat_hours: "),
        ("smoke_backend = 'no colon'", "smoke_backend: "),
        ("coordinator = ", "campaign.toml: "),
    ],
)
def test_a_wrong_campaign_file_is_one_line(text: str, told: str, tmp_path: Path) -> None:
    assert read_campaign(tmp_path) == Campaign()
    (tmp_path / "campaign.toml").write_text(text)
    with pytest.raises(UsageError, match=told) as error:
        read_campaign(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("raw", ["torn", "[" * 100_000])
def test_a_damaged_intent_or_settings_keep_no_stopped_chain_from_its_recovery(
    pair: Pair, raw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(FIRST)
    (pair.campaign / "intent.json").write_text(raw)
    (pair.campaign / "marker.json.refused").write_text("{}")
    (pair.campaign / "campaign.toml").write_text(raw)
    assert main(["watchdog", "--campaign", str(pair.campaign)]) == 21
    assert "RESTORED, watch PASS" in capsys.readouterr().out
    (pair.campaign / "campaign.toml").write_text('coordinator = "night-shift"\n')
    pair.nothing_is_left()


@pytest.mark.parametrize("name", ["CHAIN-ABORT-$(x)\n-rf", "CHAIN-ABORT-", "mine"])
def test_a_recoverys_own_name_never_comes_from_an_odd_folder(
    pair: Pair, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.run(FIRST)
    out = pair.root / name
    assert chain(pair, "abort", "--out", str(out)) == 0
    (owner,) = [n for n in windows(pair.campaign) if n.startswith("CHAIN-ABORT-2")]
    assert read_summary(out).window.id == owner
    pair.nothing_is_left()


@pytest.mark.parametrize(
    ("kept", "restore", "ended"),
    [(None, "RESTORED", "ENDED"), (1, "NOT NEEDED: production untouched", None)],
    ids=["after its last step", "before its HOLD"],
)
def test_a_recovery_that_was_killed_is_finished_without_a_false_alert(
    pair: Pair, kept: int | None, restore: str, ended: str | None
) -> None:
    pair.run(FIRST)
    out = pair.campaign / "CHAIN-ABORT-1"
    assert chain(pair, "abort", "--out", str(out)) == 0
    # As a kill leaves it: no summary, and the journal as far as it had come.
    (out / "summary.json").unlink()
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    (out / "journal.jsonl").write_text("".join(lines[:kept]))
    assert main(["recover", "--campaign", str(pair.campaign)]) == 0
    summary = read_summary(out)
    assert (summary.restore.status, summary.chain, summary.exit_code) == (restore, ended, 0)
    assert main(["status", "--campaign", str(pair.campaign)]) == 0
    pair.nothing_is_left()
