"""Brings two real hosts up, breaks them in real ways, and takes them down without a trace.

Each host has systemd as PID 1, a `systemd --user`, sshd, a network namespace and a disk of its own
(a small tmpfs that outlives its reboots). They are seen from the lab's own network namespace only,
which has no route to anywhere else: a cut link must not send packets out by another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_dsv41.errors import CommandFailed, TransportError
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.ssh import SshHost

INSTALL = (
    "apt-get update && apt-get install -y --no-install-recommends openssh-server "
    "systemd-container nftables iproute2 tmux dbus-user-session libpam-systemd"
)
HOSTS = ("alpha", "beta")
_TOOLS = ("systemd-nspawn", "sshd", "ssh-keygen", "ip", "tmux", "nsenter", "unshare", "dbus-daemon")
_CLONE_NEWNET = 0x40000000
_PREFIX = "dsv41lab-"


def missing() -> str:
    """Why no lab can be brought up here, with the command that helps; empty when it can."""
    if os.geteuid() != 0:
        return "the lab hosts need root (namespaces, overlay mounts)"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the lab hosts need {', '.join(absent)}: {INSTALL}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the lab hosts need overlayfs in the kernel"
    if _cgroups() is None:
        return "the lab hosts need a mounted cgroup v2"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "the lab hosts need mount namespaces, which this container forbids"
    return ""


def _cgroups() -> Path | None:
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (folder / "cgroup.controllers").exists():
            return folder
    return None


def _hidden(path: Path) -> bool:
    """Whether a host, which sees this machine's root file system, does not see `path`."""
    mounted_over = any(path.is_relative_to(folder) for folder in ("/tmp", "/run", "/root"))
    return mounted_over or path.stat().st_dev != Path("/").stat().st_dev


