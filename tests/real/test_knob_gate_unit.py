"""The knob gate as ExecStartPre=+ of a real unit whose service runs as another user."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

import pytest_dsv41
from pytest_dsv41.errors import CommandFailed
from pytest_dsv41.hosts import CommandLog
from tests.lab.lab import Lab

pytestmark = pytest.mark.slow

PYTHONS = ("/usr/bin/python3.13", "/usr/bin/python3.12", "/usr/bin/python3.11")

UNIT = """\
[Service]
Type=oneshot
User=daemon
Environment=PYTHONPATH=/var/lib/gate.zip
ExecStartPre={plus}{python} -m pytest_dsv41 knob-gate --knob {knob} --knob /run/knobs/pages_max \
--unit mib --floor-mib 150000 --target-mib 204800 --raise
ExecStart=/bin/sh -c 'id -un > /run/served/who'
"""


def package() -> bytes:
    """The package as one file, for a host whose Python has nothing else installed."""
    root = Path(pytest_dsv41.__file__).parent
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path in root.rglob("*.py"):
            archive.write(path, path.relative_to(root.parent))
    return held.getvalue()


def test_root_raises_what_the_services_user_cannot(lab: Lab, tmp_path: Path) -> None:
    host = lab.ssh("alpha", CommandLog(tmp_path / "cmd"))
    host.write("/var/lib/gate.zip", package())
    # The machine's own interpreter: the gate needs nothing that is installed beside it.
    python = next((p for p in PYTHONS if Path(p).exists()), None)
    if python is None:
        pytest.skip(f"needs one of {', '.join(PYTHONS)}: apt-get install python3")

    def run(*argv: str) -> str:
        return host.run(argv, name="unit", deadline_s=30.0).stdout

    def start(*, plus: str, knob: str) -> str:
        """Start the unit; return its ending and what the journal says of it."""
        run("rm", "-rf", "/run/knobs", "/run/served")
        run("chmod", "0644", "/var/lib/gate.zip")
        run("install", "-d", "-m", "0755", "/run/knobs")
        run("install", "-d", "-o", "daemon", "/run/served")
        run("sh", "-c", "echo 125988 > /run/knobs/pages_limit")
        text = UNIT.format(plus=plus, python=python, knob=knob)
        host.write("/run/systemd/system/gated.service", text)
        run("systemctl", "daemon-reload")
        run("systemctl", "reset-failed")
        try:
            run("systemctl", "start", "gated.service")
        except CommandFailed:
            return run("journalctl", "-u", "gated.service", "-b", "-o", "cat", "--no-pager")
        return "started"

    limit = "/run/knobs/pages_limit"
    assert start(plus="+", knob=limit) == "started"
    assert host.read(limit) == b"204800\n"
    assert host.read("/run/served/who") == b"daemon\n"

    said = start(plus="", knob=limit)
    assert host.read(limit) == b"125988\n"
    assert host.read("/run/served/who") is None
    assert f"REFUSED: {limit} caps at 125988 MiB, below the floor 150000 MiB" in said
    assert "status=2" in said

    # A knob of the kernel that root may not write either: refused by name, the other one raised.
    said = start(plus="+", knob=f"{limit} --knob /proc/sys/kernel/ngroups_max")
    assert host.read(limit) == b"204800\n"
    assert host.read("/run/served/who") is None
    assert "REFUSED: /proc/sys/kernel/ngroups_max caps at" in said
