"""What people read: counts with their noun, errors without the numbers that Python puts before."""

from __future__ import annotations

import errno
import os

import pytest

from pytest_dsv41.text import counted, error_line


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1204, "1,204 rows")]
)
def test_a_count_has_its_noun_in_the_right_number(count: int, shown: str) -> None:
    assert counted(count, "row") == shown


def test_an_irregular_plural_is_given() -> None:
    assert (counted(1, "entry", "entries"), counted(3, "entry", "entries")) == (
        "1 entry",
        "3 entries",
    )


def test_an_error_says_its_reason_and_its_file() -> None:
    code = errno.ENOENT
    assert error_line(OSError(code, os.strerror(code), "a.toml")) == (
        "No such file or directory: 'a.toml'"
    )
    assert error_line(ConnectionError(f"[Errno {errno.EHOSTUNREACH}] No route to host")) == (
        "No route to host"
    )
    assert error_line(TimeoutError()) == "TimeoutError"
    assert error_line(ValueError("line 3\nsays \x1b[31m")) == "line 3 says \\x1b[31m"
    assert error_line(ValueError("a" * 20), 5).startswith("aaaaa …")
