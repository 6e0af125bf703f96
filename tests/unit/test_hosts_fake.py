"""The simulated world: faults by name, lifetimes of processes, and the same trace again."""

from __future__ import annotations

import multiprocessing
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.errors import CommandFailed, TransportError, UsageError
from pytest_dsv41.hosts import CommandLog, LocalHost, Probe
from pytest_dsv41.hosts.fake import (
    FAULTS,
    Call,
    CallerKilled,
    FakeHost,
    FakeWorld,
    Reply,
    Service,
)

SERVER = ["vllm", "serve", "model", "--port", "8000"]


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    return FakeWorld.create(tmp_path / "world", seed=3)


@pytest.fixture
def alpha(world: FakeWorld, tmp_path: Path) -> FakeHost:
    return FakeHost(world, "alpha", CommandLog(tmp_path / "cmd"))


def tmux(host: FakeHost, *words: str, unit: str = "") -> str:
    argv = ["tmux", *words]
    if unit:
        argv = ["systemd-run", "--user", "--scope", f"--unit={unit}", "--", *argv]
    return host.run(argv, name="tmux", deadline_s=5.0).stdout


def test_a_cut_link_is_silence_and_the_machine_lives_on(world: FakeWorld, alpha: FakeHost) -> None:
    tmux(alpha, "new-session", "-d", "-s", "prod", "--", *SERVER)
    world.inject("partition", "alpha")
    acts = [
        lambda: alpha.read("/x"),
        lambda: alpha.write("/x", "y"),
        lambda: alpha.port(8000),
        lambda: alpha.run(["true"], name="true", deadline_s=1.0),
        alpha.identity,
    ]
    for act in acts:
        with pytest.raises(TransportError, match="alpha gave no answer"):
            act()
    world.heal("alpha")
    assert alpha.read("/x") is None
    assert alpha.port(8000) is Probe.UP


def test_an_act_whose_answer_is_lost_was_done(world: FakeWorld, alpha: FakeHost) -> None:
    world.arm("partition", "create /HOLD", after=True)
    with pytest.raises(TransportError):
        alpha.create("/HOLD", "mine")
    world.heal()
    assert alpha.read("/HOLD") == b"mine"


def test_a_reboot_ends_what_runs_and_shows_in_the_identity(
    world: FakeWorld, alpha: FakeHost, tmp_path: Path
) -> None:
    beta = FakeHost(world, "beta", CommandLog(tmp_path / "cmd"))
    before, other = alpha.identity(), beta.identity()
    tmux(alpha, "new-session", "-d", "-s", "prod", "--", *SERVER)
    alpha.write("/var/lib/HOLD", "mine")
    world.inject("reboot", "alpha")
    assert alpha.identity() != before
    assert beta.identity() == other
    assert alpha.port(8000) is Probe.DOWN
    assert alpha.processes() == []
    assert alpha.read("/var/lib/HOLD") == b"mine"


def test_a_power_loss_takes_what_was_not_synced(
    tmp_path: Path, world: FakeWorld, alpha: FakeHost
) -> None:
    alpha.write("/var/kept", "synced")
    with world.transaction() as state:
        state.machines["alpha"].store("/var/kept", b"torn", synced=False)
        state.machines["alpha"].store("/var/log", b"line", synced=False)
    assert alpha.read("/var/log") == b"line"
    world.inject("power-loss", "alpha")
    with pytest.raises(TransportError):
        alpha.read("/var/kept")
    world.boot("alpha")
    assert alpha.read("/var/kept") == b"synced"
    assert alpha.read("/var/log") is None


def test_a_full_disk_refuses_writes_and_keeps_what_is_there(
    world: FakeWorld, alpha: FakeHost
) -> None:
    alpha.write("/a", "old")
    world.inject("full-disk", "alpha")
    for act in (lambda: alpha.write("/a", "new"), lambda: alpha.create("/b", "x")):
        with pytest.raises(CommandFailed, match="No space left on device"):
            act()
    assert alpha.read("/a") == b"old"
    assert alpha.read("/b") is None
    alpha.remove("/a")
    world.heal()
    alpha.create("/b", "x")


def test_the_nth_write_finds_no_space_and_the_next_one_does(
    world: FakeWorld, alpha: FakeHost
) -> None:
    world.arm("enospc", "write /a", count=2)
    alpha.write("/a", "1")
    with pytest.raises(CommandFailed, match="No space left"):
        alpha.write("/a", "2")
    alpha.write("/a", "3")
    assert alpha.read("/a") == b"3"


def test_a_hung_command_takes_its_deadline_of_simulated_time(
    world: FakeWorld, alpha: FakeHost
) -> None:
    world.arm("hang", "stop")
    before = world.machine("alpha").now
    with pytest.raises(TransportError, match="within 60 s"):
        alpha.run(["true"], name="stop", deadline_s=60.0)
    assert world.machine("alpha").now - before >= 60.0
    alpha.run(["true"], name="stop", deadline_s=60.0)
    with pytest.raises(TransportError, match="within 5 s"):
        alpha.run(["sleep", "infinity"], name="sleep", deadline_s=5.0)
    assert alpha.processes() == []


