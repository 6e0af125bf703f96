"""Target spark-pair on simulated hosts: down and back, starts in scopes, and what refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.errors import RefusedByWorld, SpecError, StaleEpoch, StartFailed, TransportError
from pytest_dsv41.hosts import CommandLog, Placeholder, Probe
from pytest_dsv41.hosts.fake import FAULTS, Call, Container, FakeHost, FakeWorld, Reply, Service
from pytest_dsv41.hosts.tmux import START
from pytest_dsv41.targets import Arm, Target, TargetContext, spark_pair_target
from pytest_dsv41.targets.spark_pair import SparkPairTarget

OWNER = "chain-20260101T000000Z-0123abcd"
FILE = "/etc/dsv41/env"
ARM = Arm("fast", "candidate", args=("--speculative-config", '{"method": "ngram"}'))

TABLE: dict[str, Any] = {
    "kind": "spark-pair",
    "model": "tiny",
    "world": "world",
    "clock": 2300,
    "hosts": {"alpha": {}, "beta": {}},
    "production": {
        "port": 8000,
        "health": ["curl", "-fsS", "http://127.0.0.1:{port}/health"],
        "command": {
            "alpha": ["vllm", "serve", "{model}", "--port", "{port}"],
            "beta": ["vllm", "serve", "{model}", "--headless", "--head", "{head}"],
        },
        "files": [FILE],
    },
    "experiment": {
        "port": 18001,
        "health": ["curl", "-fsS", "http://127.0.0.1:{port}/health"],
        "command": {
            "alpha": ["vllm", "serve", "{model}", "--port", "{port}", "{args}"],
            "beta": ["vllm", "serve", "{model}", "--headless", "{args}"],
        },
    },
}


class Pair:
    """A pair of hosts that serve, and a target of the window `window` on them."""

    def __init__(self, folder: Path, **world: Any) -> None:
        self.world = FakeWorld.create(folder / "world", seed=1, **world)
        self.log = CommandLog(folder / "cmd")
        self.alpha, self.beta = (FakeHost(self.world, n, self.log) for n in self.world.names())
        self.context = TargetContext(
            window_id="LANE-pair-W-20260101T000000Z",
            folder=folder,
            campaign=folder / "campaign",
            base=folder,
            seed=7,
            limits={"start_s": 20.0, "stop_s": 2.0, "window_s": 600.0},
            state={},
            variables={},
            log=self.log,
            pause=lambda _seconds: time.sleep(0.001),
            epoch=5,
        )
        for host in (self.alpha, self.beta):
            host.write(FILE, f"GPU_CLOCK_CAP=2300 # {host.name}\n")

    def target(self, epoch: int = 5, **changes: Any) -> SparkPairTarget:
        context = dataclasses.replace(self.context, epoch=epoch)
        return spark_pair_target({**TABLE, **changes}, context)

    def serve(self) -> SparkPairTarget:
        target = self.target()
        target.start_production()
        return target

    def argv(self, host: str) -> list[list[str]]:
        found = self.world.machine(host).processes.values()
        return [process.argv for process in found if process.argv[0] == "vllm"]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_it_is_a_target_that_holds_and_chains(pair: Pair) -> None:
    target = pair.target()
    assert isinstance(target, Target)
    assert (target.holds, target.ephemeral, target.chains) == (True, False, True)
    assert [site.path for site in target.hold_sites()] == ["/var/lib/dsv41/HOLD"] * 2
    assert list(target.identities()) == ["alpha", "beta"]
    assert target.commit() == pair.target(epoch=9).commit()


def test_production_goes_down_and_comes_back_on_both_hosts(pair: Pair) -> None:
    target = pair.serve()
    assert target.probe().state is Probe.UP
    before = {host: pair.argv(host) for host in ("alpha", "beta")}
    assert before["beta"] == [
        ["vllm", "serve", "tiny", "--headless", "--head", pair.world.machine("alpha").address]
    ]
    target.hold_opened()
    target.hold_opened()
    assert target.probe().state is Probe.UP
    target.stop_production()
    target.stop_production()
    assert target.probe().state is Probe.DOWN
    assert target.quiet_problems() == []
    # The window's own placeholder holds both hosts from the HOLD on.
    for host in (pair.alpha, pair.beta):
        assert ("vllm serve [DSV41-OFFLOAD hold]",) in [p.argv for p in host.processes()]
    assert len(target.leftovers()) == 2
    target.stop_all()
    assert target.leftovers() == []
    target.start_production()
    target.start_production()
    assert {host: pair.argv(host) for host in ("alpha", "beta")} == before
    assert target.probe().state is Probe.UP


def test_a_start_runs_in_scopes_of_its_own_and_ends_whole(pair: Pair) -> None:
    target = pair.serve()
    target.stop_production()
    started = target.start_arm("X", ARM)
    assert started.clock_cap == dataclasses.replace(started.clock_cap, mhz=2300, source="start-log")
    assert started.endpoint.url == f"http://{pair.world.machine('alpha').address}:18001"
    scope = "dsv41w-LANE-pair-W-20260101T000000Z-5-X.scope"
    for host in ("alpha", "beta"):
        assert scope in pair.world.machine(host).scopes()
        assert pair.argv(host)[-1][-2:] == ["--speculative-config", '{"method": "ngram"}']
    assert target.check_arm("X") is None
    assert any("alpha: port 18001 is UP" in line for line in target.quiet_problems())
    assert target.live_experiments()[0] == f"alpha: {scope} lives"
    target.stop_arm("X")
    target.stop_arm("X")
    assert target.live_experiments() == []
    assert "X has ended on alpha" in str(target.check_arm("X"))


def test_another_process_finds_and_ends_what_a_killed_window_left(pair: Pair) -> None:
    """The epoch of whoever recovers is newer; the scopes are the window's of any epoch."""
    target = pair.serve()
    target.stop_production()
    target.start_arm("C1", ARM)
    heir = pair.target(epoch=6)
    heir.stop_all()
    assert heir.leftovers() == []
    with pytest.raises(StaleEpoch, match="has seen epoch 6, this is 5"):
        target.start_production()
    for act in (lambda: target.placeholders_up(OWNER), target.stop_production):
        with pytest.raises(StaleEpoch):
            act()
    heir.start_production()
    assert heir.probe().state is Probe.UP


