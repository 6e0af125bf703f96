"""A row: every field's rule, refused by name, and nothing written by a refused batch."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_dsv41.archive import (
    ArchiveError,
    Head,
    KeyConflict,
    RowRefused,
    archive_append,
    archive_head,
    archive_rows,
    prompt_identity,
)
from pytest_dsv41.archive.rows import FIELDS, encode, fields_text, normalise, prepare, row_key
from pytest_dsv41.archive.testing import example_row

MEMBERS = [hashlib.sha256(text).hexdigest() for text in (b"b", b"a", b"b")]
IDENTITY = hashlib.sha256("\n".join(sorted(MEMBERS)).encode()).hexdigest()


def test_prompt_identity_of_one_is_itself_and_of_several_the_hash_of_the_sorted() -> None:
    assert prompt_identity([MEMBERS[0]]) == MEMBERS[0]
    assert prompt_identity(MEMBERS) == IDENTITY
    assert prompt_identity(reversed(MEMBERS)) == IDENTITY


def test_the_head_of_no_archive_is_no_rows_and_64_zeros(tmp_path: Path) -> None:
    assert archive_head(tmp_path / "none.jsonl") == Head(0, "0" * 64)
    assert archive_rows(tmp_path / "none.jsonl") == []
    assert archive_append(tmp_path / "none.jsonl", []) == Head(0, "0" * 64)
    assert not (tmp_path / "none.jsonl").exists()


def test_rows_come_back_as_they_were_given(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    rows = [
        example_row(0),
        example_row(1, value=7),
        example_row(2, clock_cap_mhz=1, clock_source="none"),
        example_row(3, clock_source=None),
        example_row(4, clock_caps_mhz=[2150, 2300], clock_source="clock-log"),
        example_row(5, clock_caps_mhz="unknown"),
        example_row(6, cell="32k-b3", prompt_sha256=IDENTITY, prompt_members=MEMBERS),
        example_row(7, window="läne-1", schema="dsv41-control-archive-v4"),
    ]
    head = archive_append(archive, rows)
    rows[7].pop("schema")
    assert archive_rows(archive) == rows
    assert head == archive_head(archive)
    assert head.rows == 8
    assert type(archive_rows(archive, {"repeat": 1})[0]["value"]) is int


def test_each_line_carries_its_number_its_hash_and_the_hash_before_it(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    head = archive_append(archive, [example_row(i) for i in range(3)])
    previous = "0" * 64
    for number, line in enumerate(archive.read_bytes().splitlines(), start=1):
        row = json.loads(line)
        body = line[: line.index(b',"sha256":')]
        assert row["schema"] == "dsv41-control-archive-v4"
        assert row["seq"] == number
        assert row["prev_sha256"] == previous
        assert row["sha256"] == hashlib.sha256(body).hexdigest()
        previous = row["sha256"]
    assert head == Head(3, previous)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("missing field", {"date": None}, "missing date"),
    ("39-hex commit", {"commit": "a" * 39}, "commit: must be 40 lower-case hex digits"),
    ("upper-case commit", {"commit": "A" * 40}, "commit: must be 40 lower-case hex digits"),
    ("41-hex commit", {"commit": "a" * 41}, "commit: must be 40"),
    ("commit with newline", {"commit": "a" * 40 + "\n"}, "commit: must be 40"),
    ("clock 0", {"clock_cap_mhz": 0}, "clock_cap_mhz: must be a positive integer"),
    ("clock list", {"clock_cap_mhz": [2150, 2300]}, "clock_cap_mhz: must be a positive integer"),
    ("clock float", {"clock_cap_mhz": 2150.0}, "clock_cap_mhz: must be a positive integer"),
    ("NaN", {"value": math.nan}, "value: must be finite, got nan"),
    ("infinity", {"value": -math.inf}, "value: must be finite"),
    ("huge integer", {"value": 10**400}, "value: must be finite"),
    ("text value", {"value": "50.1"}, "value: must be a number"),
    ("bool value", {"value": True}, "value: must be a number"),
    ("impossible date", {"date": "20260230"}, "date: must be a date YYYYMMDD that exists"),
    ("date with dashes", {"date": "2026-02-03"}, "date: must be a date YYYYMMDD"),
    ("date as number", {"date": 20260203}, "date: must be a date YYYYMMDD"),
    ("other digits", {"date": "２０２６１０２７"}, "date: must be a date YYYYMMDD"),
    ("bool tokens", {"max_tokens": True}, "max_tokens: must be a positive integer"),
    ("no tokens", {"max_tokens": 0}, "max_tokens: must be a positive integer"),
    ("too many tokens", {"max_tokens": 2**60}, "max_tokens: must be a positive integer"),
    ("negative repeat", {"repeat": -1}, "repeat: must be an integer from 0"),
    ("bool repeat", {"repeat": False}, "repeat: must be an integer from 0"),
    ("empty start", {"start": ""}, "start: must have 1 to 200 characters"),
    ("escape in a name", {"cell": "a\x1b[2J"}, "cell: must be printable"),
    ("lone surrogate", {"cell": "a\ud800"}, "cell: must be printable"),
    ("number as window", {"window": 3}, "window: must be a string"),
    ("10 MB string", {"metric": "m" * 10_000_000}, "metric: must have 1 to 200 characters"),
    ("10 MB commit", {"commit": "a" * 10_000_000}, "commit: must be 40"),
    ("short prompt", {"prompt_sha256": "b" * 63}, "prompt_sha256: must be 64 lower-case hex"),
    ("wrong prompt", {"prompt_members": MEMBERS}, "prompt_sha256: is not the identity of its 3"),
    ("no members", {"prompt_members": []}, "prompt_members: must be a list of prompt hashes"),
    ("bad member", {"prompt_members": ["x"]}, "prompt_members: must list hashes"),
    ("unknown source", {"clock_source": "guess"}, "clock_source: must be one of start-log,"),
    ("source none, cap 2150", {"clock_source": "none"}, "clock_cap_mhz: must be 1 where"),
    ("bad caps", {"clock_caps_mhz": [0]}, "clock_caps_mhz: must list positive integers"),
    ("caps text", {"clock_caps_mhz": "2150"}, "clock_caps_mhz: must be a list of MHz, or"),
    ("unknown field", {"experiment_commit": "a" * 40}, "'experiment_commit': unknown field"),
    ("chain field", {"prev_sha256": "a" * 64}, "prev_sha256: the chain's own field"),
    ("v3 row", {"schema": "dsv41-control-archive-v3"}, "is not dsv41-control-archive-v4"),
]


@pytest.mark.parametrize(
    ("changes", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_bad_row_is_refused_by_name_and_its_batch_is_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    archive = tmp_path / "a.jsonl"
    archive_append(archive, [example_row(0)])
    before = archive.read_bytes()
    with pytest.raises(RowRefused) as refused:
        archive_append(archive, [example_row(1), example_row(2, **changes)])
    text = str(refused.value)
    assert message in text
    assert text.startswith("row 1: ")
    assert len(text) < 600
    assert "\n" not in text
    assert archive.read_bytes() == before


@pytest.mark.parametrize("rows", [[None], ["row"], [[1]], example_row(0), "rows"])
def test_what_is_no_list_of_rows_is_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(RowRefused, match="must be"):
        archive_append(tmp_path / "a.jsonl", rows)
    assert not (tmp_path / "a.jsonl").exists()


def test_the_same_rows_again_change_nothing(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    rows = [example_row(i) for i in range(4)]
    head = archive_append(archive, rows)
    before = archive.read_bytes()
    assert archive_append(archive, rows) == head
    assert archive_append(archive, rows[2:]) == head
    assert archive.read_bytes() == before
    assert archive_append(archive, [*rows, example_row(4), example_row(4)]).rows == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": 9.5}, "line 2 has this key and differs: value 9.5 against 50.375"),
        ({"commit": "c" * 40}, "differs: commit 'cccc"),
        ({"clock_source": None}, "differs: clock_source None against 'start-log'"),
    ],
)
def test_the_same_key_with_other_contents_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    archive = tmp_path / "a.jsonl"
    archive_append(archive, [example_row(i) for i in range(3)])
    before = archive.read_bytes()
    with pytest.raises(KeyConflict) as refused:
        archive_append(archive, [example_row(7), example_row(1, **changes)])
    assert message in str(refused.value)
    assert "DEMO-a-W-20261027T181314Z, short-b1, ms_per_round, C1, 1" in str(refused.value)
    assert archive.read_bytes() == before


def test_two_rows_of_one_key_in_a_batch_must_agree(tmp_path: Path) -> None:
    with pytest.raises(KeyConflict, match=r"row 1: .*an earlier row has this key"):
        archive_append(tmp_path / "a.jsonl", [example_row(0), example_row(0, value=1)])
    assert not (tmp_path / "a.jsonl").exists()


def test_where_picks_by_any_field_and_refuses_unknown_ones(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    rows = [example_row(i, start=f"C{i % 2}", date=f"2026102{i}") for i in range(6)]
    archive_append(archive, rows)
    assert archive_rows(archive, {"start": "C1"}) == rows[1::2]
    assert archive_rows(archive, {"date": "20261024"}) == [rows[4]]
    assert archive_rows(archive, {"date": ["20261024", "20261021"], "start": "C1"}) == [rows[1]]
    assert archive_rows(archive, {"repeat": []}) == []
    assert archive_rows(archive, {"clock_source": "none"}) == []
    with pytest.raises(ArchiveError, match="where: max_tokens: must be a text or an integer"):
        archive_rows(archive, {"max_tokens": 10**40})
    with pytest.raises(ArchiveError, match="where: 'clock': unknown field; valid: cell, metric"):
        archive_rows(archive, {"clock": 2150})


def test_a_symbolic_link_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    archive_append(tmp_path / "a.jsonl", [example_row(0)])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    for work in (lambda p: archive_append(p, [example_row(1)]), archive_head, archive_rows):
        with pytest.raises(ArchiveError, match="is a symbolic link"):
            work(tmp_path / "b.jsonl")
    with pytest.raises(ArchiveError, match="its folder does not exist"):
        archive_append(tmp_path / "none" / "a.jsonl", [example_row(0)])


def test_importing_the_archive_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import sys, pytest_dsv41.archive\n"
        "heavy = {'numpy', 'scipy', 'pandas', 'pyarrow', 'pydantic', 'pytest'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize(
    "row",
    [
        example_row(3),
        example_row(3, clock_source=None),
        example_row(3, clock_cap_mhz=1, clock_source="none"),
        example_row(3, value=7),
        example_row(3, value=-0.0),
        example_row(3, value=1e-300),
        example_row(3, window="läne", cell='quo"te', start="\\"),
        example_row(3, prompt_members=MEMBERS, prompt_sha256=IDENTITY),
        example_row(3, clock_caps_mhz=[1, 2], clock_source=None),
        example_row(3, schema="dsv41-control-archive-v4"),
        dict(reversed(example_row(3).items())),
    ],
)
def test_the_short_way_through_a_row_writes_what_the_long_one_does(row: dict[str, Any]) -> None:
    prepared = prepare(row, 0)
    plain = normalise(row)
    assert prepared.row == plain
    assert prepared.key == row_key(plain)
    assert prepared.text == fields_text(plain)
    assert json.loads("{" + prepared.text + "}") == plain
    line, sha = encode(plain, seq=7, prev="0" * 64, batch=2)
    assert list(json.loads(line)) == [
        *("schema", "seq", "prev_sha256"),
        *(field for field in FIELDS if field in plain),
        *("batch", "sha256"),
    ]
    assert line.decode().endswith(f',"batch":2,"sha256":"{sha}"}}\n')


class Text(str):
    """A text of a type of its own, as numpy's are."""


def test_values_of_other_types_are_written_as_plain_ones(tmp_path: Path) -> None:
    row = example_row(0, cell=Text("short-b1"), value=np.float64(50.5), clock_source=Text("none"))
    row["clock_cap_mhz"] = 1
    archive_append(tmp_path / "a.jsonl", [row])
    (found,) = archive_rows(tmp_path / "a.jsonl")
    assert (found["cell"], found["value"], found["clock_source"]) == ("short-b1", 50.5, "none")
    assert b'"value":50.5,' in (tmp_path / "a.jsonl").read_bytes()
