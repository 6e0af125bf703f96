"""Scopes, placeholders and the quiet proof, alike on a simulated and (tests/real) a real host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.errors import CommandFailed, RefusedByWorld, StaleEpoch, UsageError
from pytest_dsv41.hosts import CommandLog, Fence, Host, Placeholder
from pytest_dsv41.hosts.fake import FakeHost, FakeWorld
from pytest_dsv41.hosts.quiet import spark_quiet
from pytest_dsv41.hosts.scopes import ScopeName, end_scopes, live_scopes, run_scoped
from pytest_dsv41.hosts.tmux import (
    HOLD_HEAD,
    PLACEHOLDER_TMUX,
    check_owner,
    placeholder_down,
    placeholder_state,
    placeholder_up,
    window_placeholder_up,
)

OWNER = "chain-20260101T000000Z-0123abcd"
SERVER = ["tmux", "new-session", "-d", "-s", "server", "--", "sleep", "infinity"]
HELD = ["tmux", "new-session", "-d", "-s", "dsv41-hold", "--"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return FakeHost(FakeWorld.create(tmp_path / "world"), "alpha", CommandLog(tmp_path / "cmd"))


def titled(title: str) -> list[str]:
    return ["bash", "-c", 'exec -a "$1" cat', "hold", title]


def unit(what: str = "C1", tag: str = "LANE-demo-W-1", epoch: int = 3) -> str:
    return ScopeName(tag, epoch, what).unit


def start(host: Host, name: str, argv: list[str] = SERVER) -> None:
    run_scoped(host, name, argv, name="start", deadline_s=20.0, longest_s=600.0)


def sleepers(host: Host) -> int:
    return sum(process.argv[:2] == ("sleep", "infinity") for process in host.processes())


def test_a_scope_ends_whole_and_alone(host: Host) -> None:
    one, ten = unit(tag="chain-1"), unit(tag="chain-10")
    start(host, one)
    start(host, ten)
    assert live_scopes(host) == sorted([one, ten])
    assert sleepers(host) == 2
    end_scopes(host, [one], name="end")
    end_scopes(host, [one], name="end")
    assert live_scopes(host) == [ten]
    assert sleepers(host) == 1
    end_scopes(host, [ten, unit("never")], name="end")
    assert live_scopes(host) == []
    assert sleepers(host) == 0


def test_a_scope_is_started_once(host: Host) -> None:
    start(host, unit())
    with pytest.raises(CommandFailed, match="already"):
        start(host, unit())
    end_scopes(host, [unit()], name="end")


def test_the_command_of_a_scope_answers_through_it(host: Host) -> None:
    done = run_scoped(
        host, unit(), ["cat"], name="cat", deadline_s=20.0, stdin="in\n", longest_s=60.0
    )
    assert done.stdout == "in\n"
    with pytest.raises(CommandFailed) as failed:
        run_scoped(host, unit(), ["sh", "-c", "exit 9"], name="nine", deadline_s=20.0)
    assert failed.value.returncode == 9
    assert live_scopes(host) == []


ODD = [
    "$(id)",
    "`id`",
    "a\nb",
    "-rf",
    "; true",
    "ü 中",
    "",
    "'",
    "\\",
    "$HOME",
    "${HOME}",
    "%n",
    "$$",
]


def test_arguments_arrive_in_a_scope_as_they_are(host: Host) -> None:
    done = run_scoped(host, unit(), ["printf", "%s\\n", *ODD], name="printf", deadline_s=20.0)
    assert done.stdout == "".join(f"{word}\n" for word in ODD)


def test_a_plain_tmux_inside_a_scope_has_a_socket_of_its_own(host: Host) -> None:
    start(host, unit("C1"))
    start(host, unit("C2"))
    assert sleepers(host) == 2
    end_scopes(host, [unit("C1")], name="end")
    assert sleepers(host) == 1
    end_scopes(host, [unit("C2")], name="end")


def test_an_older_epoch_starts_and_ends_nothing(host: Host) -> None:
    old, new = Fence("/var/lib/dsv41-t/epoch", 3), Fence("/var/lib/dsv41-t/epoch", 4)
    run_scoped(host, unit(), SERVER, name="start", deadline_s=20.0, longest_s=600.0, fence=new)
    acts: list[Callable[[], object]] = [
        lambda: run_scoped(host, unit("X"), SERVER, name="late", deadline_s=20.0, fence=old),
        lambda: end_scopes(host, [unit()], name="late", fence=old),
        lambda: placeholder_up(host, OWNER, fence=old),
    ]
    for act in acts:
        with pytest.raises(StaleEpoch):
            act()
    assert live_scopes(host) == [unit()]
    assert placeholder_state(host, OWNER) is Placeholder.DOWN
    end_scopes(host, [unit()], name="end", fence=new)


# -- placeholders --


def test_a_chains_placeholder_goes_up_once_and_down_again(host: Host) -> None:
    assert placeholder_state(host, OWNER) is Placeholder.DOWN
    placeholder_up(host, OWNER)
    before = [p for p in host.processes() if p.argv == (f"{HOLD_HEAD} owner={OWNER}",)]
    assert len(before) == 1
    placeholder_up(host, OWNER)
    assert [p for p in host.processes() if p.argv == before[0].argv] == before
    assert placeholder_state(host, OWNER) is Placeholder.UP
    assert placeholder_down(host, OWNER) is None
    assert placeholder_down(host, OWNER) is None
    assert placeholder_state(host, OWNER) is Placeholder.DOWN


def test_a_windows_own_dies_with_its_fence_and_the_chains_outlives_every_scope(host: Host) -> None:
    window_placeholder_up(host, unit("hold"), longest_s=600.0)
    placeholder_up(host, OWNER)
    start(host, unit("C1"))
    own = [p for p in host.processes() if p.argv == (HOLD_HEAD,)]
    assert len(own) == 1
    # It lies on its scope's socket: the default one does not show it.
    assert placeholder_state(host, OWNER) is Placeholder.UP
    end_scopes(host, live_scopes(host), name="fence")
    assert [p for p in host.processes() if p.argv == (HOLD_HEAD,)] == []
    assert placeholder_state(host, OWNER) is Placeholder.UP
    assert placeholder_down(host, OWNER) is None


FOREIGN = [
    HOLD_HEAD,
    f"{HOLD_HEAD} owner=chain-20260101T000000Z-0123abce",
    f"{HOLD_HEAD} owner={OWNER}0",
    f"{HOLD_HEAD} owner={OWNER} ",
    f"other owner={OWNER}",
    f"{HOLD_HEAD} owner=",
]


@pytest.mark.parametrize("title", FOREIGN)
def test_a_foreign_or_ownerless_placeholder_is_never_touched(host: Host, title: str) -> None:
    argv = [*PLACEHOLDER_TMUX, "new-session", "-d", "-s", "dsv41-hold", "--", *titled(title)]
    host.run(argv, name="foreign", deadline_s=20.0)
    while not (before := [p for p in host.processes() if p.argv == (title,)]):
        pass
    assert placeholder_state(host, OWNER) is Placeholder.FOREIGN
    with pytest.raises(RefusedByWorld, match="it is not touched"):
        placeholder_up(host, OWNER)
    left = placeholder_down(host, OWNER)
    assert left is not None
    assert "it is not touched" in left
    assert [p for p in host.processes() if p.argv == (title,)] == before
    host.run([*PLACEHOLDER_TMUX, "kill-server"], name="clean", deadline_s=20.0)


def test_chain_1_is_not_chain_10(host: Host) -> None:
    """Another session beside it, and a longer name, are neither seen nor ended."""
    other = [*PLACEHOLDER_TMUX, "new-session", "-d", "-s", "dsv41-hold-2", "--"]
    host.run([*other, *titled(f"{HOLD_HEAD} owner={OWNER}")], name="other", deadline_s=20.0)
    assert placeholder_state(host, OWNER) is Placeholder.DOWN
    placeholder_up(host, OWNER)
    assert placeholder_down(host, OWNER) is None
    listed = host.run(
        [*PLACEHOLDER_TMUX, "list-sessions", "-F", "#{session_name}"], name="ls", deadline_s=20.0
    )
    assert listed.stdout.split() == ["dsv41-hold-2"]
    host.run([*PLACEHOLDER_TMUX, "kill-server"], name="clean", deadline_s=20.0)


def test_a_second_pane_of_somebody_else_makes_it_foreign(host: Host) -> None:
    """The session is ended as a whole, so every pane of it must be ours."""
    placeholder_up(host, OWNER)
    argv = [*PLACEHOLDER_TMUX, "new-window", "-d", "-t", "=dsv41-hold:", "--", "sleep", "infinity"]
    host.run(argv, name="guest", deadline_s=20.0)
    assert placeholder_state(host, OWNER) is Placeholder.FOREIGN
    assert placeholder_down(host, OWNER) is not None
    assert sleepers(host) == 1
    host.run([*PLACEHOLDER_TMUX, "kill-server"], name="clean", deadline_s=20.0)


# -- the quiet proof --


def test_a_scope_of_any_window_is_not_quiet_unless_it_is_named(host: Host) -> None:
    assert spark_quiet(host, ports=[1]) == []
    start(host, unit("C1"))
    assert spark_quiet(host) == [f"alpha: {unit('C1')} holds a process"]
    assert spark_quiet(host, scopes=[unit("C1")]) == []
    end_scopes(host, [unit("C1")], name="end")
    assert spark_quiet(host) == []


# -- names --


@pytest.mark.parametrize("bad", ["", "-rf", "a b", "a/b", "$(x)", "a\nb", "ü", "a" * 129, "a%b"])
def test_a_name_that_a_unit_could_not_carry_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="valid: letters, digits"):
        ScopeName(bad, 1, "C1")
    with pytest.raises(UsageError, match="valid: letters, digits"):
        ScopeName("tag", 1, bad)


@pytest.mark.parametrize(
    "bad", ["", "chain-1", OWNER + "0", OWNER.upper(), f"{OWNER}\n", "chain-20260101T000000Z-x"]
)
def test_an_owner_that_is_no_chains_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="valid: chain-<YYYYMMDD>"):
        check_owner(bad)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(tag=NAMES, epoch=st.integers(0, 10**9), what=NAMES)
def test_a_units_name_tells_its_parts(tag: str, epoch: int, what: str) -> None:
    name = ScopeName(tag, epoch, what)
    assert ScopeName.parse(name.unit) == name


@given(st.text(max_size=30))
def test_any_other_name_is_no_windows_scope(text: str) -> None:
    parsed = ScopeName.parse(text)
    assert parsed is None or parsed.unit == text
