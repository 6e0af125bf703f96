"""The list after a cutover on a real unit: every kind of check, holding and not, with evidence."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.unit.checklist import load_checklist, verify
from pytest_dsv41.unit.drift import drift
from tests.lab import serve
from tests.lab.lab import Lab
from tests.lab.units import Units
from tests.unit.test_memory_law import BF16_BOOT

pytestmark = pytest.mark.slow

UNIT = "cutover.service"
PORT = 7770
SHAPE = "/srv/shape.env"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/10-shape.conf"
TEXT = f"""\
[Service]
Type=exec
Environment=SERVED_NAME=first-model
Environment=API_TOKEN=canary-51ccd7f0
ExecStart=/bin/sh -c 'cat /srv/boot.txt; exec {sys.executable} {serve.__file__} --port {PORT} \
--engine llamacpp --model "$SERVED_NAME" --draft-tokens 2 --seed 7'

[Install]
WantedBy=multi-user.target
"""
ENV = b"SLOTS=2\nWINDOW=200000\n"

GOOD = f"""\
url = "http://{{address}}:{PORT}"

[[check]]
check = "state"
enabled = "enabled"

[[check]]
check = "restarts"

[[check]]
check = "health"

[[check]]
check = "models"
ids = ["first-model"]

[[check]]
check = "argv"
flags = {{ "--port" = "{PORT}", "--draft-tokens" = "2" }}
absent = ["--no-such-flag"]

[[check]]
check = "environment"
values = {{ SERVED_NAME = "first-model", SLOTS = "2", API_TOKEN = "canary-51ccd7f0" }}
absent = ["BENCH"]

[[check]]
check = "drop-ins"
paths = ["{DROP_IN}"]

[[check]]
name = "the unit is the checkout's"
check = "drift"
checkout = "{UNIT}"
env_files = {{ "{SHAPE}" = "shape.env" }}

[[check]]
check = "port"
port = {PORT}

[[check]]
name = "nothing on the old port"
check = "port"
port = 7771
open = false

[[check]]
check = "file"
path = "{SHAPE}"
sha256 = "{hashlib.sha256(ENV).hexdigest()}"

[[check]]
check = "ledger"
dialect = "radiance"

[[check]]
name = "the KV pool is larger than before"
check = "ledger"
dialect = "radiance"
subject = "kv_attn"
fact = "tokens"
unit = "tokens"
at_least = 399825

[[check]]
check = "ledger"
dialect = "radiance"
subject = "vram_kv"
fact = "stated"
unit = "MiB"
equals = 6912

[[check]]
name = "metrics"
check = "http"
url = "http://{{address}}:{PORT}/metrics"
contains = "llamacpp:tokens_predicted_total"

[[check]]
check = "fleet"
probes = ["drafts"]

[[check]]
check = "command"
argv = ["systemctl", "is-active", "{UNIT}"]
contains = "active"

