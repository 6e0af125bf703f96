"""The knob gate: below, above, absent, unreadable, garbage; as root and as another user.

Figures are those of FRANK-ARCHON's outage: 32,253,039 pages of 4 KiB are 125,988 MiB, below a
floor of 150,000; the target of 204,800 MiB is 52,428,800 pages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.unit import UNITS, KnobReport, check_knobs

FELL_TO, RAISED_TO = 32_253_039, 52_428_800
FLOOR, TARGET = 150_000, 204_800
NOBODY = 65534
four_kib = pytest.mark.skipif(UNITS["pages"] != 4096, reason="the document's pages are of 4 KiB")


@pytest.fixture(params=["root", "another user"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder everybody may enter; the test runs as root or as nobody."""
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("needs root: run the tests as root")
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o777)
    switched = request.param == "another user" and os.geteuid() == 0
    if switched:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield made
    finally:
        if switched:
            os.seteuid(0)
            os.setegid(0)
        shutil.rmtree(made)


def knob(folder: Path, name: str, text: str | int) -> Path:
    path = folder / name
    path.write_text(f"{text}\n")
    return path


def gate(*paths: Path, raises: bool = True, unit: str = "pages") -> KnobReport:
    return check_knobs(paths, unit=unit, floor_mib=FLOOR, target_mib=TARGET, raise_knobs=raises)


@four_kib
def test_below_the_floor_is_raised_to_the_target_and_passes(folder: Path) -> None:
    path = knob(folder, "pages_limit", FELL_TO)
    report = gate(path)
    assert report.passed
    assert path.read_text() == f"{RAISED_TO}\n"
    assert report.cap_mib == TARGET
    assert "125988 MiB" in report.lines[0]
    assert str(RAISED_TO) in report.lines[0]


@four_kib
def test_without_raise_nothing_is_written(folder: Path) -> None:
    path = knob(folder, "pages_limit", FELL_TO)
    report = gate(path, raises=False)
    assert not report.passed
    assert path.read_text() == f"{FELL_TO}\n"
    assert (report.cap_mib, report.written) == (125_988, ())
    assert "pages_limit" in report.lines[-1]


def test_above_and_exactly_at_the_floor_nothing_is_written(folder: Path) -> None:
    exact = FLOOR * 2**20 // UNITS["pages"]
    path = knob(folder, "pages_limit", exact)
    before = path.stat()
    assert gate(path).passed
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    path.write_text(f"{exact - 1}\n")
    assert not gate(path, raises=False).passed


@four_kib
def test_the_cap_is_the_smallest_knob_and_an_absent_one_is_no_zero(folder: Path) -> None:
    low = knob(folder, "pages_limit", FELL_TO)
    high = knob(folder, "pages_pool", 60_000_000)
    absent = folder / "pages_max"
    assert gate(high, absent, raises=False).passed
    assert not gate(high, low, raises=False).passed
    assert gate(absent, low, high).passed
    # Raising never lowers.
    assert (low.read_text(), high.read_text()) == (f"{RAISED_TO}\n", "60000000\n")
    assert not absent.exists()


def test_no_knob_at_all_is_refused(folder: Path) -> None:
    report = gate(folder / "one", folder / "none" / "two")
    assert not report.passed
    assert report.cap_mib is None
    assert "one" in report.lines[-1]
    assert "two" in report.lines[-1]


@pytest.mark.parametrize("text", ["", "max", "-1", "0x10", "12 13", "1.5", "٣", "9" * 21, "1_0"])
def test_garbage_is_refused_and_nothing_is_written(folder: Path, text: str) -> None:
    bad = knob(folder, "pages_limit", text)
    low = knob(folder, "pages_pool", 1)
    report = gate(bad, low)
    assert not report.passed
    assert report.cap_mib is None
    assert (bad.read_text(), low.read_text()) == (f"{text}\n", "1\n")
    assert any("pages_limit" in line and "no count" in line for line in report.lines)


