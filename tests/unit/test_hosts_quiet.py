"""The quiet proof names what it sees, and what it cannot see is not quiet."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.fake import Call, Container, FakeHost, FakeWorld, Reply
from pytest_dsv41.hosts.quiet import spark_quiet

SERVER = ["tmux", "new-session", "-d", "-s", "prod", "--", "vllm", "serve", "--port", "8000"]


def broken(call: Call) -> Reply:
    return Reply(1, err="Cannot connect to the daemon\n")


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    return FakeWorld.create(tmp_path / "world")


@pytest.fixture
def host(world: FakeWorld, tmp_path: Path) -> FakeHost:
    return FakeHost(world, "alpha", CommandLog(tmp_path / "cmd"))


def test_nothing_there_is_quiet(host: FakeHost) -> None:
    assert spark_quiet(host, ports=[8000, 18001], label="dsv41") == []


def test_a_server_is_seen_on_the_gpu_and_on_its_port(host: FakeHost) -> None:
    host.run(SERVER, name="start", deadline_s=5.0)
    assert spark_quiet(host, ports=[8000]) == [
        "alpha: on the GPU: pid 1001, vllm",
        "alpha: port 8000 is UP, not closed",
    ]


def test_a_container_lives_outside_of_scopes_and_is_seen_by_its_label(
    world: FakeWorld, host: FakeHost
) -> None:
    with world.transaction() as state:
        state.machines["alpha"].gpu = False
        state.machines["alpha"].containers = [
            Container("worker", {"dsv41": "1"}),
            Container("other", {"app": "x"}),
        ]
    assert spark_quiet(host, label="dsv41") == ["alpha: container worker runs"]
    assert spark_quiet(host) == []


@pytest.mark.parametrize("fault", ["partition", "power-loss"])
def test_a_host_that_is_not_seen_is_not_quiet(world: FakeWorld, host: FakeHost, fault: str) -> None:
    world.inject(fault, "alpha")
    [problem] = spark_quiet(host, ports=[8000], label="dsv41")
    assert problem.startswith("alpha: cannot tell: ")


@pytest.mark.parametrize("program", ["docker", "nvidia-smi"])
def test_a_tool_that_cannot_tell_is_not_quiet(tmp_path: Path, program: str) -> None:
    world = FakeWorld.create(tmp_path / "world", programs={program: f"{__name__}:broken"})
    host = FakeHost(world, "beta", CommandLog(tmp_path / "cmd"))
    [problem] = spark_quiet(host, label="dsv41")
    assert "beta: cannot tell" in problem
    assert "Cannot connect to the daemon" in problem


@pytest.mark.parametrize("step", ["quiet-gpu", "quiet-docker", "port 8000", "scopes"])
def test_each_look_that_times_out_is_not_quiet(world: FakeWorld, host: FakeHost, step: str) -> None:
    world.arm("hang", step)
    [problem] = spark_quiet(host, ports=[8000], label="dsv41")
    assert problem.startswith("alpha: cannot tell: ")
