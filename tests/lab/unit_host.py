"""A lab host on which a systemd unit serves, by an environment file that a script sources.

The script prints what a server prints about its memory as it starts, in llama.cpp's words, and
becomes the embedded stub: a stand-in whose argv, environment and ledger follow from the file.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Self

from pytest_dsv41.hosts import CommandLog, Probe
from pytest_dsv41.hosts.ssh import SshHost
from pytest_dsv41.targets import TargetContext, systemd_unit_target
from pytest_dsv41.targets.systemd_unit import SystemdUnitTarget
from pytest_dsv41.window.spec import load_spec
from tests.lab.lab import Lab
from tests.lab.pair import HOLD, Pair

UNIT = "served.service"
ENV_FILE = "/etc/serve/serve.env"
DROP_IN = f"/run/systemd/system/{UNIT}.d/zzzz-dsv41.conf"
CANARY = "canary-2f6c1d"

ENVIRONMENT = f"""\
# The shape that is served.
ROUND_MS=2.0
KV_TYPE=f16
CTX=4096
SERVE_TOKEN={CANARY}
"""

_SCRIPT = """\
#!/bin/sh
set -eu
. "$SERVE_ENV_FILE"
case $KV_TYPE in
  f16) half=5.00 whole=10.00;;
  q8_0) half=2.66 whole=5.31;;
  *) echo "serve: KV_TYPE=$KV_TYPE is none of f16, q8_0" >&2; exit 1;;
esac
echo "llama_context: n_ctx         = $CTX"
echo "llama_kv_cache: size = $whole MiB ($CTX cells,   3 layers,  2/2 seqs), \
K ($KV_TYPE): $half MiB, V ($KV_TYPE): $half MiB"
exec {stub} --port 8000 --engine llamacpp --model lab --noise 0.003 --round-ms "$ROUND_MS"
"""

# A lab host has an overlay for its root, a kernel without a keyring of its own, and no controllers.
_STORAGE = """\
[storage]
driver = "vfs"
graphroot = "/var/lib/lab-containers"
runroot = "/run/lab-containers"
"""
_CONTAINERS = """\
[containers]
keyring = false
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

_SUDO = """\
#!/bin/sh
[ "$1" = -n ] && [ "$2" = -- ] || { echo "sudo: a password is required" >&2; exit 1; }
shift 2
echo "$1" >> /run/sudo.log
exec "$@"
"""

_UNIT = """\
[Unit]
Description=The lab's server

[Service]
Environment=SERVE_ENV_FILE=/etc/serve/serve.env
ExecStart=/etc/serve/serve.sh
Restart=always
RestartSec=0.1
StartLimitBurst=1000

[Install]
WantedBy=multi-user.target
"""

_WINDOW = """\
target = "target.toml"

[window]
lane = "UNIT"
name = "{name}"
hypothesis = "A shorter round saves 20 % of the time per round."
schedule = "C/X/C"
repeats = {{control = 2, fast = 3}}
start_estimate_s = 2.0

[arms.control]
role = "control"
[arms.control.settings]
flags = {{"--round-ms" = "2.0"}}
ledger = {{"kv K dtype" = "f16"}}

[arms.fast]
role = "candidate"
env = {{{env}}}
[arms.fast.settings]
{settings}

[[cells]]
name = "decode-b1"
decision = true
primary = "ms_per_round"
estimated_s = 0.3

[[claims]]
text = "A fifth of the time per round goes."
cell = "decode-b1"
to_arm = "fast"
direction = "down"
threshold = 0.1

[[claims]]
text = "The round stays as it is."
cell = "decode-b1"
to_arm = "fast"
direction = "flat"
threshold = 0.05

[noise]
ms_per_round = 0.02

[limits]
item_s = 20
start_s = {start_s}
stop_s = 10
watch_s = {watch_s}
quiet_s = 10
window_s = 180
"""