def test_a_container_of_ours_is_a_live_experiment_though_no_scope_holds_it(pair: Pair) -> None:
    pair.serve()
    target = pair.target(label="dsv41")
    assert target.live_experiments() == []
    with pair.world.transaction() as state:
        state.machines["beta"].containers = [
            Container("worker", {"dsv41": "1"}),
            Container("somebody-elses", {"app": "x"}),
        ]
    assert target.live_experiments() == ["beta: container worker runs"]
    assert pair.target().live_experiments() == []


def test_another_windows_scopes_are_not_this_ones(pair: Pair) -> None:
    target = pair.serve()
    target.stop_production()
    longer = dataclasses.replace(pair.context, window_id=f"{pair.context.window_id}-2")
    other = spark_pair_target(TABLE, longer)
    other.start_arm("X", ARM)
    target.stop_all()
    assert other.check_arm("X") is None
    assert any("-2-5-X.scope holds a process" in line for line in target.quiet_problems())
    other.stop_all()


# -- the clock cap ----------------------------------------------------------------------------


def no_driver(_call: Call) -> Reply:
    return Reply(9, err="No devices were found\n")


def test_a_start_whose_clock_cannot_be_capped_is_refused_and_ended(tmp_path: Path) -> None:
    pair = Pair(tmp_path, programs={"nvidia-smi": f"{__name__}:no_driver"})
    target = pair.target()
    with pytest.raises(StartFailed, match=r"X-start: exit 9: No devices were found"):
        target.start_arm("X", ARM)
    assert target.leftovers() == []


def other_cap(call: Call) -> Reply:
    return Reply(out=f"{call.argv[1]} clock cap {2300 if call.argv[1] == 'alpha' else 2150} MHz\n")