def test_a_folder_or_a_pipe_is_no_knob_and_does_not_wait(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert not gate(folder / "pipe").passed
    assert not gate(folder).passed


def test_a_knob_that_refuses_is_named_and_the_other_is_raised(folder: Path) -> None:
    """A knob of the running kernel that nobody may write, root neither."""
    fixed = Path("/proc/sys/kernel/ngroups_max")
    value = int(fixed.read_text())
    mib = value * UNITS["pages"] // 2**20
    open_knob = knob(folder, "pages_limit", 7)
    report = check_knobs(
        [open_knob, fixed], unit="pages", floor_mib=mib + 1, target_mib=mib + 2, raise_knobs=True
    )
    assert not report.passed
    assert int(open_knob.read_text()) * UNITS["pages"] == (mib + 2) * 2**20
    assert int(fixed.read_text()) == value
    assert report.written == (open_knob,)
    (refusal,) = (line for line in report.lines if line.startswith("REFUSED"))
    assert "ngroups_max" in refusal
    assert "pages_limit" not in refusal


def test_a_file_without_write_permission_refuses_another_user(folder: Path) -> None:
    path = knob(folder, "pages_limit", 7)
    path.chmod(0o444)
    report = gate(path)
    if os.geteuid() == 0:
        assert report.passed
    else:
        assert not report.passed
        assert path.read_text() == "7\n"
        assert "Permission denied" in report.lines[-1]


def test_an_unreadable_knob_is_refused_and_nothing_is_written(folder: Path) -> None:
    # Write-only for root as well: the cap behind it cannot be known.
    hidden = Path("/proc/sys/vm/compact_memory")
    if not hidden.exists():
        pytest.skip("this kernel has no write-only knob")
    low = knob(folder, "pages_limit", 7)
    report = gate(hidden, low)
    assert not report.passed
    assert report.cap_mib is None
    assert low.read_text() == "7\n"
    assert any("compact_memory" in line and "cannot be read" in line for line in report.lines)


@given(
    values=st.lists(st.none() | st.integers(0, 2**40), min_size=1, max_size=4),
    floor=st.integers(1, 2**20),
    more=st.integers(0, 2**20),
    unit=st.sampled_from(sorted(UNITS)),
    raises=st.booleans(),
)
def test_the_rule_for_any_knobs(
    values: list[int | None], floor: int, more: int, unit: str, raises: bool
) -> None:
    with tempfile.TemporaryDirectory() as made:
        paths = [Path(made) / str(n) for n in range(len(values))]
        for path, value in zip(paths, values, strict=True):
            if value is not None:
                path.write_text(str(value))
        report = check_knobs(
            paths, unit=unit, floor_mib=floor, target_mib=floor + more, raise_knobs=raises
        )
        there = [value for value in values if value is not None]
        enough = bool(there) and min(there) * UNITS[unit] >= floor * 2**20
        assert report.passed == (enough or (raises and bool(there)))
        assert [p.exists() for p in paths] == [value is not None for value in values]
        for path, value in zip(paths, values, strict=True):
            if value is not None:
                now = int(path.read_text())
                assert now >= value
                if enough or not raises:
                    assert now == value
                else:
                    assert now * UNITS[unit] >= (floor + more) * 2**20


@pytest.mark.parametrize(
    ("unit", "floor", "target", "told"),
    [("page", 1, 1, "valid: pages"), ("pages", 0, 1, "at least 1"), ("pages", 2, 1, "below")],
)
def test_wrong_use_is_named(unit: str, floor: int, target: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_knobs([Path("x")], unit=unit, floor_mib=floor, target_mib=target)


def test_the_command_answers_0_2_and_4(tmp_path: Path) -> None:
    path = knob(tmp_path, "pages_limit", 7)

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest_dsv41", "knob-gate", "--knob", str(path), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    words = ("--unit", "mib", "--floor-mib", "8")
    assert run(*words, "--target-mib", "9")[0] == 2
    assert path.read_text() == "7\n"
    code, said = run(*words, "--target-mib", "9", "--raise")
    assert (code, path.read_text()) == (0, "9\n")
    assert "PASS" in said
    assert run(*words, "--target-mib", "7")[0] == 4


def test_a_knobs_name_reaches_no_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["knob-gate", "--floor-mib", "1", "--target-mib", "2", "--knob"]
    assert main([*words, str(tmp_path / "a\x1b[2J")]) == 2
    told = capsys.readouterr().err
    assert "\\x1b[2J" in told
    assert "\x1b" not in told