@pytest.mark.parametrize("after", [False, True])
def test_a_killed_caller_has_done_the_act_or_has_not(
    world: FakeWorld, alpha: FakeHost, after: bool
) -> None:
    world.arm("kill", "create /HOLD", after=after)
    with pytest.raises(CallerKilled):
        alpha.create("/HOLD", "x")
    assert alpha.read("/HOLD") == (b"x" if after else None)


def test_a_clock_jump_moves_the_wall_clock_alone(world: FakeWorld, alpha: FakeHost) -> None:
    def date() -> int:
        return int(alpha.run(["date", "+%s"], name="date", deadline_s=1.0).stdout)

    identity, before = alpha.identity(), date()
    world.inject("clock-forward", "alpha")
    assert date() - before == pytest.approx(3600, abs=2)
    world.inject("clock-back", "alpha")
    world.step_clock("alpha", -90)
    assert date() - before == pytest.approx(-90, abs=2)
    assert alpha.identity() == identity


def test_a_pane_lives_where_its_server_was_started(alpha: FakeHost, world: FakeWorld) -> None:
    """A pane on a server that runs already is outside of the scope that asked for it."""
    tmux(alpha, "-L", "own", "new-session", "-d", "-s", "a", "--", *SERVER, unit="dsv41w-t-1-x")
    tmux(alpha, "new-session", "-d", "-s", "outside", "--", "sleep", "infinity")
    tmux(alpha, "new-session", "-d", "-s", "late", "--", "sleep", "infinity", unit="dsv41w-t-1-y")
    assert world.machine("alpha").scopes() == ["dsv41w-t-1-x.scope"]
    assert alpha.port(8000) is Probe.UP
    with world.transaction() as state:
        state.machines["alpha"].kill_scope("dsv41w-t-1-x.scope")
    assert alpha.port(8000) is Probe.DOWN
    assert tmux(alpha, "list-sessions").split() == ["outside", "late"]


def test_a_scope_ends_itself_when_its_time_is_over(alpha: FakeHost, world: FakeWorld) -> None:
    argv = ["systemd-run", "--user", "--scope", "--unit=dsv41w-t-1-x", "-p", "RuntimeMaxSec=30"]
    argv += ["--", "tmux", "-L", "own", "new-session", "-d", "-s", "a", "--", *SERVER]
    alpha.run(argv, name="start", deadline_s=5.0)
    world.inject("partition", "alpha")
    world.advance(29.0)
    assert world.machine("alpha").listening(8000)
    world.advance(2.0)
    assert not world.machine("alpha").listening(8000)
    assert world.machine("alpha").processes == {}


def test_tmux_without_a_server_says_so(alpha: FakeHost) -> None:
    with pytest.raises(CommandFailed, match="no server running"):
        tmux(alpha, "list-sessions")
    tmux(alpha, "new-session", "-d", "-s", "a", "--", "sleep", "infinity")
    with pytest.raises(CommandFailed, match="duplicate session"):
        tmux(alpha, "new-session", "-d", "-s", "a", "--", "sleep", "infinity")
    tmux(alpha, "kill-session", "-t", "=a")
    assert alpha.processes() == []


def slow_start(call: Call) -> Reply | Service:
    return Service(ports=(9000,), ready_s=3.0, lives_s=10.0)


def greet(call: Call) -> Reply:
    return Reply(out=f"hello {call.args[0]}\n")


def test_programs_and_scripts_of_ones_own(tmp_path: Path) -> None:
    world = FakeWorld.create(
        tmp_path / "world",
        programs={"mine": f"{__name__}:slow_start", "echo hello $1": f"{__name__}:greet"},
    )
    host = FakeHost(world, "alpha", CommandLog(tmp_path / "cmd"))
    tmux(host, "new-session", "-d", "-s", "a", "--", "mine")
    assert host.port(9000) is Probe.DOWN
    world.advance(3.0)
    assert host.port(9000) is Probe.UP
    world.advance(8.0)
    assert host.port(9000) is Probe.DOWN
    argv = ["sh", "-s", "--", "you"]
    assert host.run(argv, name="x", deadline_s=1.0, stdin="echo hello $1").stdout == "hello you\n"
    with pytest.raises(CommandFailed, match="no simulation of this script: rm -rf"):
        host.run(["sh", "-s"], name="x", deadline_s=1.0, stdin="rm -rf /")


@pytest.fixture
def real_world(tmp_path: Path) -> Iterator[FakeWorld]:
    world = FakeWorld.create(tmp_path / "world", servers="real", seed=7)
    yield world
    world.shutdown()