_LLAMA_WINDOW = """\
target = "target.toml"

[window]
lane = "UNIT"
name = "{name}"
hypothesis = "A quantised cache of keys and values costs no decode tokens per second."
schedule = "C/X/C"
repeats = {control = 2, small = 3}
start_estimate_s = 5

[arms.control]
role = "control"
speculation = false
[arms.control.settings]
flags = {"--cache-type-k" = "f16", "--cache-type-v" = "f16", "-c" = "2048"}
ledger = {"kv K dtype" = "f16", "kv V dtype" = "f16"}

[arms.small]
role = "candidate"
env = {KV_TYPE = "q8_0"}
speculation = false
[arms.small.settings]
flags = {"--cache-type-k" = "q8_0", "--cache-type-v" = "q8_0", "-c" = "2048"}
ledger = {"kv K dtype" = "q8_0", "kv V dtype" = "q8_0"}

[[cells]]
name = "decode-b1"
decision = true
primary = "decode_tok_s"

[[claims]]
text = "The smaller cache costs no more than a tenth."
cell = "decode-b1"
to_arm = "small"
direction = "flat"
threshold = 0.1

[limits]
item_s = 180
start_s = 180
stop_s = 30
watch_s = 5
quiet_s = 30
window_s = 1200
"""

FAST = 'ROUND_MS = "1.6", KV_TYPE = "q8_0"'
SHOWN = 'flags = {"--round-ms" = "1.6"}\nledger = {"kv K dtype" = "q8_0"}'


