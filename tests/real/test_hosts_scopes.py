"""Scopes, placeholders and the quiet proof on real hosts: systemd, cgroups and tmux themselves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.scopes import end_scopes, live_scopes, run_scoped
from pytest_dsv41.hosts.ssh import SshHost
from tests.lab.lab import Lab
from tests.unit.test_hosts_scopes_contract import (  # noqa: F401 - the contract, on a real host
    test_a_chains_placeholder_goes_up_once_and_down_again,
    test_a_foreign_or_ownerless_placeholder_is_never_touched,
    test_a_plain_tmux_inside_a_scope_has_a_socket_of_its_own,
    test_a_scope_ends_whole_and_alone,
    test_a_scope_is_started_once,
    test_a_scope_of_any_window_is_not_quiet_unless_it_is_named,
    test_a_second_pane_of_somebody_else_makes_it_foreign,
    test_a_windows_own_dies_with_its_fence_and_the_chains_outlives_every_scope,
    test_an_older_epoch_starts_and_ends_nothing,
    test_arguments_arrive_in_a_scope_as_they_are,
    test_chain_1_is_not_chain_10,
    test_the_command_of_a_scope_answers_through_it,
    unit,
)

pytestmark = pytest.mark.slow

STUBBORN = r"""
trap '' TERM HUP INT
sleep 616 & setsid sleep 616 &
(setsid sh -c 'trap "" TERM HUP; sleep 616 & sleep 616' >/dev/null 2>&1 &)
nohup sleep 616 >/dev/null 2>&1 &
"""


@pytest.fixture
def host(lab: Lab, tmp_path: Path) -> SshHost:
    return lab.ssh("alpha", CommandLog(tmp_path / "cmd"))


def stubborn(host: SshHost) -> int:
    return sum(process.argv == ("sleep", "616") for process in host.processes())


def start(host: SshHost, name: str, longest_s: float = 600.0) -> None:
    run_scoped(
        host, name, ["sh", "-c", STUBBORN], name="start", deadline_s=20.0, longest_s=longest_s
    )
    while stubborn(host) < 5:
        pass


def test_children_that_detach_and_ignore_signals_end_with_the_scope(host: SshHost) -> None:
    start(host, unit())
    end_scopes(host, [unit()], name="end")
    assert stubborn(host) == 0
    assert live_scopes(host) == []


def test_the_host_ends_a_scope_by_itself_while_nobody_reaches_it(lab: Lab, host: SshHost) -> None:
    start(host, unit(), longest_s=2.0)
    lab.cut("alpha")
    time.sleep(2.5)  # the host's own clock ends the scope; nothing here could be waited for
    lab.join("alpha")
    # SIGTERM has come by now; those that ignore it get SIGKILL five seconds later.
    while live_scopes(host):
        pass
    assert stubborn(host) == 0


def test_a_scope_outlives_the_link_that_started_it(lab: Lab, host: SshHost) -> None:
    start(host, unit())
    lab.reset_links("alpha")
    host.close()
    assert live_scopes(host) == [unit()]
    end_scopes(host, [unit()], name="end")
