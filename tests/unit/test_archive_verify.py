"""The tamper matrix: each change is named, with its line; what needs a checkpoint says so."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_dsv41.archive import (
    ArchiveError,
    ChainBroken,
    Head,
    RolledBack,
    WrongSchema,
    archive_append,
    archive_head,
    archive_rows,
    iter_rows,
)
from pytest_dsv41.archive.index import index_path
from pytest_dsv41.archive.rows import encode
from pytest_dsv41.archive.testing import example_row
from pytest_dsv41.archive.verify import Checkpoint, read_checkpoints, verify_archive
from pytest_dsv41.cli import main

BATCHES = (4, 3, 1, 2)


def build(archive: Path, *, window: str = "DEMO-a-W-20261027T181314Z") -> list[Head]:
    """Make an archive of ten rows in four appends; return the head after each."""
    heads, first = [], 0
    for size in BATCHES:
        rows = [example_row(i, window=window) for i in range(first, first + size)]
        heads.append(archive_append(archive, rows))
        first += size
    return heads


def rehash(line: bytes) -> bytes:
    """Give a changed line a sha256 that matches it, as a careful forger would."""
    body = line[: line.index(b',"sha256":')]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def edit(lines: list[bytes]) -> list[bytes]:
    lines[4] = lines[4].replace(b'"value":', b'"value":1')
    return lines


def edit_rehashed(lines: list[bytes]) -> list[bytes]:
    lines[4] = rehash(lines[4].replace(b'"value":', b'"value":1'))
    return lines


def edit_last_rehashed(lines: list[bytes]) -> list[bytes]:
    lines[9] = rehash(lines[9].replace(b'"value":', b'"value":1'))
    return lines


def edit_first_byte(lines: list[bytes]) -> list[bytes]:
    lines[4] = b"\0" + lines[4][1:]
    return lines


def blank(lines: list[bytes]) -> list[bytes]:
    lines[4] = b"\n"
    return lines


def delete(lines: list[bytes]) -> list[bytes]:
    del lines[4]
    return lines


def delete_first(lines: list[bytes]) -> list[bytes]:
    return lines[2:]


def swap(lines: list[bytes]) -> list[bytes]:
    lines[4], lines[5] = lines[5], lines[4]
    return lines


def swap_far(lines: list[bytes]) -> list[bytes]:
    lines[1], lines[8] = lines[8], lines[1]
    return lines


def duplicate(lines: list[bytes]) -> list[bytes]:
    return [*lines[:5], lines[4], *lines[5:]]


def duplicate_at_end(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[2]]


def forge(lines: list[bytes]) -> list[bytes]:
    line, _ = encode(example_row(77), seq=11, prev="1" * 64, batch=1)
    return [*lines, line]


def forge_unhashed(lines: list[bytes]) -> list[bytes]:
    line, _ = encode(example_row(77), seq=11, prev="1" * 64, batch=1)
    return [*lines, line.replace(b'"value":', b'"value":1')]


def forge_without_newline(lines: list[bytes]) -> list[bytes]:
    return [*lines, b'{"window":"x"}']


def v3_row(lines: list[bytes]) -> list[bytes]:
    row = {"schema": "dsv41-control-archive-v3", **example_row(77, prompt_sha256=None)}
    return [*lines, json.dumps(row).encode() + b"\n"]


def v3_row_inside(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], *v3_row([]), *lines[4:]]


MATRIX: list[tuple[Callable[[list[bytes]], list[bytes]], str, int]] = [
    (edit, "edited", 5),
    (edit_rehashed, "edited", 5),
    (edit_first_byte, "edited", 5),
    (blank, "edited", 5),
    (delete, "deleted", 5),
    (delete_first, "deleted", 1),
    (swap, "swapped", 5),
    (swap_far, "swapped", 2),
    (duplicate, "duplicated", 6),
    (duplicate_at_end, "duplicated", 11),
    (forge, "forged", 11),
    (forge_unhashed, "forged", 11),
    (forge_without_newline, "forged", 11),
    (v3_row, "foreign row", 11),
    (v3_row_inside, "foreign row", 5),
]


@pytest.mark.parametrize(
    ("change", "name", "line"), MATRIX, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_change_is_named_with_its_first_line_and_nothing_reads_or_appends_past_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[list[bytes]], list[bytes]],
    name: str,
    line: int,
) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    archive.write_bytes(b"".join(change(archive.read_bytes().splitlines(keepends=True))))
    changed = archive.read_bytes()
    found = verify_archive(archive)
    assert not found.ok
    assert (found.findings[0].change, found.findings[0].line) == (name, line)
    assert found.findings[0].message.startswith(f"a.jsonl: line {line}: {name}: ")
    assert found.head.rows == line - 1
    assert any("no checkpoint was given" in note for note in found.notes)
    with pytest.raises(ChainBroken) as broken:
        archive_rows(archive)
    assert (broken.value.line, broken.value.change) == (line, name)
    with pytest.raises(ChainBroken):
        archive_append(archive, [example_row(50)])
    with pytest.raises(ChainBroken):
        archive_head(archive)
    assert archive.read_bytes() == changed
    assert main(["archive", "verify", str(archive)]) == 1
    assert f"line {line}: {name}" in capsys.readouterr().out


def test_a_rewritten_last_row_is_a_row_that_only_a_checkpoint_can_question(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    heads = build(archive)
    archive.write_bytes(
        b"".join(edit_last_rehashed(archive.read_bytes().splitlines(keepends=True)))
    )
    found = verify_archive(archive)
    assert found.ok
    assert any("no checkpoint was given" in note for note in found.notes)
    found = verify_archive(archive, [Checkpoint(head, "s") for head in heads])
    assert [finding.change for finding in found.findings] == ["forged"]
    assert "rewritten after row 8" in found.findings[0].message


def test_an_untouched_archive_verifies_and_says_what_cannot_be_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "a.jsonl"
    heads = build(archive)
    found = verify_archive(archive)
    assert (found.ok, found.head, found.findings) == (True, heads[-1], ())
    assert found.notes == (
        "no checkpoint was given: rows cut off where an append ended, an older copy or another "
        "archive's copy cannot be seen (--checkpoints)",
    )
    assert main(["archive", "verify", str(archive)]) == 0
    assert "10 rows" in capsys.readouterr().out
    found = verify_archive(archive, [Checkpoint(head, "s") for head in heads], fields=True)
    assert (found.ok, found.notes) == (True, ())
    found = verify_archive(archive, [Checkpoint(heads[1], "s")])
    assert found.notes == ("3 rows newer than the newest checkpoint (row 7)",)


def test_any_byte_that_is_changed_added_or_lost_is_found_at_its_line(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    data = archive.read_bytes()
    chance = random.Random(3)
    for _ in range(150):
        place = chance.randrange(len(data))
        line = data[:place].count(b"\n") + 1
        other = bytes([data[place] ^ chance.randrange(1, 256)])
        for changed in (
            data[:place] + other + data[place + 1 :],
            data[:place] + other + data[place:],
            data[:place] + data[place + 1 :],
        ):
            if changed in (data, data[:-1] + b"\n"):
                continue
            archive.write_bytes(changed)
            found = verify_archive(archive)
            # The NUL of an append that was never committed is the one byte that is no fault.
            if found.ok:
                assert changed[changed.rindex(b"\n", 0, place) + 1 : place + 1] == b"\0"
                assert line == 9
                continue
            where = found.findings[0].line
            assert where is not None
            assert line - 1 <= where <= line + 1


def test_a_cut_where_an_append_ended_needs_a_checkpoint(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    heads = build(archive)
    lines = archive.read_bytes().splitlines(keepends=True)
    archive.write_bytes(b"".join(lines[:8]))
    assert verify_archive(archive).ok
    assert "cannot be seen" in verify_archive(archive).notes[0]
    found = verify_archive(archive, [Checkpoint(heads[3], "a summary")])
    assert [finding.change for finding in found.findings] == ["truncated"]
    assert "ends at row 8: truncated; a summary knows 10 rows, 2 are missing" in str(
        found.findings[0].message
    )


def test_a_cut_inside_an_append_is_seen_without_a_checkpoint_and_stays_seen(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    lines = archive.read_bytes().splitlines(keepends=True)
    archive.write_bytes(b"".join(lines[:6]))
    found = verify_archive(archive)
    assert [(f.change, f.line) for f in found.findings] == [("truncated", 7)]
    head = archive_append(archive, [example_row(90), example_row(91)])
    assert head.rows == 8
    found = verify_archive(archive)
    assert [(f.change, f.line) for f in found.findings] == [("truncated", 7)]
    assert "lost its last 1 row, later rows were appended behind the cut" in str(
        found.findings[0].message
    )
    # Somebody has seen it and recorded the head since: a note, no longer a finding.
    found = verify_archive(archive, [Checkpoint(head, "later")])
    assert found.ok
    assert "a later checkpoint accepts this" in found.notes[0]


def test_an_older_copy_and_another_archives_copy_are_told_apart(tmp_path: Path) -> None:
    archive, other = tmp_path / "a.jsonl", tmp_path / "other.jsonl"
    heads = build(archive)
    build(other, window="OTHER-a-W-20261027T181314Z")
    points = [Checkpoint(head, f"window {i}") for i, head in enumerate(heads)]
    lines = archive.read_bytes().splitlines(keepends=True)
    archive.write_bytes(b"".join(lines[:7]))
    found = verify_archive(archive, points)
    assert [finding.change for finding in found.findings] == ["older copy"]
    assert "an older copy, as window 1 knew it; window 3 knows 10 rows" in found.findings[0].message
    archive.write_bytes(other.read_bytes())
    assert verify_archive(archive).ok
    found = verify_archive(archive, points)
    assert [finding.change for finding in found.findings] == ["another archive"]
    assert found.findings[0].message.startswith(
        "a.jsonl: row 4 is not the one that window 0 knows: another archive's copy"
    )


def test_an_append_refuses_a_file_that_is_older_than_a_known_checkpoint(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    heads = build(archive)
    whole = archive.read_bytes()
    lines = whole.splitlines(keepends=True)
    archive.write_bytes(b"".join(lines[:7]))
    with pytest.raises(RolledBack, match="has 7 rows, a checkpoint knows 10"):
        archive_append(archive, [example_row(60)], checkpoints=heads)
    cut = b"".join(lines[:7]) + lines[7][:50]
    archive.write_bytes(cut)
    with pytest.raises(RolledBack, match="has 7 rows, a checkpoint knows 10"):
        archive_append(archive, [example_row(60)], checkpoints=heads)
    assert archive.read_bytes() == cut
    archive.write_bytes(whole[:-1])
    assert archive_append(archive, [example_row(9)], checkpoints=heads) == heads[-1]
    archive.unlink()
    with pytest.raises(RolledBack, match="has 0 rows, a checkpoint knows 10"):
        archive_append(archive, [example_row(60)], checkpoints=heads)
    assert not archive.exists()
    build(archive, window="OTHER-a-W-20261027T181314Z")
    with pytest.raises(RolledBack, match="row 10 is not the one a checkpoint knows"):
        archive_append(archive, [example_row(60)], checkpoints=[heads[3]])
    archive.write_bytes(whole)
    assert archive_append(archive, [example_row(60)], checkpoints=heads).rows == 11


def test_a_folder_is_no_archive_and_gets_no_files_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    for use in (
        lambda: archive_append(folder, [example_row(0)]),
        lambda: archive_head(folder),
        lambda: archive_rows(folder),
        lambda: verify_archive(folder),
    ):
        with pytest.raises(ArchiveError, match="archive: is a folder; name the archive's file"):
            use()
    assert list(tmp_path.iterdir()) == [folder]


def test_checkpoints_are_read_from_summaries_heads_and_folders(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign"
    archive = campaign / "control-archive.jsonl"
    campaign.mkdir()
    heads = build(archive)
    for number, head in enumerate(heads[1:]):
        folder = campaign / f"W{number}"
        folder.mkdir()
        summary = {
            "schema": "dsv41-summary-v1",
            "archive": {
                "path": str(archive),
                "before": heads[number].to_dict(),
                "after": head.to_dict(),
            },
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    stranger = campaign / "W9"
    stranger.mkdir()
    (stranger / "summary.json").write_text(
        json.dumps(
            {"archive": {"path": "/elsewhere/a.jsonl", "after": {"rows": 3, "sha256": "9" * 64}}}
        )
    )
    (campaign / "W8").mkdir()
    (campaign / "W8" / "summary.json").write_text("{")
    points = read_checkpoints([campaign], archive)
    assert [point.head for point in points] == heads
    lines = tmp_path / "heads.jsonl"
    lines.write_text("".join(json.dumps(head.to_dict()) + "\n" for head in heads))
    assert [point.head for point in read_checkpoints([lines])] == heads
    assert read_checkpoints([campaign / "W0" / "summary.json"])[1].source.endswith("summary.json")
    for text, message in (("{}", "holds no checkpoint; valid"), ("nope", "is not JSON")):
        lines.write_text(text)
        with pytest.raises(ArchiveError, match=message):
            read_checkpoints([lines])
    with pytest.raises(ArchiveError, match="No such file"):
        read_checkpoints([tmp_path / "none.json"])
    assert verify_archive(archive, points).ok


def test_a_chain_forged_with_every_hash_right_is_found_by_fields_and_keys(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    head = build(archive)[-1]
    for row, what in (
        ({**example_row(70), "commit": "zz"}, "commit: must be 40 lower-case hex digits"),
        ({**example_row(3), "value": 1.0}, "line 11: forged: "),
    ):
        line, _ = encode(row, seq=11, prev=head.sha256, batch=1)
        whole = archive.read_bytes()
        archive.write_bytes(whole + line)
        assert verify_archive(archive).ok
        found = verify_archive(archive, fields=True)
        assert found.findings[0].change == "forged"
        assert what in found.findings[0].message
        archive.write_bytes(whole)
    whole = archive.read_bytes()
    for row, what in (
        (example_row(3), "line 11: forged: has the key of line 4"),
        ({**example_row(70), "cell": ["a"]}, "line 11: cell: must be a string, got"),
        ({**example_row(70), "max_tokens": 2**70}, "line 11: max_tokens: must be a positive"),
        ({"window": "w"}, "line 11: missing cell, metric"),
    ):
        line, _ = encode(row, seq=11, prev=head.sha256, batch=1)
        archive.write_bytes(whole + line)
        with pytest.raises(ChainBroken, match=what):
            archive_rows(archive)


def test_an_old_archive_is_refused_by_its_version_and_left_alone(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    archive.write_bytes(b"".join(v3_row([])))
    before = archive.read_bytes()
    with pytest.raises(WrongSchema, match=r"is a dsv41-control-archive-v3 file.*migrate"):
        archive_append(archive, [example_row(0)])
    with pytest.raises(WrongSchema):
        archive_rows(archive)
    assert verify_archive(archive).findings[0].change == "foreign row"
    assert archive.read_bytes() == before


def v3_append(archive: Path, row: dict[str, object]) -> None:
    """Append as a writer of version 3 does: it looks at the last line's schema first."""
    last = json.loads(archive.read_bytes().splitlines()[-1])
    if last["schema"] != "dsv41-control-archive-v3":
        raise RuntimeError(f"refusing to append to {last['schema']}")
    with archive.open("a") as file:
        file.write(json.dumps({"schema": "dsv41-control-archive-v3", **row}) + "\n")


