"""A pair of lab hosts that serve: a real server process on each, in tmux, inside a scope."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from pytest_dsv41.hosts import CommandLog, Probe
from pytest_dsv41.hosts.scopes import end_scopes, live_scopes
from pytest_dsv41.hosts.ssh import SshHost
from pytest_dsv41.lifecycle.recover import look
from pytest_dsv41.targets import TargetContext, spark_pair_target
from pytest_dsv41.targets.spark_pair import SparkPairTarget
from pytest_dsv41.window.spec import load_spec
from tests.lab.lab import HOSTS, Lab
from tests.lifecycle.running import Ended

PRODUCTION_PORT = 8000
EXPERIMENT_PORT = 18001
HOLD = "/var/lib/dsv41/HOLD"

# The lab has no GPU. What it has answers as the tool does: a cap that took, and no process.
_NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
-lgc*) echo "GPU clocks set"; exit 0;;
--query-compute-apps*) exit 0;;
esac
exit 9
"""

_WINDOW = """\
target = "target.toml"

[window]
lane = "LAB"
name = "{name}"
hypothesis = "A shorter round saves 20 % of the time per round."
{design}
start_estimate_s = 1.0

[arms.control]
role = "control"
args = ["--round-ms", "2.0"]

[arms.fast]
role = "candidate"
args = ["--round-ms", "1.6"]

[[cells]]
name = "decode-b1"
primary = "ms_per_round"
estimated_s = 0.3

[limits]
item_s = 20
start_s = 30
stop_s = 10
watch_s = {watch_s}
quiet_s = 10
window_s = {window_s}
"""

_DECIDING = """\
schedule = "C/X/C"
repeats = {control = 2, fast = 3}
"""
# The shortest that has a control start, a candidate start and a way from one to the other.
_REPORT = """\
kind = "report"
schedule = "C/X"
repeats = 1
"""


def break_it(pair: Pair, fault: str, host: str) -> None:
    """Break one host, or `both`: partition, full disk, or reboot (it answers again at once)."""
    for name in HOSTS if host == "both" else (host,):
        if fault == "partition":
            pair.lab.cut(name)
        elif fault == "full disk":
            pair.lab.fill(name)
        else:
            pair.lab.crash(name)
    if fault == "reboot":
        pair.lab.mend()