class UnitHost(Pair):
    """`alpha` serves a unit; windows on it run from the lab's own network."""

    environment = ENVIRONMENT
    unit_file = _UNIT
    model = "lab"
    named = 'env_var = "SERVE_ENV_FILE"'
    systemctl: tuple[str, ...] = ("systemctl",)
    units = "/etc/systemd/system"
    running = "/run"

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.campaign = folder / "campaign"
        self.log = CommandLog(folder / "test-cmd", synced=False)
        self.host: SshHost = lab.ssh("alpha", self.log)
        self.hosts = {"alpha": self.host}
        serve = [sys.executable, str(Path(__file__).with_name("serve.py"))]
        self.host.write("/etc/serve/serve.sh", _SCRIPT.replace("{stub}", shlex.join(serve)))
        self.run_on_host("chmod", "755", "/etc/serve/serve.sh")
        self.host.write(ENV_FILE, self.environment)
        self.host.write(f"{self.units}/{UNIT}", self.unit_file)
        (folder / "target.toml").write_text(self._target_text())
        self.window = self.write_window("kv")

    def __enter__(self) -> Self:
        """Let the unit serve."""
        try:
            self.serve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        """Undo every fault, and take away whatever a test has left."""
        self.lab.mend()
        self.clean()

    @property
    def drop_in(self) -> str:
        """Where a start's drop-in lies."""
        return f"{self.running}/systemd/{Path(self.units).name}/{UNIT}.d/zzzz-dsv41.conf"

    def run_on_host(self, *argv: str, check: bool = True) -> str:
        """Run a command on the host; its output."""
        return self.host.run(argv, name="test", deadline_s=30.0, check=check).stdout

    def write_window(  # type: ignore[override]
        self,
        name: str,
        *,
        env: str = FAST,
        settings: str = SHOWN,
        watch_s: float = 1.0,
        start_s: float = 30.0,
    ) -> Path:
        """Write a window file and return its path."""
        path = self.folder / f"{name}.toml"
        path.write_text(
            _WINDOW.format(name=name, env=env, settings=settings, watch_s=watch_s, start_s=start_s)
        )
        return path

    def write_short(self, name: str, **changes: Any) -> Path:
        """A window for faults: as short as the server's own times make worth while."""
        return self.write_window(name, **changes)

    def _target_text(self) -> str:
        return (
            f'[target]\nkind = "systemd-unit"\nengine = "llamacpp"\nmodel = "{self.model}"\n'
            f'unit = "{UNIT}"\nenv_file = "{ENV_FILE}"\n{self.named}\nport = 8000\n'
            f'hold = "{HOLD}"\n'
            "[target.host]\nname = 'alpha'\n"
            f"address = {json.dumps(self.lab.address('alpha'))}\nuser = 'root'\n"
            f"key = {json.dumps(str(self.lab.key))}\n"
            f"known_hosts = {json.dumps(str(self.lab.known_hosts))}\nconnect_s = 2\n"
        )

    def target(self) -> SystemdUnitTarget:  # type: ignore[override]
        """The target as a look from outside builds it."""
        spec = load_spec(str(self.window))
        context = TargetContext(
            window_id="outside",
            folder=self.folder,
            campaign=self.campaign,
            base=self.folder,
            seed=0,
            limits={"start_s": 30.0, "stop_s": 10.0},
            state={},
            variables={},
            log=self.log,
            pause=time.sleep,
        )
        return systemd_unit_target(spec.target.table, context)

    def serve(self) -> None:
        """Enable the unit, and wait until it serves."""
        self.run_on_host(*self.systemctl, "daemon-reload")
        self.run_on_host(*self.systemctl, "enable", "--now", UNIT)
        self.until_up()
        self.shape = self.target().capture()

    def until_up(self) -> None:
        """Wait until the unit serves its own shape."""
        target = self.target()
        limit = time.monotonic() + 120.0
        while (seen := target.probe()).state is not Probe.UP:
            assert time.monotonic() < limit, seen.detail
            time.sleep(0.05)

    def clean(self) -> None:
        """Take the unit and everything of ours off the host."""
        self.run_on_host("mount", "-o", "remount,size=64m", "/run", check=False)
        self.run_on_host(*self.systemctl, "disable", "--now", UNIT, check=False)
        for path in (
            *(str(Path(self.drop_in).parent), f"{self.units}/{UNIT}.d", f"{self.running}/dsv41"),
            *("/etc/serve", f"{self.units}/{UNIT}", str(Path(HOLD).parent)),
        ):
            self.run_on_host("rm", "-rf", path)
        self.run_on_host(*self.systemctl, "daemon-reload")
        self.host.close()

    def assert_serving_and_nothing_left(self) -> None:
        """The unit serves its own shape, every byte of it; nothing of a window is left."""
        target = self.target()
        assert target.probe().state is Probe.UP, target.probe().detail
        now = target.capture()
        assert now == self.shape
        assert self.host.read(ENV_FILE) == self.environment.encode()
        assert self.host.read(self.drop_in) is None
        assert self.run_on_host("find", f"{self.running}/dsv41", "-type", "f", check=False) == ""
        assert self.host.read(HOLD) is None
        assert not (self.campaign / "intent.json").exists()
        assert self.keepers() == []
        assert self.status()["answer"] == "CLEAN"
        self.assert_no_canary()

    def assert_no_canary(self) -> None:
        """No artefact shows a value of the server's environment."""
        for path in self.campaign.rglob("*"):
            if path.is_file():
                assert CANARY.encode() not in path.read_bytes(), path

    def proofs(self, folder: Path) -> dict[str, dict[str, Any]]:
        """What each start of a window was proved to be."""
        lines = [json.loads(x) for x in (folder / "unit.jsonl").read_text().splitlines()]
        return {line["start"]: line for line in lines if line["event"] == "proved"}


class SudoUnit(UnitHost):
    """Everything is done through a `sudo` that takes exactly `-n --`, and says what it ran."""

    named = f"{UnitHost.named}\nsudo = true"

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.host.write("/usr/local/bin/sudo", _SUDO)
        self.run_on_host("chmod", "755", "/usr/local/bin/sudo")

    def clean(self) -> None:
        """Take the sudo away too."""
        self.run_on_host("rm", "-f", "/usr/local/bin/sudo", "/run/sudo.log")
        super().clean()


class UserUnit(UnitHost):
    """The unit is one of the login's own manager."""

    named = f'{UnitHost.named}\nmanager = "user"'
    unit_file = _UNIT.replace("multi-user.target", "default.target")
    systemctl = ("systemctl", "--user")
    units = "/etc/systemd/user"
    running = "/run/user/0"