def wrong_name(call: Call) -> Reply:
    return Reply(out="alpha clock cap 2300 MHz\n")


@pytest.mark.parametrize(
    ("says", "shown"),
    [("other_cap", "alpha 2300 MHz, beta 2150 MHz"), ("wrong_name", "alpha 2300 MHz, alpha 2300")],
)
def test_hosts_that_do_not_agree_on_the_cap_refuse_the_start(
    tmp_path: Path, says: str, shown: str
) -> None:
    (tmp_path / "start.sh").write_text("own start\n")
    pair = Pair(tmp_path, programs={"own start\n": f"{__name__}:{says}"})
    experiment = {**TABLE["experiment"], "start_script": "start.sh"}
    with pytest.raises(StartFailed, match=f"the clock cap is not proved: {shown}"):
        pair.target(experiment=experiment).start_arm("X", ARM)


def test_no_line_is_a_refused_start(tmp_path: Path) -> None:
    (tmp_path / "start.sh").write_text("own start\n")
    pair = Pair(tmp_path, programs={"own start\n": f"{__name__}:silent"})
    experiment = {**TABLE["experiment"], "start_script": "start.sh"}
    with pytest.raises(StartFailed, match="the clock cap is not proved: no line"):
        pair.target(experiment=experiment).start_arm("X", ARM)


def silent(_call: Call) -> Reply:
    return Reply()


def test_without_a_cap_in_the_table_none_is_set(pair: Pair) -> None:
    started = pair.target(clock=0).start_arm("X", ARM)
    assert (started.clock_cap.mhz, started.clock_cap.source) == (1, "none")


# -- capture and files ------------------------------------------------------------------------


def test_the_capture_holds_commands_and_files_with_their_sha256(pair: Pair) -> None:
    target = pair.serve()
    captured = json.loads(json.dumps(target.capture()))
    assert captured["argv"]["alpha"] == ["vllm", "serve", "tiny", "--port", "8000"]
    kept = captured["files"]["beta"][FILE]
    assert kept["sha256"] == hashlib.sha256(b"GPU_CLOCK_CAP=2300 # beta\n").hexdigest()


def test_what_runs_must_be_what_would_be_started(pair: Pair) -> None:
    pair.serve()
    changed = json.loads(json.dumps(TABLE["production"]))
    changed["command"]["beta"][-1] = "10.9.9.9"
    with pytest.raises(RefusedByWorld, match="beta: production does not run as the target would"):
        pair.target(production=changed).capture()


def test_production_that_could_not_be_stopped_is_refused_before_it_is_touched(
    pair: Pair, tmp_path: Path
) -> None:
    """It runs in a tmux session outside of the scope: ending the scope would not end it."""
    for host, words in TABLE["production"]["command"].items():
        address = pair.world.machine("alpha").address
        values = {"{model}": "tiny", "{port}": "8000", "{head}": address}
        argv = [values.get(word, word) for word in words]
        where = {"alpha": pair.alpha, "beta": pair.beta}[host]
        start = ["tmux", "new-session", "-d", "-s", "serve", "--", *argv]
        where.run(start, name="by-hand", deadline_s=5.0)
    with pytest.raises(RefusedByWorld, match=r"runs outside of dsv41-production.scope"):
        pair.target().capture()
    (tmp_path / "stop.sh").write_text("own stop\n")
    production = {**TABLE["production"], "stop_script": "stop.sh"}
    assert pair.target(production=production).capture()["argv"]["alpha"][0] == "vllm"


def stops(call: Call) -> Reply:
    for pane in call.machine.panes("default"):
        call.machine.kill(pane.pid)
    return Reply()


def test_a_stop_script_ends_what_lives_outside_of_the_scope(tmp_path: Path) -> None:
    (tmp_path / "stop.sh").write_text("own stop\n")
    (tmp_path / "start.sh").write_text("own start\n")
    programs = {"own stop\n": f"{__name__}:stops", "own start\n": f"{__name__}:starts_outside"}
    pair = Pair(tmp_path, programs=programs)
    scripts = {"start_script": "start.sh", "stop_script": "stop.sh"}
    tables = {kind: {**TABLE[kind], **scripts} for kind in ("production", "experiment")}
    target = pair.target(clock=0, **tables)
    target.start_production()
    target.stop_production()
    assert pair.argv("alpha") == []
    target.start_arm("X", ARM)
    assert target.check_arm("X") is None
    target.stop_all()
    assert target.live_experiments() == []
    assert pair.argv("alpha") == []


