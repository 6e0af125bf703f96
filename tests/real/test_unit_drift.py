"""The drop-in trap on a real systemd: each foreign drop-in is named with what it beats.

Who really wins is asked of the running process itself, never of the code under test.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import CommandFailed, UsageError
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.unit.drift import Checkout, Finding, drift, load_checkout
from tests.lab.lab import Lab
from tests.lab.units import Units

pytestmark = pytest.mark.slow

UNIT = "served-model.service"
CHECKOUT = """\
[Unit]
Description=a server

[Service]
Type=exec
Environment=SHAPE_FILE=/srv/production.env
Environment=CANARY=canary-2b7e1516 "TWO=with space"
ExecStart=/bin/sleep 100001
Restart=no
"""
PRODUCTION = "/srv/checkout/served-model.service"
FRAGMENT = f"/etc/systemd/system/{UNIT}"
OURS = f"/run/systemd/system/{UNIT}.d/50-ours.conf"
OUR_TEXT = """\
[Service]
Environment=SHAPE_FILE=/run/ours.env
ExecStart=
ExecStart=/bin/sleep 100002
"""
EXEC = "ExecStart=\nExecStart=/bin/sleep 100003\n"
ENV = "Environment=SHAPE_FILE=/srv/staging.env\n"

FOLDERS = {
    "etc": f"/etc/systemd/system/{UNIT}.d",
    "run": f"/run/systemd/system/{UNIT}.d",
    "prefix": "/etc/systemd/system/served-.service.d",
    "service.d in etc": "/etc/systemd/system/service.d",
    "service.d in run": "/run/systemd/system/service.d",
}
WHAT = {"ExecStart": EXEC, "Environment": ENV, "both": ENV + EXEC}


@pytest.fixture
def units(lab: Lab, tmp_path: Path) -> Iterator[Units]:
    units = Units(lab, CommandLog(tmp_path / "cmd", synced=False))
    units.write(PRODUCTION, CHECKOUT)
    units.link(FRAGMENT, PRODUCTION)
    units.reload()
    try:
        yield units
    finally:
        units.clean()


def checkout() -> Checkout:
    return Checkout("served-model.service", CHECKOUT.encode(), {})


def process(units: Units) -> tuple[list[str], dict[str, str]]:
    """The argv and environment of what runs, from /proc."""
    pid = units.show(UNIT, "MainPID")
    argv = units.host.read(f"/proc/{pid}/cmdline") or b""
    environ = units.host.read(f"/proc/{pid}/environ") or b""
    pairs = [word.partition("=") for word in environ.decode().split("\0") if word]
    return argv.decode().removesuffix("\0").split("\0"), {name: value for name, _, value in pairs}


def state(units: Units) -> str:
    """What a look must leave alone: every byte and time below the folders, and the process."""
    return units.run(
        "sh",
        "-c",
        "find /etc/systemd /run/systemd/system /srv/checkout -type f -printf '%p %T@ %C@\\n' "
        "-exec sha256sum {} \\; ; systemctl show -p MainPID -p InvocationID -p DropInPaths "
        f"-p Environment -p NRestarts {UNIT}",
    )


def of(found: list[Finding], path: str) -> dict[str, Finding]:
    return {finding.key: finding for finding in found if finding.path == path}


def test_a_unit_that_is_what_its_checkout_says_is_clean(units: Units) -> None:
    units.start(UNIT)
    assert drift(units.host, UNIT, checkout=checkout()) == []
    assert drift(units.host, "served-model", checkout=checkout()) == []
    units.run("systemctl", "stop", UNIT)
    assert drift(units.host, UNIT, checkout=checkout()) == []


def differing(units: Units, name: str) -> list[Finding]:
    """What differs beside the drop-ins of the distribution."""
    return [f for f in drift(units.host, name) if f.kind not in ("drop-in", "hides")]


def test_the_machines_own_services_are_as_they_are_loaded(units: Units) -> None:
    listed = units.run(
        "systemctl", "list-units", "--type=service", "--state=running", "--plain", "--no-legend"
    )
    names = [line.split()[0] for line in listed.splitlines()]
    assert {"ssh.service", "dbus.service", "systemd-journald.service"} <= set(names), names
    for name in names:
        found = differing(units, name)
        if "argv" in {f.kind for f in found} <= {"argv", "environment"}:
            # A daemon that writes over its words: since a reload nothing proves its start.
            units.run("systemctl", "restart", name)
            found = differing(units, name)
        assert found == [], name


@pytest.mark.parametrize("name", ["10-foreign.conf", "zz-foreign.conf"])
@pytest.mark.parametrize(
    ("where", "what"),
    [
        *((where, "both") for where in FOLDERS),
        *((where, "ExecStart") for where in ("etc", "run", "service.d in etc")),
        *((where, "Environment") for where in ("etc", "run", "service.d in etc")),
    ],
)
def test_a_foreign_drop_in_is_named_with_what_it_beats(
    where: str, name: str, what: str, units: Units
) -> None:
    foreign = f"{FOLDERS[where]}/{name}"
    text = f"# left behind\n[Service]\n{WHAT[what]}"
    units.write_all([(OURS, OUR_TEXT.encode()), (foreign, text.encode())])
    units.reload()
    units.start(UNIT)
    before = state(units)

    found = drift(units.host, UNIT, checkout=checkout(), ours=[OURS])

    assert state(units) == before, "a look changed something"
    argv, environ = process(units)
    # What the process got says who won.
    won = {
        "Service.ExecStart": argv == ["/bin/sleep", "100003"],
        "Service.Environment SHAPE_FILE": environ["SHAPE_FILE"] == "/srv/staging.env",
    }
    lines = {"Service.ExecStart": 4 if what == "both" else 3, "Service.Environment SHAPE_FILE": 3}
    wanted = {key for key in lines if what == "both" or what in key}
    named = of(found, foreign)
    assert set(named) == wanted
    assert len(found) == len(wanted), "ours, or something else, was called drift"
    for key in wanted:
        finding = named[key]
        assert won[key] == (name > OURS.rpartition("/")[2]), "the layout does not test the trap"
        assert finding.kind == ("drop-in-over-ours" if won[key] else "drop-in")
        assert finding.line == lines[key]
        ours_line = 2 if "Environment" in key else 4
        base_line = 6 if "Environment" in key else 8
        if won[key]:
            assert f"{OURS}:{ours_line}" in finding.beats
            assert f"ours, {OURS}, is read before it" in str(finding)
        else:
            assert finding.beats == (f"{FRAGMENT}:{base_line}",)
            # By the empty ExecStart= of ours, which stands before its own.
            assert f"itself beaten by {OURS}:{2 if 'Environment' in key else 3}" in str(finding)
        assert "canary-2b7e1516" not in str(finding)


def test_the_command_says_drift_with_2_and_registered_drift_with_0(
    units: Units, lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / UNIT).write_text(CHECKOUT)
    (tmp_path / "production.env").write_text("SHAPE=1\nTOKEN=new\n")
    env_file = units.write("/srv/production.env", "SHAPE=1\n# a remark\nTOKEN=canary-3ad77bb4\n")
    foreign = units.write(f"{FOLDERS['etc']}/bench.conf", f"[Service]\n{ENV}{EXEC}")
    units.reload()
    units.start(UNIT)
    words = ["unit", "drift", UNIT, "--host", f"root@{lab.address('alpha')}"]
    words += ["--key", str(lab.key), "--known-hosts", str(lab.known_hosts)]
    words += ["--checkout", str(tmp_path / UNIT)]

    assert main(words) == 2
    shown = capsys.readouterr().out
    assert f"{foreign}:2: Service.Environment SHAPE_FILE: " in shown
    assert f"{foreign}:3: Service.ExecStart: " in shown
    assert "/srv/staging.env" in shown
    assert f"beats {FRAGMENT}:6" in shown
    assert f"unit file  {FRAGMENT} -> {PRODUCTION}" in shown
    assert f"{UNIT} on {lab.address('alpha')}: DRIFT: 2 findings" in shown

    words += ["--env-file", f"{env_file}={tmp_path / 'production.env'}"]
    assert main([*words, "--json"]) == 2
    said = capsys.readouterr().out
    report = json.loads(said)
    assert "canary-3ad77bb4" not in said
    assert [(f["path"], f["line"], f["key"]) for f in report["findings"]] == [
        (env_file, 3, "TOKEN"),
        (foreign, 2, "Service.Environment SHAPE_FILE"),
        (foreign, 3, "Service.ExecStart"),
    ]
    registered = [word for f in report["findings"] for word in ("--registered", f["id"])]
    assert main([*words, *registered]) == 0
    assert "clean, 3 registered" in capsys.readouterr().out
    # Another content of the same file is other drift.
    units.write(foreign, f"[Service]\n{ENV}{EXEC}# \n")
    units.reload()
    units.start(UNIT)
    assert main([*words, *registered]) == 2

    assert main([*words[:2], "no-such-unit", *words[3:]]) == 4
    assert "no unit no-such-unit.service" in capsys.readouterr().err
    assert main([*words[:2], "no such unit", *words[3:]]) == 4


def test_a_file_that_was_changed_back_in_time_is_seen_though_systemd_does_not(
    units: Units,
) -> None:
    units.start(UNIT)
    changed = CHECKOUT.replace("100001", "100009").replace("production.env", "other.env")
    units.write(PRODUCTION, changed)
    units.run("touch", "-d", "2001-01-01", PRODUCTION)
    assert units.show(UNIT, "NeedDaemonReload") == "no", "systemd sees it here: no trap"

    found = drift(units.host, UNIT)

    kinds = {(f.kind, f.key) for f in found}
    assert ("loaded-differs", "Service.ExecStart") in kinds
    assert ("loaded-differs", "Service.Environment SHAPE_FILE") in kinds
    assert ("changed-since-load", "") in kinds
    lines = {f.key: (f.path, f.line) for f in found if f.kind == "loaded-differs"}
    assert lines["Service.ExecStart"] == (FRAGMENT, 8)
    assert lines["Service.Environment SHAPE_FILE"] == (FRAGMENT, 6)

    # Against the checkout the file itself is named, key by key.
    named = {
        f.key: f.line for f in drift(units.host, UNIT, checkout=checkout()) if f.kind == "unit-file"
    }
    assert named == {"Service.ExecStart": 8, "Service.Environment": 6}


def test_what_is_loaded_and_gone_and_what_is_not_loaded_yet(units: Units) -> None:
    path = units.write(f"{FOLDERS['run']}/bench.conf", f"[Service]\n{ENV}")
    units.reload()
    units.start(UNIT)
    units.remove(path)
    later = units.write(f"{FOLDERS['etc']}/later.conf", f"[Service]\n{EXEC}")

    found = drift(units.host, UNIT)

    assert ("gone", path) in {(f.kind, f.path) for f in found}
    assert ("not-loaded", later) in {(f.kind, f.path) for f in found}
    assert ("loaded-differs", "Service.Environment SHAPE_FILE") in {(f.kind, f.key) for f in found}

    # Reloaded and not restarted: the process still runs what the removed drop-in said.
    units.remove(later)
    units.reload()
    found = drift(units.host, UNIT, checkout=checkout())
    assert [(f.kind, f.path, f.line, f.key) for f in found] == [
        ("environment", FRAGMENT, 6, "SHAPE_FILE")
    ]
    assert "/srv/staging.env" in found[0].what
    units.start(UNIT)
    assert drift(units.host, UNIT, checkout=checkout()) == []


def test_a_process_of_another_command_line_than_is_loaded(units: Units) -> None:
    path = units.write(f"{FOLDERS['run']}/bench.conf", f"[Service]\nEnvironment=EXTRA=1\n{EXEC}")
    units.reload()
    units.start(UNIT)
    units.remove(path)
    units.reload()
    found = drift(units.host, UNIT, checkout=checkout())
    assert [(f.kind, f.path, f.line) for f in found] == [("argv", FRAGMENT, 8)]
    assert "100003" in found[0].what
    assert "100001" in found[0].what


def test_a_variable_that_nothing_sets_any_more(units: Units) -> None:
    path = units.write(f"{FOLDERS['run']}/bench.conf", "[Service]\nEnvironment=EXTRA=canary-9\n")
    units.reload()
    units.start(UNIT)
    units.remove(path)
    units.reload()
    found = drift(units.host, UNIT, checkout=checkout())
    assert [(f.kind, f.key) for f in found] == [("environment", "EXTRA")]
    assert "canary-9" not in str(found)


def test_an_environment_file_that_changed_under_the_process_and_goes_over_environment(
    units: Units,
) -> None:
    shape = units.write("/srv/shape.env", "# the shape\nSLOTS=3\nSHAPE_FILE=/srv/from-file.env\n")
    path = units.write(f"{FOLDERS['etc']}/10-file.conf", f"[Service]\nEnvironmentFile={shape}\n")
    units.reload()
    units.start(UNIT)
    # EnvironmentFile= beats Environment= wherever it stands: the process says so.
    assert process(units)[1]["SHAPE_FILE"] == "/srv/from-file.env"
    known = Checkout("c", CHECKOUT.encode(), {"10-file.conf": units.host.read(path) or b""})
    assert drift(units.host, UNIT, checkout=known) == []

    units.write(shape, "# the shape\nSLOTS=4\nSHAPE_FILE=/srv/from-file.env\n")
    found = drift(units.host, UNIT, checkout=known)
    assert [(f.kind, f.path, f.line, f.key) for f in found] == [("environment", shape, 2, "SLOTS")]
    assert "has 3; a restart would set 4" in found[0].what


@pytest.mark.parametrize("how", ["EnvironmentFile", "UnsetEnvironment"])
def test_an_environment_file_beats_ours_though_it_is_read_before_it(how: str, units: Units) -> None:
    shape = units.write("/srv/foreign.env", "SHAPE_FILE=/srv/staging.env\n")
    value = f"-{shape}" if how == "EnvironmentFile" else "SHAPE_FILE"
    foreign = f"{FOLDERS['etc']}/10-foreign.conf"
    text = f"[Service]\n{how}={value}\n"
    units.write_all([(OURS, OUR_TEXT.encode()), (foreign, text.encode())])
    units.reload()
    units.start(UNIT)
    won = {"EnvironmentFile": "/srv/staging.env", "UnsetEnvironment": None}[how]
    assert process(units)[1].get("SHAPE_FILE") == won
    (found,) = drift(units.host, UNIT, checkout=checkout(), ours=[OURS])
    assert (found.kind, found.path, found.line) == ("drop-in-over-ours", foreign, 2)
    assert found.beats == (f"{OURS}:2",)
    assert "wherever that stands" in found.what


def test_a_script_that_becomes_the_server_is_not_drift_until_it_cannot_be_told(
    units: Units,
) -> None:
    script = units.write(
        "/srv/serve.sh", "#!/bin/sh\nexport SHAPE=set-by-script\nexec sleep 100007\n"
    )
    units.run("chmod", "0755", script)
    text = CHECKOUT.replace("/bin/sleep 100001", script)
    units.write(PRODUCTION, text)
    units.reload()
    units.start(UNIT)
    assert process(units)[0] == ["sleep", "100007"]
    wanted = Checkout("c", text.encode(), {})
    assert drift(units.host, UNIT, checkout=wanted) == []
    units.reload()
    found = drift(units.host, UNIT, checkout=wanted)
    assert [(f.kind, f.key) for f in found] == [("argv", "Service.ExecStart")]
    again = drift(units.host, UNIT, checkout=wanted)
    assert [f.id for f in again] == [f.id for f in found]


def test_a_script_that_stays_runs_as_its_interpreter(units: Units) -> None:
    script = units.write("/srv/serve.sh", "#!/bin/sh -e\nsleep 100007 & wait\n")
    units.run("chmod", "0755", script)
    text = CHECKOUT.replace("/bin/sleep 100001", f"{script} --slots ${{TWO}} $TWO $$5")
    units.write(PRODUCTION, text)
    units.reload()
    units.start(UNIT)
    assert process(units)[0] == [
        "/bin/sh", "-e", script, "--slots", "with space", "with", "space", "$5"
    ]  # fmt: skip
    units.reload()
    assert drift(units.host, UNIT, checkout=Checkout("c", text.encode(), {})) == []


def test_masks_hidden_drop_ins_and_drop_ins_of_the_checkout(units: Units) -> None:
    low = units.write(f"/usr/local/lib/systemd/system/{UNIT}.d/20-limits.conf", f"[Service]\n{ENV}")
    mask = units.link(f"{FOLDERS['etc']}/20-limits.conf", "/dev/null")
    units.reload()
    units.start(UNIT)
    found = drift(units.host, UNIT, checkout=checkout())
    assert [(f.kind, f.path, f.beats) for f in found] == [("hides", mask, (f"{low}:2",))]
    assert f"masks {low}" in found[0].what

    named = {"30-own.conf": b"[Service]\nNice=1\n"}
    found = drift(units.host, UNIT, checkout=Checkout("c", CHECKOUT.encode(), named))
    assert ("missing-drop-in", f"{UNIT}.d/30-own.conf") in {(f.kind, f.path) for f in found}
    units.write(f"{FOLDERS['etc']}/30-own.conf", named["30-own.conf"])
    units.reload()
    units.start(UNIT)
    found = drift(units.host, UNIT, checkout=Checkout("c", CHECKOUT.encode(), named))
    assert [f.kind for f in found] == ["hides"]

    units.run("systemctl", "stop", UNIT)
    units.remove(FRAGMENT)
    units.link(FRAGMENT, "/dev/null")
    units.reload()
    found = drift(units.host, UNIT)
    assert ("load-state", FRAGMENT) in {(f.kind, f.path) for f in found}


def test_another_users_process_cannot_be_read_and_is_not_clean(
    units: Units, lab: Lab, tmp_path: Path
) -> None:
    units.start(UNIT)
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    with pytest.raises(CommandFailed, match=r"read|denied"):
        drift(units.host, UNIT, become=argv)
    assert drift(units.host, UNIT, become=["env"], checkout=checkout()) == []
    with pytest.raises(UsageError, match="no unit"):
        drift(units.host, "not-there.service")


def test_no_secret_stands_in_a_command_record(units: Units, tmp_path: Path) -> None:
    units.start(UNIT)
    drift(units.host, UNIT)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "cmd").glob("*unit-*.log"))
    assert b"GetAll" in kept
    assert b"canary-2b7e1516" not in kept


def test_a_checkout_with_its_drop_ins(tmp_path: Path) -> None:
    (tmp_path / "a.service").write_text("[Service]\n")
    (tmp_path / "a.service.d").mkdir()
    (tmp_path / "a.service.d" / "10.conf").write_text("[Unit]\n")
    read = load_checkout(tmp_path / "a.service")
    assert read.drop_ins == {"10.conf": b"[Unit]\n"}
    assert hashlib.sha256(read.data).hexdigest() == hashlib.sha256(b"[Service]\n").hexdigest()
