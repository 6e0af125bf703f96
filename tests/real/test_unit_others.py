"""Others work on a real unit while a window has it: what is theirs stays, and is told."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from pytest_dsv41.hosts import Probe
from pytest_dsv41.unit.live import LiveUnit
from tests.lab.lab import Lab
from tests.lab.unit_host import ENV_FILE, UNIT, UnitHost
from tests.lifecycle.running import Ended

pytestmark = pytest.mark.slow

FOREIGN = b"[Service]\nOOMScoreAdjust=77\n"


def short(unit: UnitHost) -> Path:
    """A window that decides nothing, its candidate first."""
    path = unit.write_window("others")
    head, _, rest = path.read_text().partition("[[claims]]")
    text = f"{head}[limits]{rest.partition('[limits]')[2]}"
    text = text.replace('"C/X/C"', '"X/C"').replace("decision = true\n", "")
    path.write_text(text.replace("repeats = {control = 2, fast = 3}", "repeats = 1"))
    return path


def interrupted(unit: UnitHost, at: str, *script: str) -> Ended:
    """Run a window; at its step `at` somebody runs a script on the host."""
    with unit.start(at=at, window=short(unit)) as process:
        unit.reached(process)
        unit.run_on_host("sh", "-euc", *script)
        unit.go()
        output, _ = process.communicate(timeout=300.0)
    return Ended(process.returncode, output, unit.campaign)


def running_with(unit: UnitHost) -> str:
    """What the foreign drop-in sets, as the process has it."""
    pid = unit.run_on_host("systemctl", "show", "-P", "MainPID", UNIT).strip()
    return unit.run_on_host("cat", f"/proc/{pid}/oom_score_adj").strip()


@pytest.mark.parametrize(
    "path",
    [f"/etc/systemd/system/{UNIT}.d/10-a.conf", f"/run/systemd/system/{UNIT}.d/zzzz-dsv41.conf"],
)
def test_a_drop_in_that_comes_meanwhile_is_told_and_stays(unit: UnitHost, path: str) -> None:
    script = 'mkdir -p "$(dirname "$1")"; printf "%s" "$2" > "$1"; systemctl daemon-reload'
    ended = interrupted(unit, "start:X:end", script, "sh", path, FOREIGN.decode())
    assert ended.returncode == 21, ended.output
    assert any(f"is not as captured: {path} is new" in a for a in ended.summary["alerts"])
    # Production serves, with what is theirs.
    assert unit.target().probe().state is Probe.UP
    assert unit.host.read(path) == FOREIGN
    assert running_with(unit) == "77"
    # They take it away; what runs was started with it, and only another start is production's.
    unit.host.remove(path)
    unit.run_on_host("systemctl", "daemon-reload")
    assert unit.dsv41("recover").returncode == 0
    assert running_with(unit) == "0"
    unit.assert_serving_and_nothing_left()


def test_an_operator_who_changes_the_environment_file_and_disables_the_unit(
    unit: UnitHost,
) -> None:
    new = "ROUND_MS=9\n"
    script = 'printf "%s" "$2" > "$1"; chmod 604 "$1"; systemctl disable --quiet "$3"'
    ended = interrupted(unit, "start:X:end", script, "sh", ENV_FILE, new, UNIT)
    assert ended.returncode == 21, ended.output
    assert ended.summary["restore"]["status"] == "RESTORED"
    told = "\n".join(ended.summary["alerts"])
    assert f"{ENV_FILE} was changed (what lay there is kept as env-found-" in told
    assert f"{UNIT} is disabled now and was enabled" in told
    assert [p.read_text() for p in ended.folder.glob("env-found-*")] == [new]
    assert unit.run_on_host("systemctl", "is-enabled", UNIT, check=False).strip() == "disabled"
    # Theirs to undo; a reload hides from drift what a script became, a restart shows it again.
    unit.run_on_host("systemctl", "enable", "--quiet", UNIT)
    unit.run_on_host("systemctl", "restart", UNIT)
    unit.until_up()
    unit.assert_serving_and_nothing_left()


class FileUnit(UnitHost):
    """The unit is given its file by EnvironmentFile=, before another."""

    named = ""
    unit_file = UnitHost.unit_file.replace(
        "Environment=SERVE_ENV_FILE=/etc/serve/serve.env",
        "EnvironmentFile=/etc/serve/serve.env\nEnvironmentFile=-/etc/serve/50%%.env\n"
        "Environment=SERVE_ENV_FILE=/dev/null",
    )
    environment = "LONG='1\nKV_TYPE=no\n2'\n" + UnitHost.environment


def test_a_variant_takes_its_files_place_among_those_of_the_unit(lab: Lab, tmp_path: Path) -> None:
    unit = FileUnit(lab, tmp_path)
    try:
        # What production has from a later file every start has too.
        unit.host.write("/etc/serve/50%.env", "CTX=2048\n")
        unit.serve()
        ended = unit.run(window=short(unit))
        assert ended.returncode == 0, ended.output
        for start, dtype in (("X", "q8_0"), ("C", "f16")):
            log = (ended.folder / "ledger" / f"{start}.log").read_text()
            assert "n_ctx         = 2048" in log
            assert f"K ({dtype})" in log
        unit.assert_serving_and_nothing_left()
    finally:
        lab.mend()
        unit.clean()


def test_a_unit_whose_name_and_drop_ins_are_escaped(lab: Lab, tmp_path: Path) -> None:
    unit, name = UnitHost(lab, tmp_path), "serve\\x2dd.service"
    try:
        unit.run_on_host("mv", f"{unit.units}/{UNIT}", f"{unit.units}/{name}")
        text = (tmp_path / "target.toml").read_text()
        (tmp_path / "target.toml").write_text(text.replace(f'"{UNIT}"', f"'{name}'"))
        unit.run_on_host("systemctl", "daemon-reload")
        unit.run_on_host("systemctl", "start", name)
        unit.until_up()
        shape = unit.target().capture()
        ended = unit.run(window=short(unit))
        assert ended.returncode == 0, ended.output
        assert unit.target().capture() == shape
    finally:
        lab.mend()
        unit.run_on_host("systemctl", "stop", name, check=False)
        unit.run_on_host("rm", "-rf", f"{unit.units}/{name}", f"/run/systemd/system/{name}.d")
        unit.clean()


def test_words_that_the_journal_keeps_under_the_next_try_are_told_of_the_first(
    unit: UnitHost,
) -> None:
    before = unit.run_on_host("systemctl", "show", "-P", "InvocationID", UNIT).strip()
    # The first try prints nothing, as far as the journal knows.
    script = "#!/bin/sh\n[ ! -e $0.tried ] || echo $0: only now >&2\n: > $0.tried\nexit 1\n"
    unit.host.write("/etc/serve/serve.sh", script)
    unit.run_on_host("chmod", "755", "/etc/serve/serve.sh")
    unit.run_on_host("systemctl", "restart", "--no-block", UNIT)
    live = LiveUnit(unit.host, UNIT, login=unit.host)
    said = "/etc/serve/serve.sh: only now"
    limit = time.monotonic() + 30.0
    while said not in unit.run_on_host("journalctl", "-q", "-o", "cat", "-u", UNIT):
        assert time.monotonic() < limit
    fields = ("-q", "-o", "json", "--output-fields=INVOCATION_ID", f"UNIT={UNIT}")
    lines = unit.run_on_host("journalctl", *fields).splitlines()
    tries = list(dict.fromkeys(json.loads(line).get("INVOCATION_ID") for line in lines))
    first = tries[tries.index(before) + 1]
    printed = ("-q", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={first}")
    assert unit.run_on_host("journalctl", *printed) == ""
    state = dataclasses.replace(live.look(), invocation=first)
    assert live.last_words(state) == f"its last line: {said}"