def _do(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


def sweep() -> None:
    """Take down what a killed test run has left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        name = line.split()[0]
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name == f"{_PREFIX}{pid}" and not Path(f"/proc/{pid}").exists():
            Lab(int(pid)).down()


class Lab:
    """Two hosts, `alpha` and `beta`, of the process `number`.

    `folder` holds keys, disks and the consoles' output.
    """

    def __init__(self, number: int) -> None:
        self.network = f"{_PREFIX}{number}"
        self.folder = Path("/run") / self.network
        root = _cgroups()
        assert root is not None
        self._cgroups = root
        self.key = self.folder / "client"
        self.known_hosts = self.folder / "known_hosts"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._broken: set[str] = set()

    # -- up and down -------------------------------------------------------------------------------

    def up(self) -> None:
        """Bring both hosts up and wait until they answer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("client", *(f"{host}.hostkey" for host in HOSTS)):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        lines = []
        for host in HOSTS:
            kind, key, *_ = (self.folder / f"{host}.hostkey.pub").read_text().split()
            lines.append(f"{self.address(host)} {kind} {key}\n")
        self.known_hosts.write_text("".join(lines))
        _do("ip", "netns", "add", self.network)
        inside = ("ip", "-n", self.network)
        _do(*inside, "link", "set", "lo", "up")
        _do(*inside, "link", "add", "br0", "type", "bridge")
        _do(*inside, "addr", "add", "10.77.9.1/24", "dev", "br0")
        _do(*inside, "link", "set", "br0", "up")
        for host in HOSTS:
            far = self.namespace(host)
            _do("ip", "netns", "add", far)
            _do(*inside, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", far)
            _do(*inside, "link", "set", host, "master", "br0", "up")
            _do("ip", "-n", far, "link", "set", "lo", "up")
            _do("ip", "-n", far, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _do("ip", "-n", far, "link", "set", "eth0", "up")
            disk = self.folder / f"{host}.disk"
            disk.mkdir()
            _do("mount", "-t", "tmpfs", "-o", "size=64m", "dsv41lab", str(disk))
        for host in HOSTS:
            self.boot(host)
        for host in HOSTS:
            self.wait(host)

    def down(self) -> None:
        """Take everything down; whatever is missing already is fine."""
        for host in HOSTS:
            with contextlib.suppress(OSError):
                self.thaw(host)
            self.crash(host)
            with contextlib.suppress(subprocess.CalledProcessError):
                _do("umount", str(self.folder / f"{host}.disk"))
            with contextlib.suppress(subprocess.CalledProcessError):
                _do("ip", "netns", "del", self.namespace(host))
        with contextlib.suppress(subprocess.CalledProcessError):
            _do("ip", "netns", "del", self.network)
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host: str) -> str:
        """The host's address, reachable from inside the lab's network alone."""
        return f"10.77.9.{HOSTS.index(host) + 2}"

    def namespace(self, host: str) -> str:
        """The network namespace of a host."""
        return f"{self.network}-{host}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Put this thread, and the threads and processes it starts, into the lab's network."""
        with (
            Path("/proc/thread-self/ns/net").open("rb") as before,
            Path(f"/run/netns/{self.network}").open("rb") as lab,
        ):
            _setns(lab.fileno())
            try:
                yield
            finally:
                _setns(before.fileno())

    def ssh(self, host: str, log: CommandLog, *, connect_s: float = 5.0) -> SshHost:
        """The host as the project reaches it; to be used inside `entered`."""
        return SshHost(
            host,
            self.address(host),
            log,
            user="root",
            key=self.key,
            known_hosts=self.known_hosts,
            connect_s=connect_s,
        )

    def wait(self, host: str) -> None:
        """Wait until the host answers and its `systemd --user` runs."""
        log = CommandLog(self.folder / "wait")
        limit = time.monotonic() + 60.0
        with self.entered():
            link = self.ssh(host, log, connect_s=1.0)
            try:
                while True:
                    try:
                        link.run(
                            ["systemctl", "--user", "show", "-P", "Version"],
                            name=f"{host}-ready",
                            deadline_s=3.0,
                        )
                        return
                    except (CommandFailed, TransportError):
                        if time.monotonic() > limit:
                            raise RuntimeError(
                                f"{host} did not come up: {self.console(host)[-2000:]}"
                            ) from None
                        time.sleep(0.05)
            finally:
                link.close()

    def console(self, host: str) -> str:
        """What the host wrote while it booted."""
        return (self.folder / f"{host}.console").read_text("utf-8", "replace")

    # -- faults ------------------------------------------------------------------------------------

    def boot(self, host: str) -> None:
        """Switch the host on; its disk is the one it had."""
        group = self._cgroups / self.namespace(host)
        group.mkdir(exist_ok=True)
        root = Path(__file__).resolve().parents[2]
        needed = [root, Path(sys.prefix), Path(sys.base_prefix), self.folder]
        # A real engine's program and model, where the tests are given one.
        given = (os.environ.get(name) for name in ("LLAMA_SERVER", "LLAMA_MODEL"))
        needed += [Path(path).parent for path in given if path and Path(path).exists()]
        needed += [path for path in map(Path, sys.path) if path.is_absolute() and path.is_dir()]
        bound = sorted({str(path) for path in needed if _hidden(path)})
        with (self.folder / f"{host}.console").open("ab") as console:
            self._processes[host] = subprocess.Popen(
                [
                    "bash",
                    str(Path(__file__).with_name("host.sh")),
                    host,
                    self.namespace(host),
                    str(self.folder / f"{host}.disk"),
                    str(self.folder),
                    str(group),
                    *bound,
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def crash(self, host: str) -> None:
        """Kill everything on the host at once."""
        self._broken.add(host)
        group = self._cgroups / self.namespace(host)
        if not group.exists():
            return
        (group / "cgroup.kill").write_text("1")
        while "populated 1" in (group / "cgroup.events").read_text():
            time.sleep(0.005)
        if host in self._processes:
            self._processes.pop(host).wait()
        for folder in sorted(group.rglob("*/"), key=lambda path: -len(path.parts)):
            folder.rmdir()
        group.rmdir()

    def reboot(self, host: str) -> None:
        """Crash and boot; returns when the host answers again."""
        self.crash(host)
        self.boot(host)
        self.wait(host)

    def cut(self, host: str) -> None:
        """Cut the host's link: silence, no refusal."""
        self._broken.add(host)
        _do("ip", "-n", self.network, "link", "set", host, "down")

    def join(self, host: str) -> None:
        """Join the link again."""
        _do("ip", "-n", self.network, "link", "set", host, "up")

    def power_loss(self, host: str) -> None:
        """The host is gone and nobody says so: the link goes first."""
        self.cut(host)
        self.crash(host)

    def freeze(self, host: str) -> None:
        """Stop every process of the host: TCP connects, nothing answers."""
        self._broken.add(host)
        (self._cgroups / self.namespace(host) / "cgroup.freeze").write_text("1")

    def thaw(self, host: str) -> None:
        """Let them run on."""
        (self._cgroups / self.namespace(host) / "cgroup.freeze").write_text("0")

    def mend(self) -> None:
        """Undo every fault: links joined, hosts thawed, and on."""
        broken, self._broken = sorted(self._broken), set()
        for host in broken:
            self._ballast(host).unlink(missing_ok=True)
            self.join(host)
            if host in self._processes:
                self.thaw(host)
            else:
                self.boot(host)
        for host in broken:
            self.wait(host)

    def fill(self, host: str) -> None:
        """Fill the host's disk to its last byte."""
        self._broken.add(host)
        with contextlib.suppress(OSError), self._ballast(host).open("wb") as file:
            while True:
                file.write(b"x" * 65536)
                file.flush()

    def _ballast(self, host: str) -> Path:
        return self.folder / f"{host}.disk" / "ballast"

    def reset_links(self, host: str) -> None:
        """Kill the ssh sessions of the host: the connection is reset, its commands live on."""
        for found in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ProcessLookupError):
                title = (found / "cmdline").read_bytes()
                group = (found / "cgroup").read_text()
                if title.startswith(b"sshd: root") and f"/{self.namespace(host)}/" in group:
                    os.kill(int(found.name), signal.SIGKILL)


def _setns(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


__all__ = ["HOSTS", "INSTALL", "Lab", "missing", "sweep"]