def test_a_real_server_lives_as_long_as_its_simulated_process(
    real_world: FakeWorld, tmp_path: Path
) -> None:
    host = FakeHost(real_world, "alpha", CommandLog(tmp_path / "cmd"))
    local = LocalHost(CommandLog(tmp_path / "cmd"))
    machine = real_world.machine("alpha")
    port = local.free_port()
    argv = ["python", "-m", "pytest_dsv41", "stub", "--port", str(port), "--model", "tiny"]
    tmux(host, "new-session", "-d", "-s", "prod", "--", *argv)
    while local.port(port, machine.address) is not Probe.UP:
        assert real_world.machine("alpha").processes
    with urllib.request.urlopen(f"http://{machine.address}:{port}/v1/models") as answer:
        assert b"tiny" in answer.read()
    real_world.inject("reboot", "alpha")
    assert local.port(port, machine.address) is Probe.DOWN


def scenario(folder: Path, seed: int) -> list[dict[str, object]]:
    world = FakeWorld.create(folder / "world", seed=seed)
    hosts = [FakeHost(world, name, CommandLog(folder / "cmd")) for name in world.names()]
    world.arm("partition", "stop", host="beta")
    for host in hosts:
        host.create("/HOLD", "x")
        tmux(host, "new-session", "-d", "-s", "prod", "--", *SERVER)
    for host in hosts:
        try:
            host.run(["tmux", "kill-session", "-t", "=prod"], name="stop", deadline_s=9.0)
        except TransportError:
            world.heal()
    return world.events()


def test_the_same_seed_gives_the_same_trace(tmp_path: Path) -> None:
    first, again = scenario(tmp_path / "a", 11), scenario(tmp_path / "b", 11)
    assert first == again
    assert [e["what"] for e in first] == [
        *["create /HOLD", "tmux", "create /HOLD", "tmux", "stop", "stop"]
    ]
    assert str(first[-1]["outcome"]).startswith("TransportError")
    other = scenario(tmp_path / "c", 12)
    assert [e["t"] for e in other] != [e["t"] for e in first]


def count_up(folder: str, times: int) -> None:
    world = FakeWorld(Path(folder))
    host = FakeHost(world, "alpha", CommandLog(Path(folder) / "cmd"))
    for number in range(times):
        try:
            host.create(f"/once/{number}", "x")
        except FileExistsError:
            continue


def test_processes_share_one_world(world: FakeWorld, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=count_up, args=(str(world.folder), 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    outcomes = [str(e["outcome"]) for e in world.events()]
    assert len(outcomes) == 75
    assert outcomes.count("done") == 25
    assert sum(outcome.startswith("FileExistsError") for outcome in outcomes) == 50
    assert [e["act"] for e in world.events()] == list(range(1, 76))


@pytest.mark.parametrize("cut", [0, 1, 40, 79, 80, 200, -1])
def test_a_writer_killed_at_any_byte_leaves_the_state_before_it(
    world: FakeWorld, alpha: FakeHost, cut: int
) -> None:
    """Two files are written in turns; the torn one is not read, the other one is whole."""
    alpha.write("/kept", "x")
    files = sorted(world.folder.glob("world.?"), key=lambda path: path.stat().st_mtime_ns)
    before = {path: path.read_bytes() for path in files}
    alpha.write("/late", "y")
    [newest] = [path for path in files if path.read_bytes() != before[path]]
    newest.write_bytes(newest.read_bytes()[:cut])
    again = FakeHost(FakeWorld(world.folder), "alpha", alpha.log)
    assert again.read("/kept") == b"x"
    assert again.read("/late") is None
    again.write("/late", "z")
    assert FakeHost(FakeWorld(world.folder), "alpha", alpha.log).read("/late") == b"z"


def test_threads_share_one_world(world: FakeWorld, alpha: FakeHost) -> None:
    def act(number: int) -> None:
        for _ in range(30):
            alpha.write(f"/t/{number}", str(int(alpha.read(f"/t/{number}") or b"0") + 1))

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [alpha.read(f"/t/{number}") for number in range(4)] == [b"30"] * 4
    assert [e["act"] for e in world.events()] == list(range(1, len(world.events()) + 1))


def test_acts_inside_of_a_transaction_are_part_of_it(world: FakeWorld, alpha: FakeHost) -> None:
    with world.transaction() as state:
        alpha.create("/a", "x")
        state.machines["alpha"].store("/b", b"y", synced=True)
    assert (alpha.read("/a"), alpha.read("/b")) == (b"x", b"y")


def test_wrong_names_are_refused_with_the_valid_ones(world: FakeWorld, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fault 'fire'; valid: partition, reboot"):
        world.inject("fire")
    with pytest.raises(UsageError, match="host 'gamma'; valid: alpha, beta"):
        world.arm("hang", "stop", host="gamma")
    with pytest.raises(UsageError, match="valid: simulated, real"):
        FakeWorld.create(tmp_path / "other", servers="none")
    with pytest.raises(UsageError, match="a world lies there already"):
        FakeWorld.create(world.folder)
    with pytest.raises(UsageError, match="no world lies there"):
        FakeWorld(tmp_path / "nowhere")
    assert len(FAULTS) == 9