_CONTAINED = """\
#!/bin/sh
set -eu
. "$SERVE_ENV_FILE"
case $KV_TYPE in
  f16|q8_0) ;;
  *) echo "serve: KV_TYPE=$KV_TYPE is none of f16, q8_0" >&2; exit 1;;
esac
exec podman run --rm --replace --name served --network host --cgroups disabled \\
  --env KV_TYPE="$KV_TYPE" --env CTX="$CTX" --rootfs /srv/root \\
  /etc/serve/inside.sh --round-ms "$ROUND_MS" --kv-type "$KV_TYPE"
"""


class PodmanUnit(UnitHost):
    """The server runs in a container, whose root is the host's own; the unit runs `podman run`."""

    named = f'{UnitHost.named}\nruntime = "podman"\ncontainer = "served"'

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.host.write("/etc/containers/storage.conf", _STORAGE)
        self.host.write("/etc/containers/containers.conf", _CONTAINERS)
        self.run_on_host("mkdir", "-p", "/srv/root")
        self.run_on_host("mount", "--rbind", "/", "/srv/root")
        # What is unmounted there later stays mounted on the host.
        self.run_on_host("mount", "--make-rslave", "/srv/root")
        # In the container: the ledger's lines, then the server with the flags it was given.
        text = self.host.read("/etc/serve/serve.sh") or b""
        inside = text.decode().replace('. "$SERVE_ENV_FILE"\n', "")
        inside = inside.replace('--round-ms "$ROUND_MS"', '--round-ms "$2"')
        self.host.write("/etc/serve/inside.sh", inside)
        self.host.write("/etc/serve/serve.sh", _CONTAINED)
        self.run_on_host("chmod", "755", "/etc/serve/inside.sh", "/etc/serve/serve.sh")

    def cannot_contain(self) -> str:
        """Why no container can run on this kernel, in podman's words; empty when one can."""
        argv = ["podman", "run", "--rm", "--network", "host", "--cgroups", "disabled"]
        argv += ["--rootfs", "/srv/root", "/bin/true"]
        done = self.host.run(argv, name="test", deadline_s=60.0, check=False)
        return done.stderr.strip() if done.returncode else ""

    def clean(self) -> None:
        """Take container and mounts away too."""
        self.run_on_host("podman", "rm", "--force", "--ignore", "served", check=False)
        self.run_on_host("umount", "--recursive", "--lazy", "/srv/root", check=False)
        super().clean()


class LlamaHost(UnitHost):
    """The unit is llama.cpp's own server, given its file by EnvironmentFile= alone."""

    model = "gemma"
    named = ""
    environment = f"# The shape that is served.\nKV_TYPE=f16\nCTX=2048\nSERVE_TOKEN={CANARY}\n"

    def __init__(self, lab: Lab, folder: Path, server: str, model: str) -> None:
        self.unit_file = (
            "[Service]\nEnvironmentFile=/etc/serve/serve.env\n"
            f"Environment=LD_LIBRARY_PATH={Path(server).parent}\n"
            f"ExecStart={server} -m {model} --alias gemma --host 0.0.0.0 --port 8000 --metrics "
            "--slots -np 1 -t 1 -tb 1 --no-webui -fa on -lv 4 -c ${CTX} "
            "--cache-type-k ${KV_TYPE} --cache-type-v ${KV_TYPE}\n"
            "Restart=always\n[Install]\nWantedBy=multi-user.target\n"
        )
        super().__init__(lab, folder)

    def write_window(self, name: str, *, env: str = "", **_changes: Any) -> Path:
        """Write a window of f16 against q8_0, or against another environment."""
        path = self.folder / f"{name}.toml"
        text = _LLAMA_WINDOW.replace("{name}", name)
        path.write_text(text.replace('KV_TYPE = "q8_0"', env) if env else text)
        return path

    def write_short(self, name: str, **changes: Any) -> Path:
        """A window that decides nothing and starts its candidate first."""
        path = self.write_window(name, **changes)
        text = path.read_text().replace('"C/X/C"', '"X/C"').replace("decision = true\n", "")
        path.write_text(text.replace("{control = 2, small = 3}", "1"))
        return path
