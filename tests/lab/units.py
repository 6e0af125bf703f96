"""Units on a lab host: written, loaded and started by its real systemd, and all removed again."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from pytest_dsv41.hosts import CommandLog
from tests.lab.lab import Lab


class Units:
    """What a test writes below the unit folders of the host `alpha`, and how it asks systemd."""

    def __init__(self, lab: Lab, log: CommandLog) -> None:
        self.host = lab.ssh("alpha", log)
        self._written: list[str] = []
        self._started: list[str] = []

    def run(self, *argv: str, check: bool = True, stdin: str = "") -> str:
        """Run a command on the host and return what it said."""
        done = self.host.run(argv, name="unit", deadline_s=60.0, check=check, stdin=stdin)
        return done.stdout

    def write(self, path: str, data: str | bytes) -> str:
        """Write one file and return its path; it is removed afterwards."""
        self.host.write(path, data)
        self.run("chmod", "0644", path)
        self._written.append(path)
        return path

    def link(self, path: str, target: str) -> str:
        """Make a symbolic link; it is removed afterwards."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && ln -sfn "$2" "$1"', "sh", path, target)
        self._written.append(path)
        return path

    def write_all(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write many files at once: one command instead of three each."""
        lines = []
        for path, data in files:
            lines.append(f"mkdir -p '{path.rpartition('/')[0]}'")
            lines.append(f"base64 -d > '{path}' <<'END'\n{base64.b64encode(data).decode()}\nEND")
        script = "\n".join(lines)
        self.run("sh", "-s", stdin=script)
        self._written += [path for path, _ in files]

    def remove(self, path: str) -> None:
        """Remove a file now."""
        self.host.remove(path)

    def reload(self) -> None:
        """Let systemd read its files again."""
        self.run("systemctl", "daemon-reload")

    def start(self, *units: str, check: bool = True) -> None:
        """(Re)start units; they are stopped afterwards."""
        self._started += units
        self.run("systemctl", "restart", *units, check=check)

    def show(self, unit: str, name: str) -> str:
        """One property, as systemctl prints it."""
        return self.run("systemctl", "show", "-P", name, "--", unit).removesuffix("\n")

    def loaded(self, units: Sequence[str], *names: str) -> list[dict[str, Any]]:
        """Properties of many units, as systemd has loaded them: two commands in all."""
        call = "busctl --json=short -- call org.freedesktop.systemd1"
        find = f"{call} /org/freedesktop/systemd1 org.freedesktop.systemd1.Manager LoadUnit s"
        said = self.run("sh", "-c", f'for u; do {find} "$u" || exit; done', "sh", *units)
        paths = [json.loads(line)["data"][0] for line in said.splitlines()]
        ask = "org.freedesktop.DBus.Properties GetAll s ''"
        said = self.run("sh", "-c", f'for p; do {call} "$p" {ask} || exit; done', "sh", *paths)
        every = [json.loads(line)["data"][0] for line in said.splitlines()]
        return [{name: each[name]["data"] for name in names} for each in every]

    def clean(self) -> None:
        """Stop and remove everything."""
        if self._started:
            self.run("systemctl", "stop", *dict.fromkeys(self._started), check=False)
        # Of folders only those for drop-ins: systemd itself needs /run/systemd/system.
        script = """
for f; do
  rm -f -- "$f"
  case ${f%/*} in *.d) rmdir -- "${f%/*}" 2>/dev/null;; esac
done
:
"""
        for at in range(0, len(self._written), 200):
            self.run("sh", "-c", script, "sh", *self._written[at : at + 200])
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "reset-failed", check=False)
        self.host.close()
