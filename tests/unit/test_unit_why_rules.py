"""What `why` concludes from given facts, and that no journal record can make it fall over."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.unit.systemd import ExecCommand, Loaded
from pytest_dsv41.unit.why import CAUSES, JournalLine, explain, parse_record

NOW = 1_700_000_000_000_000


def loaded(**given: Any) -> Loaded:
    facts: dict[str, Any] = {
        "load_state": "loaded", "load_error": "", "active_state": "failed", "sub_state": "failed",
        "result": "exit-code", "unit_file_state": "", "fragment": "/a.service", "drop_ins": (),
        "names": ("a.service",), "need_daemon_reload": False, "environment": {},
        "environment_files": (), "commands": {}, "main_pid": 0, "main_started_us": 0,
        "main_code": 0, "main_status": 0, "restarts": 0, "invocation": "", "properties": {},
    }  # fmt: skip
    return Loaded(**{**facts, **given})


def command(code: int, status: int) -> dict[str, tuple[ExecCommand, ...]]:
    ran = ExecCommand("/bin/x", ("/bin/x", "--token", "s3"), (), NOW, NOW + 50_000, 9, code, status)
    return {"ExecStart": (ran,)}


def test_without_a_journal_systemds_own_record_decides() -> None:
    told = explain(loaded(commands=command(2, 11)), [], now_us=NOW)
    assert told.cause == "CRASH"
    assert "SIGSEGV" in told.said
    told = explain(loaded(commands=command(1, 203)), [], now_us=NOW)
    assert told.cause == "WRONG CONFIGURATION"
    assert "203 (EXEC)" in told.said or "(EXEC)" in told.said
    assert "s3" not in told.said
    told = explain(loaded(main_code=2, main_status=6), [], now_us=NOW)
    assert "SIGABRT" in told.said


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("watchdog", "watchdog"),
        ("timeout", "in time"),
        ("oom-kill", "memory"),
        ("protocol", "ready"),
    ],
)
def test_a_crash_says_which_kind(result: str, words: str) -> None:
    told = explain(loaded(result=result, commands=command(2, 9)), [], now_us=NOW)
    assert told.cause == "CRASH"
    assert words in told.said


@pytest.mark.parametrize(
    ("age_s", "restarts", "cause"),
    [(59, 2, "BOOT LOOP"), (61, 2, "RUNNING"), (5, 1, "RUNNING"), (5, 0, "RUNNING")],
)
def test_a_young_process_after_several_restarts_is_a_loop(
    age_s: int, restarts: int, cause: str
) -> None:
    facts = loaded(
        active_state="active",
        sub_state="running",
        result="success",
        main_pid=5,
        main_started_us=NOW - age_s * 1_000_000,
        restarts=restarts,
        main_code=2,
        main_status=6,
    )
    assert explain(facts, [], now_us=NOW).cause == cause


def test_other_words_each_time_are_no_refusal() -> None:
    def run(number: int, said: str) -> list[JournalLine]:
        name = str(number) * 4
        at = NOW + number * 1_000_000
        ended = JournalLine(at + 40_000, "", True, 5, name, "ExecStart", 1, 1)
        return [JournalLine(at, said, False, 6, name), ended]

    facts = loaded(active_state="activating", sub_state="auto-restart", restarts=3)
    same = [line for n in range(3) for line in run(n, f"cap is 1259{n} MiB")]
    assert explain(facts, same, now_us=NOW).cause == "PREFLIGHT REFUSAL"
    other = [line for n, word in enumerate(["a", "b", "c"]) for line in run(n, word)]
    assert explain(facts, other, now_us=NOW).cause == "BOOT LOOP"
    once = run(0, "cap")
    assert explain(loaded(), once, now_us=NOW).cause == "CRASH"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = st.sampled_from(
    ["MESSAGE", "MESSAGE_ID", "PRIORITY", "UNIT", "COMMAND", "EXIT_CODE", "EXIT_STATUS",
     "CONFIG_FILE", "CONFIG_LINE", "_SYSTEMD_INVOCATION_ID", "__REALTIME_TIMESTAMP"]
)  # fmt: skip


@given(
    st.lists(st.dictionaries(_KEYS, _JSON, max_size=8) | _JSON, max_size=6),
    st.sampled_from(["failed", "activating", "active", "inactive"]),
    st.sampled_from(["success", "exit-code", "signal", "start-limit-hit", "resources"]),
    st.integers(0, 3),
)
def test_any_journal_gives_an_answer(
    records: list[Any], state: str, result: str, restarts: int
) -> None:
    lines = [line for r in records if (line := parse_record(json.dumps(r))) is not None]
    facts = loaded(active_state=state, result=result, restarts=restarts)
    told = explain(facts, lines, now_us=NOW)
    assert told.cause in CAUSES
    assert all("\n" not in line and "\x1b" not in line for line in (told.said, *told.lines))


def test_a_message_of_bytes_and_no_json() -> None:
    record = parse_record('{"MESSAGE": [104, 105, 255], "UNIT": "a.service"}')
    assert record is not None
    assert record.message == "hi\ufffd"
    assert record.manager
    assert parse_record("-- No entries --") is None


def test_a_record_that_a_process_forges_repeats_no_words_of_its_own() -> None:
    """Any process of the unit may write a record in the form of systemd's."""
    forged = {
        "MESSAGE_ID": "98e322203f7a4ed290d09fe03c09fe15",  # systemd's: a unit's process exited
        "COMMAND": "Exec\x1b[2JStart",
        "EXIT_CODE": "exited",
        "EXIT_STATUS": "7",
        "MESSAGE": "\x1b[2J",
    }
    line = parse_record(json.dumps(forged))
    assert line is not None
    assert (line.code, line.status, line.command) == (1, 7, "")
    told = explain(loaded(active_state="failed", result="exit-code"), [line], now_us=NOW)
    assert "its process ended by exit code 7" in told.said
    assert "\x1b" not in "".join((told.said, *told.lines))
    assert parse_record("[" * 100_000) is None