def starts_outside(call: Call) -> Reply:
    _, _, _, _, *command = call.args
    call.machine.start(["tmux"], socket="default")
    ports = (int(call.option("--port", "0")),)
    service = Service(ports=ports)
    call.machine.start(command, service, socket="default", session="serve")
    return Reply()


def test_changed_files_are_put_back_before_production_starts(pair: Pair) -> None:
    target = pair.serve()
    record = {"configuration": target.capture()}
    (pair.context.folder / "rollback.json").write_text(json.dumps(record))
    target.stop_production()
    pair.alpha.write(FILE, "GPU_CLOCK_CAP=2150\n")
    pair.beta.remove(FILE)
    target.stop_all()
    target.start_production()
    assert pair.alpha.read(FILE) == b"GPU_CLOCK_CAP=2300 # alpha\n"
    assert pair.beta.read(FILE) == b"GPU_CLOCK_CAP=2300 # beta\n"


def test_a_damaged_capture_starts_nothing(pair: Pair) -> None:
    target = pair.serve()
    record = {"configuration": target.capture()}
    record["configuration"]["files"]["alpha"][FILE]["base64"] = "AAAA"
    (pair.context.folder / "rollback.json").write_text(json.dumps(record))
    target.stop_production()
    with pytest.raises(StartFailed, match="sha256 does not fit"):
        target.start_production()
    assert pair.argv("alpha") == []


# -- what is not seen -------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["alpha", "beta"])
@pytest.mark.parametrize("fault", ["partition", "power-loss"])
def test_a_host_that_is_gone_is_unknown_and_never_quiet(pair: Pair, host: str, fault: str) -> None:
    target = pair.serve()
    target.stop_production()
    target.stop_all()
    pair.world.inject(fault, host)
    assert any(f"{host}: cannot tell" in line for line in target.quiet_problems())
    assert any(f"{host}: cannot tell" in line for line in target.live_experiments())
    expected = Probe.UNKNOWN if host == "alpha" else Probe.DOWN
    assert target.probe().state is expected
    assert target.placeholders(OWNER)[host] is Placeholder.UNKNOWN
    with pytest.raises(TransportError):
        target.start_production()
    with pytest.raises(TransportError):
        target.identities()


def test_what_one_host_can_end_is_ended_though_the_other_is_gone(pair: Pair) -> None:
    target = pair.serve()
    target.stop_production()
    target.start_arm("X", ARM)
    pair.world.inject("partition", "alpha")
    with pytest.raises(TransportError):
        target.stop_all()
    assert pair.world.machine("beta").scopes() == []
    # The host that nobody reaches ends its scopes itself when the window's time is over.
    pair.world.advance(3600.0)
    assert pair.world.machine("alpha").scopes() == []


def test_half_a_production_is_started_anew(pair: Pair) -> None:
    target = pair.serve()
    pair.world.inject("reboot", "beta")
    with pair.world.transaction() as state:
        machine = state.machines["alpha"]
        for process in machine.processes.values():
            process.ports = []
    target.start_production()
    assert len(pair.argv("alpha")) == len(pair.argv("beta")) == 1
    assert target.probe().state is Probe.UP


def test_a_head_that_still_answers_is_not_the_whole_of_production(pair: Pair) -> None:
    target = pair.serve()
    (before,) = pair.argv("alpha")
    pair.world.inject("reboot", "beta")
    assert target.probe().state is Probe.UP
    assert pair.argv("beta") == []
    target.start_production()
    assert pair.argv("alpha") == [before]
    assert len(pair.argv("beta")) == 1