[[check]]
name = "the end-to-end tests"
check = "command"
on = "here"
argv = ["sh", "-c", "echo 33 passed"]
contains = "33 passed"
"""

BAD = {
    'enabled = "enabled"': ('enabled = "disabled"', "state", "active (running), enabled"),
    'ids = ["first-model"]': ('ids = ["second-model"]', "models", "/v1/models names first-model"),
    '"--draft-tokens" = "2"': ('"--draft-tokens" = "3"', "argv", "--draft-tokens 2, not 3"),
    'absent = ["--no-such-flag"]': ('absent = ["--seed"]', "argv", "--seed is there"),
    'SLOTS = "2"': ('SLOTS = "4"', "environment", "SLOTS is 2, not 4"),
    'API_TOKEN = "canary-51ccd7f0"': ('API_TOKEN = "other"', "environment", "API_TOKEN is sha256:"),
    'absent = ["BENCH"]': ('absent = ["SLOTS"]', "environment", "SLOTS is set"),
    f'paths = ["{DROP_IN}"]': ("paths = []", "drop-ins", DROP_IN),
    f"port = {PORT}\n": ("port = 7772\n", "port", "refused at 127.0.0.1:7772"),
    "open = false": ("open = true", "port", "refused at 127.0.0.1:7771"),
    f'path = "{SHAPE}"': ('path = "/srv/none"', "file", "not on the host"),
    "at_least = 399825": ("at_least = 500000", "ledger", "kv_attn tokens: 462,752 tokens"),
    "equals = 6912": ("equals = 6000", "ledger", "vram_kv stated: 6,912 MiB"),
    'contains = "llamacpp:tokens_predicted_total"': (
        'contains = "vllm:"', "http", "without 'vllm:'"
    ),
    'probes = ["drafts"]': ('probes = ["vision"]', "fleet", "vision NOT OFFERED"),
    f'"is-active", "{UNIT}"': ('"is-active", "none.service"', "command", "exit "),
    'contains = "33 passed"': ('contains = "34 passed"', "command", "not in its output"),
}  # fmt: skip

# What another wrong line of the same check would hide.
ALSO_BAD = {
    'unit = "tokens"': ('unit = "MiB"', "ledger", "not in MiB"),
    'fact = "stated"': ('fact = "size"', "ledger", "not in the ledger; it has"),
}


@pytest.fixture
def units(lab: Lab, tmp_path: Path) -> Iterator[Units]:
    units = Units(lab, CommandLog(tmp_path / "cmd", synced=False))
    units.write("/srv/boot.txt", BF16_BOOT)
    units.write(SHAPE, ENV)
    units.write(f"/etc/systemd/system/{UNIT}", TEXT)
    units.write(DROP_IN, f"[Service]\nEnvironmentFile={SHAPE}\n")
    units.reload()
    units.run("systemctl", "enable", UNIT)
    units.start(UNIT)
    limit = time.monotonic() + 60.0
    while units.host.port(PORT).value != "UP":
        assert time.monotonic() < limit, units.run("systemctl", "status", UNIT, check=False)
        time.sleep(0.05)
    units.run("journalctl", "--sync")
    try:
        yield units
    finally:
        units.run("systemctl", "disable", UNIT)
        units.clean()


def write(folder: Path, lab: Lab, text: str = GOOD) -> Path:
    (folder / UNIT).write_text(TEXT)
    (folder / f"{UNIT}.d").mkdir(exist_ok=True)
    (folder / f"{UNIT}.d" / "10-shape.conf").write_text(f"[Service]\nEnvironmentFile={SHAPE}\n")
    (folder / "shape.env").write_bytes(ENV)
    path = folder / "cutover.toml"
    path.write_text(text.replace("{address}", lab.address("alpha")))
    return path


def test_every_check_holds_and_each_can_fail(
    units: Units, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["unit", "verify", UNIT, "--host", f"root@{lab.address('alpha')}"]
    words += ["--key", str(lab.key), "--known-hosts", str(lab.known_hosts), "--checklist"]
    assert main([*words, str(write(tmp_path, lab))]) == 0
    shown = capsys.readouterr().out
    assert shown.count("PASS") == GOOD.count("[[check]]") + shown.count("drafts PASS")
    assert "cutover.toml: 18 of 18 checks hold" in shown
    assert "canary-51ccd7f0" not in shown

    # Each wrong line must fail its own check, and nothing else must fail with it.
    for lines in (BAD, ALSO_BAD):
        wrong = GOOD
        for right, (instead, _, _) in lines.items():
            assert right in wrong
            wrong = wrong.replace(right, instead, 1)
        assert main([*words, str(write(tmp_path, lab, wrong)), "--json"]) == 2
        said = capsys.readouterr().out
        report = json.loads(said)
        assert "canary-51ccd7f0" not in said
        assert report["passed"] is False
        failed = [check for check in report["checks"] if not check["passed"]]
        for _, kind, evidence in lines.values():
            assert any(c["kind"] == kind and evidence in c["evidence"] for c in failed), (
                kind, evidence, [c for c in report["checks"] if c["kind"] == kind]
            )  # fmt: skip
        assert {check["kind"] for check in failed} == {kind for _, kind, _ in lines.values()}
        held = {check["kind"] for check in report["checks"] if check["passed"]}
        assert {"restarts", "health", "drift", "ledger"} <= held


def test_what_cannot_be_seen_has_failed(units: Units, lab: Lab, tmp_path: Path) -> None:
    checklist = load_checklist(write(tmp_path, lab))
    units.run("systemctl", "stop", UNIT)
    answers = {f"{a.kind} {a.name}": a for a in verify(units.host, UNIT, checklist)}
    for name in (
        "state ", "health ", "models first-model", f"port {PORT}", "metrics",
        "argv --port, --draft-tokens, no --no-such-flag",
    ):  # fmt: skip
        found = [a for key, a in answers.items() if key.endswith(name)]
        assert found, list(answers)
        assert not found[0].passed, found
    assert "no main process runs" in str(answers)
    assert answers[f"file {SHAPE}"].passed

    # A host that does not answer: nothing holds, and nothing is raised.
    lab.cut("alpha")
    units.host.close()
    text = '[[check]]\ncheck = "state"\n[[check]]\ncheck = "file"\npath = "/etc/hosts"\n'
    text += f'sha256 = "{"0" * 64}"\n'
    quick = tmp_path / "quick.toml"
    quick.write_text(text)
    answers_ = verify(units.host, UNIT, load_checklist(quick))
    assert [a.passed for a in answers_] == [False, False]
    assert all("cannot be told" in a.evidence for a in answers_)
    lab.mend()


def test_a_unit_that_drifted_fails_its_list(units: Units, lab: Lab, tmp_path: Path) -> None:
    path = units.write(f"/run/systemd/system/{UNIT}.d/bench.conf", "[Service]\nEnvironment=B=1\n")
    units.reload()
    units.start(UNIT)
    checklist = load_checklist(write(tmp_path, lab))
    answer = next(a for a in verify(units.host, UNIT, checklist) if a.kind == "drift")
    assert not answer.passed
    assert f"{path}:2: Service.Environment B: " in answer.evidence


def test_a_user_unit_is_asked_of_its_own_manager(units: Units, lab: Lab, tmp_path: Path) -> None:
    # The journal may miss the first lines of a user's unit: their log is a file of its own.
    log = units.write("/srv/own.log", "")
    text = f"[Service]\nType=exec\nStandardOutput=truncate:{log}\n"
    text += "ExecStart=/bin/sh -c 'cat /srv/boot.txt; exec sleep 1000'\n"
    units.write("/etc/systemd/user/own.service", text)
    units.run("systemctl", "--user", "daemon-reload")
    units.run("systemctl", "--user", "restart", "own.service")
    path = tmp_path / "own.toml"
    path.write_text(
        '[[check]]\ncheck = "state"\n[[check]]\ncheck = "drift"\n'
        '[[check]]\ncheck = "argv"\nflags = { "1000" = true }\n'
        f'[[check]]\ncheck = "ledger"\ndialect = "radiance"\nfile = "{log}"\n'
    )
    limit = time.monotonic() + 20.0
    while (units.host.read(log) or b"") != BF16_BOOT.encode():
        assert time.monotonic() < limit
        time.sleep(0.02)
    try:
        answers = verify(units.host, "own", load_checklist(path), user=True)
        assert [(a.kind, a.passed) for a in answers] == [
            ("state", True), ("drift", True), ("argv", True), ("ledger", True)
        ], answers  # fmt: skip
        with pytest.raises(UsageError, match=r"no unit own\.service"):
            drift(units.host, "own")
    finally:
        units.run("systemctl", "--user", "stop", "own.service")
