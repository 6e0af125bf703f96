"""What every host does alike: the simulated one and this machine (an ssh one: tests/real)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_dsv41.errors import CommandFailed, StaleEpoch, UsageError
from pytest_dsv41.hosts import FENCED_OFF, CommandLog, Fence, Host, LocalHost, Probe
from pytest_dsv41.hosts.fake import FakeHost, FakeWorld


def make_local(tmp_path: Path) -> Host:
    return LocalHost(CommandLog(tmp_path / "cmd"))


def make_fake(tmp_path: Path) -> Host:
    return FakeHost(FakeWorld.create(tmp_path / "world"), "alpha", CommandLog(tmp_path / "cmd"))


@pytest.fixture(params=[make_local, make_fake], ids=["local", "fake"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    make: Callable[[Path], Host] = request.param
    return make(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "on-host" / "deeper")


def test_it_is_a_host(host: Host) -> None:
    assert isinstance(host, Host)
    assert host.name
    assert host.identity() == host.identity()


def test_a_file_is_created_once_and_its_bytes_stay(host: Host, folder: str) -> None:
    path = f"{folder}/HOLD"
    assert host.read(path) is None
    host.create(path, b"mine\x00\xff\n")
    with pytest.raises(FileExistsError):
        host.create(path, "another's")
    assert host.read(path) == b"mine\x00\xff\n"
    host.write(path, "new")
    assert host.read(path) == b"new"
    host.remove(path)
    host.remove(path)
    assert host.read(path) is None


def test_a_command_answers_with_its_output_and_code(host: Host) -> None:
    done = host.run(["echo", "hello"], name="hello", deadline_s=30.0)
    assert (done.stdout, done.returncode) == ("hello\n", 0)
    assert host.run(["cat"], name="cat", deadline_s=30.0, stdin="in\n").stdout == "in\n"
    assert host.run(["false"], name="false", deadline_s=30.0, check=False).returncode == 1


def test_a_command_line_that_no_machine_could_take_is_refused(host: Host) -> None:
    for argv in ([], [""], ["echo", "a\0b"]):
        with pytest.raises(UsageError, match=r"^odd: "):
            host.run(argv, name="odd", deadline_s=30.0)


@pytest.mark.parametrize("code", [1, 127, 255])
def test_a_failing_command_says_its_code(host: Host, code: int) -> None:
    with pytest.raises(CommandFailed, match=f"^fails: exit {code}: ") as failed:
        host.run(["sh", "-c", f"exit {code}"], name="fails", deadline_s=30.0)
    assert failed.value.returncode == code


def test_a_missing_program_is_127(host: Host) -> None:
    with pytest.raises(CommandFailed) as failed:
        host.run(["/no/such/program"], name="missing", deadline_s=30.0)
    assert failed.value.returncode == 127
    done = host.run(["/no/such/program"], name="missing", deadline_s=30.0, check=False)
    assert done.returncode == 127


ODD = [
    "$(id)",
    "`id`",
    "a\nb",
    "-rf",
    "; true",
    "ü 中",
    "",
    "'",
    '"',
    "\\",
    "*",
    "~",
    "${HOME}",
    "&",
]


def test_arguments_arrive_as_they_are(host: Host) -> None:
    for word in ODD:
        done = host.run(["printf", "%s\\n", word], name="printf", deadline_s=30.0)
        assert done.stdout == f"{word}\n"


def test_the_environment_of_a_command_is_given_to_it(host: Host) -> None:
    done = host.run(["env"], name="env", deadline_s=30.0, env={"ODD": "$(id) 'x'"})
    assert "ODD=$(id) 'x'" in done.stdout.splitlines()


def test_a_newer_epoch_locks_an_older_one_out_of_every_act(host: Host, folder: str) -> None:
    hold = f"{folder}/HOLD"
    old, new = Fence.beside(hold, 4), Fence.beside(hold, 5)
    assert old.path == f"{folder}/HOLD.epoch"
    host.create(hold, "first", fence=old)
    host.run(["true"], name="act", deadline_s=30.0, fence=old)
    host.run(["true"], name="take-over", deadline_s=30.0, fence=new)
    acts: list[Callable[[], object]] = [
        lambda: host.run(["true"], name="late", deadline_s=30.0, fence=old),
        lambda: host.create(f"{folder}/other", "x", fence=old),
        lambda: host.write(hold, "x", fence=old),
        lambda: host.remove(hold, fence=old),
    ]
    for act in acts:
        with pytest.raises(StaleEpoch, match="has seen epoch 5, this is 4") as refused:
            act()
        assert refused.value.returncode == FENCED_OFF
    assert host.read(hold) == b"first"
    assert host.read(f"{folder}/other") is None
    assert host.read(new.path) == b"5\n"
    host.remove(hold, fence=new)
    assert host.read(hold) is None


@pytest.mark.parametrize("content", ["", "five\n"])
def test_a_damaged_epoch_stops_every_act(host: Host, folder: str, content: str) -> None:
    fence = Fence.beside(f"{folder}/HOLD", 6)
    host.write(fence.path, content)
    with pytest.raises(CommandFailed):
        host.run(["true"], name="act", deadline_s=30.0, fence=fence)
    with pytest.raises(CommandFailed):
        host.create(f"{folder}/HOLD", "x", fence=fence)
    assert host.read(f"{folder}/HOLD") is None


def test_a_port_that_nobody_listens_on_is_down(host: Host) -> None:
    assert host.port(LocalHost.free_port()) is Probe.DOWN


def test_every_command_is_logged_by_its_name(host: Host, tmp_path: Path) -> None:
    host.run(["echo", "hello \x1b[31m"], name="first", deadline_s=30.0)
    with pytest.raises(CommandFailed):
        host.run(["false"], name="second", deadline_s=30.0)
    names = sorted(path.name for path in (tmp_path / "cmd").iterdir())
    assert names == ["0001-first.log", "0002-second.log"]
    text = (tmp_path / "cmd" / names[0]).read_text()
    assert "exit: 0" in text
    assert "hello \\x1b[31m" in text


PATHS = st.sampled_from(["/d/a", "/d/b", "/d/sub/c"])
ACTS = st.lists(
    st.tuples(st.sampled_from(["create", "write", "remove", "read"]), PATHS, st.binary(max_size=9)),
    max_size=25,
)


def test_a_private_command_is_logged_without_its_output(host: Host, tmp_path: Path) -> None:
    done = host.run(["cat"], name="secret", deadline_s=30.0, stdin="canary-6bc1\n", private=True)
    assert done.stdout == "canary-6bc1\n"
    (record,) = (tmp_path / "cmd").glob("*-secret.log")
    text = record.read_text()
    assert "argv: ['cat']" in text
    assert "exit: 0" in text
    assert "canary-6bc1" not in text


@given(acts=ACTS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_order_of_file_acts_gives_the_same_on_both(
    acts: list[tuple[str, str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("both")
    seen = []
    for make in (make_local, make_fake):
        side = base / make.__name__
        host = make(side)
        answers: list[object] = []
        for act, path, data in acts:
            where = f"{side}{path}"
            try:
                if act in ("create", "write"):
                    answers.append(getattr(host, act)(where, data))
                else:
                    answers.append(getattr(host, act)(where))
            except FileExistsError:
                answers.append("exists")
        seen.append(answers)
    assert seen[0] == seen[1]