def test_a_v3_writer_refuses_a_v4_file(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    with pytest.raises(RuntimeError, match="refusing to append to dsv41-control-archive-v4"):
        v3_append(archive, {"window": "w"})


# -- the index is never trusted over the file ------------------------------------------------------


def test_an_index_that_does_not_fit_the_file_is_not_used(tmp_path: Path) -> None:
    archive, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    build(archive)
    build(other, window="OTHER-a-W-20261027T181314Z")
    expected = archive_rows(archive)
    older = index_path(archive).read_bytes()
    archive_append(archive, [example_row(30)])
    expected.append(example_row(30))
    for wrong in (older, index_path(other).read_bytes(), b"rubbish" * 999, b""):
        index_path(archive).write_bytes(wrong)
        assert archive_rows(archive, {"cell": "short-b1"}) == expected
        assert archive_append(archive, [example_row(30)]) == archive_head(archive)
    index_path(archive).unlink()
    index_path(archive).mkdir()
    assert archive_rows(archive, {"cell": "short-b1"}) == expected
    assert archive_append(archive, [example_row(31)]).rows == 12
    assert verify_archive(archive).ok


def test_rows_removed_from_the_index_come_back_from_the_file(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    with sqlite3.connect(index_path(archive)) as db:
        db.execute("DELETE FROM row WHERE seq = 3")
    db.close()
    os.utime(archive)
    assert len(archive_rows(archive, {"cell": "short-b1"})) == 10


def test_a_place_that_the_index_has_wrong_is_never_an_answer(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    with sqlite3.connect(index_path(archive)) as db:
        db.execute("UPDATE row SET offset = offset + 7 WHERE seq = 3")
    db.close()
    expected = [example_row(i) for i in range(10)]
    assert archive_rows(archive, {"cell": "short-b1"}) == expected


def test_an_append_while_rows_are_read_disturbs_neither(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    seen = []
    for number, row in enumerate(iter_rows(archive, {"cell": "short-b1"})):
        seen.append(row)
        assert archive_append(archive, [example_row(100 + number)]).rows == 11 + number
    # What a reader sees is the archive as it was when it began.
    assert seen == [example_row(i) for i in range(10)]
    assert len(archive_rows(archive, {"cell": "short-b1"})) == 20
    assert verify_archive(archive, fields=True).ok


FORKED = """
import os, sys, threading
from pytest_dsv41.archive import archive_append
from pytest_dsv41.archive.testing import example_row

def work(start):
    for repeat in range(20):
        archive_append(sys.argv[1], [example_row(repeat, start=start)])

threads = [threading.Thread(target=work, args=(f"T{n}",)) for n in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
work("P" if child else "F")
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_and_a_forked_child_append_side_by_side(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    build(archive)
    subprocess.run([sys.executable, "-W", "error", "-c", FORKED, str(archive)], check=True)
    found = archive_rows(archive, {"cell": "short-b1"})
    assert len(found) == archive_head(archive).rows == 10 + 5 * 20
    assert {row["start"] for row in found} == {"C1", "T0", "T1", "T2", "F", "P"}
    assert verify_archive(archive, fields=True).ok
