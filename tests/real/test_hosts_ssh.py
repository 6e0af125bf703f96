"""A real host over ssh: the contract of every host, and what real links and machines do."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from pytest_dsv41.errors import CommandFailed, TransportError
from pytest_dsv41.hosts import CommandLog, Fence, Host, Probe
from pytest_dsv41.hosts.ssh import SshHost
from tests.lab.lab import Lab
from tests.unit.test_hosts_contract import (  # noqa: F401 - the contract, run on a real host
    folder,
    test_a_command_answers_with_its_output_and_code,
    test_a_command_line_that_no_machine_could_take_is_refused,
    test_a_damaged_epoch_stops_every_act,
    test_a_failing_command_says_its_code,
    test_a_file_is_created_once_and_its_bytes_stay,
    test_a_missing_program_is_127,
    test_a_newer_epoch_locks_an_older_one_out_of_every_act,
    test_a_port_that_nobody_listens_on_is_down,
    test_arguments_arrive_as_they_are,
    test_every_command_is_logged_by_its_name,
    test_it_is_a_host,
    test_the_environment_of_a_command_is_given_to_it,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def log(tmp_path: Path) -> CommandLog:
    return CommandLog(tmp_path / "cmd")


@pytest.fixture
def host(lab: Lab, log: CommandLog) -> SshHost:
    return lab.ssh("alpha", log)


def run(host: Host, *argv: str, deadline_s: float = 10.0, stdin: str = "") -> str:
    return host.run(argv, name="test", deadline_s=deadline_s, stdin=stdin).stdout


def test_a_lot_of_input_and_output_comes_over_whole(host: SshHost) -> None:
    text = "".join(f"{number:07}\n" for number in range(500_000))
    assert run(host, "cat", stdin=text, deadline_s=60.0) == text


def test_output_beyond_the_bound_is_cut_off(host: SshHost) -> None:
    with pytest.raises(TransportError, match="more than 33554432 bytes of output"):
        run(host, "cat", "/dev/zero", deadline_s=60.0)
    assert run(host, "echo", "again") == "again\n"


def test_a_signal_is_a_code_and_not_a_lost_link(host: SshHost) -> None:
    with pytest.raises(CommandFailed) as failed:
        run(host, "sh", "-c", "kill -9 $$")
    assert failed.value.returncode == 128 + 9


def test_a_child_that_keeps_the_pipe_does_not_hold_the_command(host: SshHost) -> None:
    assert run(host, "sh", "-c", "sleep 300 & echo started") == "started\n"
    run(host, "pkill", "-x", "sleep")


def test_a_command_past_its_deadline_is_ended_on_the_host_too(host: SshHost) -> None:
    with pytest.raises(TransportError, match="alpha gave no answer within 1 s"):
        run(host, "sleep", "612", deadline_s=1.0)
    while any(p.argv == ("sleep", "612") for p in host.processes()):
        pass


def test_a_reset_link_is_no_answer_and_the_next_command_is_sent_again(
    lab: Lab, host: SshHost
) -> None:
    cut = threading.Timer(0.5, lab.reset_links, args=("alpha",))
    cut.start()
    with pytest.raises(TransportError, match="the link to alpha was lost"):
        run(host, "sleep", "30", deadline_s=20.0)
    cut.join()
    assert run(host, "echo", "again") == "again\n"


def test_a_cut_link_is_silence_and_the_command_ends_by_itself(lab: Lab, host: SshHost) -> None:
    before = host.identity()
    cut = threading.Timer(0.5, lab.cut, args=("alpha",))
    cut.start()
    with pytest.raises(TransportError, match="no answer within 2 s"):
        run(host, "sleep", "613", deadline_s=2.0)
    cut.join()
    with pytest.raises(TransportError, match="alpha cannot be reached"):
        run(host, "true", deadline_s=2.0)
    lab.join("alpha")
    assert host.identity() == before
    while any(p.argv == ("sleep", "613") for p in host.processes()):
        pass


def test_a_hung_host_is_silence(lab: Lab, log: CommandLog) -> None:
    lab.freeze("beta")
    host = lab.ssh("beta", log, connect_s=1.0)
    with pytest.raises(TransportError, match="beta cannot be reached"):
        run(host, "true", deadline_s=2.0)
    lab.thaw("beta")
    assert run(host, "echo", "awake") == "awake\n"


def test_a_reboot_shows_in_the_identity_and_keeps_the_files(lab: Lab, host: SshHost) -> None:
    before = host.identity()
    host.create("/var/lib/dsv41-test/HOLD", "mine")
    lab.power_loss("alpha")
    with pytest.raises(TransportError):
        run(host, "true", deadline_s=2.0)
    lab.mend()
    assert host.identity() != before
    assert host.read("/var/lib/dsv41-test/HOLD") == b"mine"
    host.remove("/var/lib/dsv41-test/HOLD")


def test_a_full_disk_is_an_answer_and_leaves_nothing_behind(host: SshHost) -> None:
    where = "/var/lib/dsv41-full"
    host.write(f"{where}/HOLD", "old")
    run(host, "sh", "-c", f"cat /dev/zero > {where}/ballast 2>/dev/null || true")
    for act in (
        lambda: host.write(f"{where}/HOLD", "x" * 100_000),
        lambda: host.create(f"{where}/other", "x" * 100_000),
    ):
        with pytest.raises(CommandFailed, match="No space left on device"):
            act()
    assert host.read(f"{where}/HOLD") == b"old"
    assert run(host, "ls", "-A", where).split() == ["HOLD", "ballast"]
    run(host, "rm", "-r", where)


def test_what_may_not_be_read_or_made_is_an_answer(host: SshHost) -> None:
    with pytest.raises(CommandFailed, match="not a file"):
        host.read("/etc")
    with pytest.raises(CommandFailed, match="cannot create directory"):
        host.create("/etc/hostname/HOLD", "x")
    assert host.read("/etc/hostname/HOLD") is None


def test_an_unknown_and_a_changed_host_key_are_refused(
    lab: Lab, log: CommandLog, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")

    def host(key: Path) -> SshHost:
        address = lab.address("alpha")
        return SshHost("alpha", address, log, user="root", key=key, known_hosts=known)

    with pytest.raises(TransportError, match=r"10\.77\.9\.2:22 is not in .*known_hosts; check"):
        host(lab.key).identity()
    other = (lab.folder / "beta.hostkey.pub").read_text().split()[1]
    known.write_text(f"{lab.address('alpha')} ssh-ed25519 {other}\n")
    with pytest.raises(TransportError, match="another host key than the known one"):
        host(lab.key).identity()
    known.write_text(f"{lab.address('alpha')} ssh-ed25519 A\n")
    with pytest.raises(TransportError, match="has a line that is no host key"):
        host(lab.key).identity()
    known.unlink()
    with pytest.raises(TransportError, match="No such file"):
        host(lab.key).identity()
    shutil.copy(lab.known_hosts, known)
    with pytest.raises(TransportError, match="refuses the user or the key"):
        host(lab.folder / "beta.hostkey").identity()
    assert host(lab.key).identity()


def test_the_processes_are_listed_with_every_argument(host: SshHost) -> None:
    run(host, "sh", "-c", "setsid sleep 614 >/dev/null 2>&1 &")
    while not (found := [p for p in host.processes() if p.argv == ("sleep", "614")]):
        pass
    assert host.processes()[0].pid == 1
    run(host, "kill", str(found[0].pid))


def test_a_port_is_seen_from_the_host_itself(lab: Lab, host: SshHost) -> None:
    assert host.port(22) is Probe.UP
    assert host.port(22, lab.address("beta")) is Probe.UP
    assert host.port(23, lab.address("beta")) is Probe.DOWN
    lab.cut("beta")
    assert host.port(22, lab.address("beta")) is Probe.UNKNOWN


def test_a_server_left_behind_does_not_keep_the_fence(host: SshHost) -> None:
    fence = Fence("/var/lib/dsv41-test/HOLD.epoch", 7)
    argv = ["sh", "-c", "setsid sleep 615 >/dev/null 2>&1 &"]
    host.run(argv, name="server", deadline_s=10.0, fence=fence)
    host.run(["true"], name="next", deadline_s=5.0, fence=fence)
    run(host, "pkill", "-x", "sleep")
    run(host, "rm", "-r", "/var/lib/dsv41-test")