class Pair:
    """Two lab hosts with production up, and a campaign's folder for windows on them."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.campaign = folder / "campaign"
        self.log = CommandLog(folder / "test-cmd", synced=False)
        self.hosts: dict[str, SshHost] = {name: lab.ssh(name, self.log) for name in HOSTS}
        for host in self.hosts.values():
            host.write("/usr/local/bin/nvidia-smi", _NVIDIA_SMI)
            host.run(["chmod", "755", "/usr/local/bin/nvidia-smi"], name="chmod", deadline_s=10.0)
        (folder / "target.toml").write_text(self._target_text())
        self.window = self.write_window("short")

    def write_window(
        self, name: str, *, deciding: bool = False, watch_s: float = 1.0, window_s: float = 180.0
    ) -> Path:
        """Write a window file and return its path."""
        path = self.folder / f"{name}.toml"
        text = _WINDOW.format(
            name=name,
            design=_DECIDING if deciding else _REPORT,
            watch_s=watch_s,
            window_s=window_s,
        )
        if deciding:
            text = text.replace("[[cells]]\n", "[[cells]]\ndecision = true\n")
        path.write_text(text)
        return path

    def _target_text(self) -> str:
        serve = [sys.executable, str(Path(__file__).with_name("serve.py")), "--port", "{port}"]
        quiet = ["--noise", "0.003"]
        hosts = "".join(
            f"[target.hosts.{name}]\n"
            f"address = {json.dumps(self.lab.address(name))}\nuser = 'root'\n"
            f"key = {json.dumps(str(self.lab.key))}\n"
            f"known_hosts = {json.dumps(str(self.lab.known_hosts))}\nconnect_s = 2\n"
            for name in HOSTS
        )
        production = [*serve, *quiet, "--round-ms", "2.0"]
        experiment = [*serve, *quiet, "--seed", "{seed}", "{args}"]
        return (
            '[target]\nkind = "spark-pair"\nengine = "vllm"\nmodel = "stub"\nclock = 2300\n'
            f'hold = "{HOLD}"\n{hosts}'
            f"[target.production]\nport = {PRODUCTION_PORT}\n"
            f"[target.production.command]\nalpha = {json.dumps(production)}\n"
            f"beta = {json.dumps(production)}\n"
            f"[target.experiment]\nport = {EXPERIMENT_PORT}\n"
            f"[target.experiment.command]\nalpha = {json.dumps(experiment)}\n"
            f"beta = {json.dumps(experiment)}\n"
        )

    # -- production ------------------------------------------------------------------------------

    def target(self) -> SparkPairTarget:
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
        return spark_pair_target(spec.target.table, context)

    def serve(self) -> None:
        """Bring production up."""
        self.target().start_production()

    def clean(self) -> None:
        """End everything of ours on both hosts, whoever left it there."""
        for host in self.hosts.values():
            end_scopes(host, live_scopes(host), name="clean")
            host.run(["/usr/bin/tmux", "kill-server"], name="clean", deadline_s=10.0, check=False)
            host.run(["rm", "-rf", str(Path(HOLD).parent)], name="clean", deadline_s=10.0)
            host.close()

    # -- windows ---------------------------------------------------------------------------------

    def argv(self, *words: str, window: Path | None = None) -> list[str]:
        """The command line of a window in a process of its own."""
        return [
            *(sys.executable, "-m", "pytest", f"--window={window or self.window}"),
            *(f"--window-out={self.campaign}", f"--rootdir={self.folder}"),
            *("-p", "no:cacheprovider", "-p", "no:randomly", *words),
        ]

    def start(
        self,
        *words: str,
        window: Path | None = None,
        at: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[str]:
        """Start a window in a process of its own; `at`, it waits for `go` (see lab_fault)."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | dict(env)
        if at:
            words = ("-p", "lab_fault", *words)
            kept |= {"LAB_FAULT_AT": at, "LAB_FAULT_FOLDER": str(self.folder)}
            kept["PYTHONPATH"] = str(Path(__file__).parent)
            for name in ("reached", "go"):
                (self.folder / name).unlink(missing_ok=True)
        self.campaign.mkdir(exist_ok=True)
        return subprocess.Popen(
            self.argv(*words, window=window),
            cwd=self.folder,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        *words: str,
        window: Path | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
        patience_s: float = 300.0,
    ) -> Ended:
        """Run a window to its end."""
        with self.start(*words, window=window, env=env) as process:
            output, _ = process.communicate(timeout=patience_s)
        return Ended(process.returncode, output, self.campaign)

    def reached(self, process: subprocess.Popen[str]) -> None:
        """Wait until the window stands at its step."""
        while not (self.folder / "reached").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)

    def go(self) -> None:
        """Let the window go on."""
        (self.folder / "go").touch()

    def keepers_end(self) -> None:
        """Wait until no keeper lives."""
        _, alive = psutil.wait_procs(self.keepers(), timeout=240.0)
        assert not alive, "a keeper did not end"

    def settle(self) -> list[str]:
        """Follow the next command that `dsv41 status` names until it says CLEAN; those it named."""
        followed: list[str] = []
        while (facts := self.status())["answer"] != "CLEAN":
            command = shlex.split(facts["command"])
            assert command[:1] == ["dsv41"], facts
            assert len(followed) < 3, (followed, facts)
            followed.append(command[1])
            if command[1] == "recover":
                done = self.dsv41("recover")
                followed.append(f"exit {done.returncode}")
        return followed

    def dsv41(
        self, *words: str, env: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the project on the campaign."""
        return subprocess.run(
            [sys.executable, "-m", "pytest_dsv41", *words, "--campaign", str(self.campaign)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300.0,
            env={**os.environ, **env},
        )

    def status(self) -> dict[str, Any]:
        """What `dsv41 status --json` says, without a process for each look."""
        return look(self.campaign).to_json()

    def keepers(self) -> list[psutil.Process]:
        """Keepers of this campaign that live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "keeper" in words and any(w.startswith(str(self.campaign)) for w in words):
                    found.append(process)
        return found

    # -- what must hold ----------------------------------------------------------------------------

    def assert_serving_and_nothing_left(self) -> None:
        """Production answers; no scope, tmux session, HOLD, marker or intent is left."""
        assert self.target().probe().state is Probe.UP
        for host in self.hosts.values():
            assert (host.name, live_scopes(host)) == (host.name, ["dsv41-production.scope"])
            assert host.read(HOLD) is None
            titles = [p.argv[0] for p in host.processes() if p.argv]
            assert not [title for title in titles if "DSV41-OFFLOAD hold" in title]
        assert not (self.campaign / "intent.json").exists()
        assert not (self.campaign / "marker.json").exists()
        assert self.keepers() == []
        assert self.status()["answer"] == "CLEAN"