def test_a_server_that_dies_at_once_says_its_last_line(tmp_path: Path) -> None:
    pair = Pair(tmp_path, programs={"vllm": f"{__name__}:dies"})
    target = pair.target()
    with pytest.raises(StartFailed, match=r"ended at once; its last line: CUDA out of memory"):
        target.start_arm("X", ARM)
    assert target.leftovers() == []


def dies(_call: Call) -> Reply:
    return Reply(1, err="loading\nCUDA out of memory\n")


# -- placeholders -----------------------------------------------------------------------------


def test_the_chains_placeholders_go_up_and_down_on_both_hosts(pair: Pair) -> None:
    target = pair.serve()
    target.stop_production()
    target.placeholders_up(OWNER)
    target.stop_all()
    up = dict.fromkeys(("alpha", "beta"), Placeholder.UP)
    assert target.placeholders(OWNER) == up
    pair.world.inject("partition", "beta")
    [left] = target.placeholders_down(OWNER)
    assert left.startswith("beta: ")
    pair.world.heal()
    assert target.placeholders(OWNER)["beta"] is Placeholder.UP
    assert target.placeholders_down(OWNER) == []


# -- the table --------------------------------------------------------------------------------


def changed(table: dict[str, Any], *keys: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(table))
    inner = copy
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return copy


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("production", "command", "gamma"), ["x"], "command.gamma: no such host; valid: alpha"),
        (("experiment", "command"), {"beta": ["x"]}, "command.alpha: missing"),
        (("production", "command", "alpha"), ["vllm", "{odd}"], "unknown placeholder {odd}"),
        (("production", "command", "alpha"), ["vllm", "{seed}"], "unknown placeholder {seed}"),
        (("experiment", "port"), 8000, "it is production's"),
        (("experiment", "start_script"), "none.sh", "start_script: .*none.sh"),
        (
            ("production", "scope"),
            "vllm",
            "production.scope: 'vllm'; valid: a name that begins with dsv41-",
        ),
        (("clock",), -1, "target.clock"),
        (("world",), "", "hosts.alpha.address: missing"),
        (("hosts",), {}, "target.hosts: "),
        (("hosts", "a b"), {}, "target.hosts.a b: valid: letters"),
        (("placeholder",), "a\nb", "target.placeholder: "),
        (("hold",), "HOLD", "target.hold: "),
        (("engine",), "odd", "target.engine: "),
        (("odd",), 1, "target.odd: .*keys of target: kind, engine"),
        (("hosts", "alpha", "odd"), 1, "alpha.odd: .*keys of target.hosts.alpha: address, user"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(
    pair: Pair, keys: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        spark_pair_target(changed(TABLE, *keys, value=value), pair.context)
    assert pair.world.events()[2:] == []


def test_arguments_that_no_command_takes_are_refused(pair: Pair) -> None:
    table = changed(TABLE, "experiment", "command", value={"alpha": ["vllm", "serve"]})
    target = spark_pair_target(table, pair.context)
    target.check([Arm("plain", "control")])
    with pytest.raises(SpecError, match=r"arms.fast.args: no command .* has the word \{args\}"):
        target.check([ARM])


# -- the page ---------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text("utf-8")


def test_the_pages_target_file_is_a_target(pair: Pair) -> None:
    """Over ssh: it is built without asking any host, and takes an arm's arguments."""
    table = tomllib.loads(PAGE.partition("```toml\n")[2].partition("```")[0])["target"]
    target = spark_pair_target(table, pair.context)
    target.check([ARM, Arm("control", "control")])
    assert [(host.name, type(host).__name__) for host in target.hosts()] == [
        ("one", "SshHost"),
        ("two", "SshHost"),
    ]
    assert target.production().url == "http://192.0.2.11:8000"


def test_the_pages_start_script_is_the_shipped_one() -> None:
    shown = PAGE.partition("```sh\n")[2].partition("```")[0]
    code = "".join(line for line in START.splitlines(True) if not line.startswith("#"))
    assert shown == code


def test_the_pages_table_of_faults_is_whole() -> None:
    table = PAGE.partition("| fault | what happens |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)} == set(FAULTS)
