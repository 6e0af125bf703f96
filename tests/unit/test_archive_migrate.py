"""v1 and v3 become v4: all rows or none, proved as a multiset, the old copy kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import (
    Head,
    MigrationRefused,
    RolledBack,
    WrongSchema,
    archive_append,
    archive_head,
    archive_rows,
)
from pytest_dsv41.archive.disk import Disk
from pytest_dsv41.archive.migrate import Migration, migrate
from pytest_dsv41.archive.store import lock_path
from pytest_dsv41.archive.testing import CrashDisk, FaultyDisk, crash_states, example_row, put_files
from pytest_dsv41.archive.verify import verify_archive
from pytest_dsv41.cli import main
from pytest_dsv41.durable import FileLock

Row = dict[str, Any]
NAME = "control-archive.jsonl"
V1 = ("window", "cell", "metric", "value", "max_tokens", "date")
V3 = (*V1, "commit", "clock_cap_mhz", "start", "repeat")
COMMIT = "596ba1c" + "0" * 33


def prompt(cell: str) -> str:
    return hashlib.sha256(cell.encode()).hexdigest()


def window_rows(window: str, day: str) -> list[Row]:
    """Two control starts of two repeats, two cells, two metrics: sixteen rows."""
    return [
        example_row(
            window=window,
            cell=cell,
            metric=metric,
            start=start,
            repeat=repeat,
            date=day,
            value=round(base + 3 * number + 0.25 * repeat + (start == "C2"), 3),
            commit=COMMIT,
            clock_source=None,
            prompt_sha256=prompt(cell),
        )
        for number, cell in enumerate(("short-b1", "32k-b1"))
        for start in ("C1", "C2")
        for repeat in (0, 1)
        for metric, base in (("client_tok_s", 30.5), ("ms_per_round", 50.5))
    ]


WINDOWS = {
    "PC1-a-W-20261026T101010Z": "20261026",
    "PC1-b-W-20261027T101010Z": "20261027",
}


def write_folder(campaign: Path, window: str, rows: Sequence[Row]) -> Path:
    """Write the folder of an older window: summary, start logs, values."""
    folder = campaign / window
    (folder / "cmd").mkdir(parents=True)
    summary = {"status": "INCONCLUSIVE", "production_commit": COMMIT, "experiment_commit": "e" * 40}
    (folder / "summary.json").write_text(json.dumps(summary))
    for number, start in enumerate(("C1", "C2")):
        (folder / "cmd" / f"{number:04}-{start}-start.log").write_text(
            "head-a clock cap 2150 MHz\nworker-b clock cap 2150 MHz\n"
        )
    values: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        key = (row["start"], row["cell"], row["repeat"])
        line = values.setdefault(
            key,
            {
                "item": "-".join(map(str, key)),
                "start": row["start"],
                "arm": "control",
                "cell": row["cell"],
                "repeat": row["repeat"],
                "outcome": "measured",
                "values": {},
                "prompt_sha256": row["prompt_sha256"],
                "max_tokens": row["max_tokens"],
            },
        )
        line["values"][row["metric"]] = {"value": row["value"]}
    lines = [*values.values(), {"start": "X", "arm": "fast", "cell": "short-b1", "repeat": 0}]
    (folder / "values.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_old(archive: Path, rows: Sequence[Row], fields: Sequence[str], version: str) -> None:
    """Write an older archive: the rows' fields, chained over their canonical JSON."""
    previous = "0" * 64
    with archive.open("w") as file:
        for row in rows:
            old = {"schema": f"dsv41-control-archive-{version}", "prev_sha256": previous}
            old |= {field: row[field] for field in fields}
            text = json.dumps(old, sort_keys=True, separators=(",", ":"))
            previous = hashlib.sha256(text.encode()).hexdigest()
            file.write(json.dumps({**old, "sha256": previous}) + "\n")


@pytest.fixture
def campaign(tmp_path: Path) -> tuple[Path, list[Row]]:
    """A campaign of two old windows; its rows."""
    folder = tmp_path / "campaign"
    rows = []
    for window, day in WINDOWS.items():
        rows += window_rows(window, day)
        write_folder(folder, window, window_rows(window, day))
    return folder, rows


def folders(campaign: Path) -> list[Path]:
    return [campaign / window for window in WINDOWS]


def projected(rows: Sequence[Row], fields: Sequence[str]) -> Counter[str]:
    return Counter(json.dumps({field: row[field] for field in fields}) for row in rows)


@pytest.mark.parametrize(("version", "fields"), [("v1", V1), ("v3", V3)])
def test_a_dry_run_proves_and_changes_nothing_and_applying_keeps_the_old_copy(
    campaign: tuple[Path, list[Row]], version: str, fields: tuple[str, ...]
) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, fields, version)
    before = archive.read_bytes()
    dry = migrate(archive, folders(folder))
    assert (dry.problems, dry.multiset_equal, dry.applied) == ((), True, False)
    assert (dry.rows, dry.windows, dry.identities, dry.notes) == (32, 2, 4, ())
    assert archive.read_bytes() == before
    done = migrate(archive, folders(folder), apply=True)
    assert done.applied
    assert done.head == dry.head == archive_head(archive)
    assert done.kept is not None
    assert Path(done.kept).read_bytes() == before
    new = archive_rows(archive)
    assert projected(new, fields) == projected(rows, fields)
    assert {row["prompt_sha256"] for row in new} == {prompt("short-b1"), prompt("32k-b1")}
    for row in new:
        assert (row["commit"], row["clock_cap_mhz"]) == (COMMIT, 2150)
    if version == "v3":
        assert new == rows
    assert verify_archive(archive, fields=True).ok
    again = migrate(archive, apply=True)
    assert again.notes == ("already v4, nothing to do",)
    assert archive_append(archive, [example_row(0)]).rows == 33


def test_checkpoints_from_before_a_migration_are_recognised(
    campaign: tuple[Path, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    old = [json.loads(line)["sha256"] for line in archive.read_text().splitlines()]
    heads = [Head(16, old[15]), Head(32, old[31])]
    summary = json.dumps({"archive": {"before": heads[0].to_dict(), "after": heads[1].to_dict()}})
    window = folder / "PC1-z-W-20261027T111111Z"
    window.mkdir()
    (window / "summary.json").write_text(summary)
    migrate(archive, folders(folder), apply=True)
    assert main(["archive", "verify", str(archive), "--checkpoints", str(folder)]) == 0
    assert "2 checkpoints of the file before its migration" in capsys.readouterr().out
    assert archive_append(archive, [example_row(0)], checkpoints=heads).rows == 33
    with pytest.raises(RolledBack, match="row 32 is not the one a checkpoint knows"):
        archive_append(archive, [example_row(1)], checkpoints=[Head(32, "9" * 64)])
    (window / "summary.json").write_text(summary.replace('"rows": 32', '"rows": 40'))
    command = ["archive", "append", str(folder / "PC1-a-W-20261026T101010Z")]
    assert main(command) == 4
    assert "has 33 rows, a checkpoint knows 40" in capsys.readouterr().err
    assert main([*command, "--no-checkpoints"]) == 0


def test_v3_takes_its_prompts_from_a_table_too(campaign: tuple[Path, list[Row]]) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    table = {window: {cell: prompt(cell) for cell in ("short-b1", "32k-b1")} for window in WINDOWS}
    assert migrate(archive, prompts=table).multiset_equal
    del table["PC1-b-W-20261027T101010Z"]["32k-b1"]
    found = migrate(archive, prompts=table, apply=True)
    assert not found.applied
    assert found.problems[0].startswith(
        "line 25: PC1-b-W-20261027T101010Z, 32k-b1, client_tok_s: no folder of PC1-b"
    )


def test_a_row_that_no_folder_proves_stops_everything(campaign: tuple[Path, list[Row]]) -> None:
    folder, rows = campaign
    archive = folder / NAME
    for changed, message in (
        ({"value": 1.0}, "has no such row (or not as often as the archive)"),
        ({"window": "GONE-W-1"}, "no folder of GONE-W-1 was given"),
    ):
        write_old(archive, [*rows[:5], {**rows[5], **changed}, *rows[6:]], V1, "v1")
        before = archive.read_bytes()
        found = migrate(archive, folders(folder), apply=True)
        assert (found.applied, found.multiset_equal, found.head) == (False, False, None)
        assert len(found.problems) == 1
        assert found.problems[0].startswith("line 6: ")
        assert message in found.problems[0]
        assert archive.read_bytes() == before
    write_old(archive, [*rows, rows[3]], V3, "v3")
    found = migrate(archive, folders(folder), apply=True)
    assert "line 33" in found.problems[0]


def test_two_prompts_in_one_cell_of_a_window_stop_it(campaign: tuple[Path, list[Row]]) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    values = folder / "PC1-a-W-20261026T101010Z" / "values.jsonl"
    lines = values.read_text().splitlines()
    lines[0] = lines[0].replace(prompt("short-b1"), "f" * 64)
    values.write_text("\n".join(lines) + "\n")
    found = migrate(archive, folders(folder))
    assert found.problems == (
        "PC1-a-W-20261026T101010Z, short-b1: 2 prompt identities, one is needed",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema":"dsv41-control-archive-v2"}\n', "v2' cannot be migrated; valid: .*-v1, .*-v3"),
        ('{"window":"w"}\n', "schema None cannot be migrated"),
        ("", "is empty"),
        ("rubbish\n", "line 1: is no JSON object"),
        ('{"schema":"dsv41-control-archive-v3","window":"w"}\n', "line 1: missing cell, metric"),
        ('{"schema":"dsv41-control-archive-v3","lane":"w"}\n', "'lane': unknown field of dsv41"),
    ],
)
def test_another_version_or_a_damaged_file_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    archive = tmp_path / NAME
    archive.write_text(text)
    with pytest.raises(MigrationRefused, match=message):
        migrate(archive, apply=True)
    assert archive.read_text() == text


def test_a_broken_old_chain_is_refused(campaign: tuple[Path, list[Row]]) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    lines = archive.read_text().splitlines(keepends=True)
    for broken, message in (
        ([*lines[:4], *lines[5:]], "line 5: not linked to the line before it"),
        ([*lines[:4], lines[4].replace("31.5", "31.6"), *lines[5:]], "line 5: its bytes do not"),
        ([*lines[:-1], lines[-1][:-9]], "line 32: ends in the middle"),
        ([*lines[:4], lines[4].replace("-v3", "-v1"), *lines[5:]], "line 5: schema .*-v1' in a"),
    ):
        archive.write_text("".join(broken))
        with pytest.raises(MigrationRefused, match=message):
            migrate(archive, folders(folder), apply=True)


def test_the_command_dry_runs_applies_and_says_why_not(
    campaign: tuple[Path, list[Row]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V1, "v1")
    command = ["archive", "migrate", str(archive)]
    assert main(command) == 1
    assert "no folder of PC1-a-W-20261026T101010Z was given" in capsys.readouterr().out
    assert main([*command, "--windows", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("DRY RUN: dsv41-control-archive-v1 to v4: 32 rows of 2 windows")
    assert "multiset equal on every old field: yes; 4 prompt identities" in out
    assert main([*command, "--windows", str(folder), "--apply"]) == 0
    assert "the old file is kept" in capsys.readouterr().out
    assert main(["archive", "verify", str(archive), "--fields"]) == 0


# -- all or nothing --------------------------------------------------------------------------------


def check_either(archive: Path, before: bytes, rows: list[Row]) -> bool:
    """The archive is wholly old or wholly new; return which (True: new)."""
    if archive.read_bytes() == before:
        return False
    assert archive_rows(archive) == rows
    assert verify_archive(archive).ok
    return True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_any_effect_that_fails_leaves_the_old_or_the_new_archive(
    campaign: tuple[Path, list[Row]], number: int
) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    before = archive.read_bytes()
    for n in range(1, 30):
        disk = FaultyDisk(n, OSError(number, os.strerror(number)), half=bool(n % 2))
        try:
            migrate(archive, folders(folder), apply=True, disk=disk)
        except OSError:
            if check_either(archive, before, rows):
                assert disk.effects[n - 1] == "sync_folder"
                break
        else:
            break
    assert n > 6
    assert migrate(archive, folders(folder), apply=True).problems == ()
    assert check_either(archive, before, rows)


def test_a_power_failure_at_any_effect_leaves_the_old_or_the_new_archive(
    campaign: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    folder, rows = campaign
    live, dead = tmp_path / "live", tmp_path / "dead"
    live.mkdir()
    dead.mkdir()
    write_old(live / NAME, rows, V3, "v3")
    before = (live / NAME).read_bytes()
    disk = CrashDisk(live)
    migrate(live / NAME, folders(folder), apply=True, disk=disk)
    outcomes = set()
    for at in range(2, len(disk.log) + 1):
        for files in crash_states(disk.log, at):
            put_files(dead, files)
            outcomes.add(check_either(dead / NAME, before, rows))
            migrate(dead / NAME, folders(folder), apply=True, disk=CrashDisk(dead))
            assert check_either(dead / NAME, before, rows)
            kept = dead / f"{NAME}.v3-before-v4"
            assert not kept.exists() or kept.read_bytes() == before
    assert outcomes == {False, True}


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from pytest_dsv41.archive.migrate import migrate
    from pytest_dsv41.archive.testing import FaultyDisk

    class Killed(BaseException):
        pass

    class Killing(FaultyDisk):
        def _tick(self, name):
            if super()._tick(name):
                os.kill(os.getpid(), signal.SIGKILL)
            return False

    migrate(sys.argv[1], sys.argv[3:], apply=True, disk=Killing(int(sys.argv[2]), Killed()))
    """
)


def check_kills(
    campaign: tuple[Path, list[Row]], tmp_path: Path, steps: Sequence[int]
) -> tuple[int, list[bool]]:
    """Kill a migration at each of the steps; the last step tried, and which archive it left."""
    folder, rows = campaign
    outcomes = []
    for step in steps:
        archive = tmp_path / str(step) / NAME
        archive.parent.mkdir()
        write_old(archive, rows, V3, "v3")
        before = archive.read_bytes()
        words = [str(archive), str(step), *map(str, folders(folder))]
        done = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        outcomes.append(check_either(archive, before, rows))
        assert migrate(archive, folders(folder), apply=True).problems == ()
        assert check_either(archive, before, rows)
        if done.returncode == 0:
            break
        assert done.returncode == -9
    return step, outcomes


def test_sigkill_around_the_rename_leaves_the_old_or_the_new_archive(
    campaign: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    assert check_kills(campaign, tmp_path, (8, 9)) == (9, [False, True])


@pytest.mark.slow
def test_sigkill_at_every_step_leaves_the_old_or_the_new_archive(
    campaign: tuple[Path, list[Row]], tmp_path: Path
) -> None:
    step, outcomes = check_kills(campaign, tmp_path, range(1, 30))
    # Each effect had its turn; the new archive stands from its rename on.
    assert step > 6
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True


WAITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from pytest_dsv41.archive import archive_append
    from pytest_dsv41.archive.testing import example_row

    print("ready", flush=True)
    for first in range(0, 10_000, 500):
        rows = [example_row(i, start=sys.argv[2]) for i in range(first, first + 500)]
        archive_append(Path(sys.argv[1]), rows)
    """
)


def test_appenders_that_wait_for_a_migration_lose_nothing(
    campaign: tuple[Path, list[Row]],
) -> None:
    folder, rows = campaign
    archive = folder / NAME
    write_old(archive, rows, V3, "v3")
    with pytest.raises(WrongSchema):
        archive_append(archive, [example_row(0)])
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Disk):
        """Stops inside the migration, before the new file is in its place."""

        def rename(self, source: Path, target: Path) -> None:
            inside.set()
            assert go_on.wait(60)
            super().rename(source, target)

    done: list[Migration] = []
    thread = threading.Thread(
        target=lambda: done.append(migrate(archive, folders(folder), apply=True, disk=Slow()))
    )
    thread.start()
    assert inside.wait(60)
    waiting = [
        subprocess.Popen(
            [sys.executable, "-c", WAITER, str(archive), start], stdout=subprocess.PIPE, text=True
        )
        for start in ("A", "B")
    ]
    for process in waiting:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert FileLock(lock_path(archive)).held_elsewhere()
    go_on.set()
    thread.join()
    for process in waiting:
        assert process.wait(120) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert done[0].applied
    assert archive_head(archive).rows == 32 + 20_000
    assert verify_archive(archive).ok
    found = archive_rows(archive)
    assert found[:32] == rows
    assert Counter(row["start"] for row in found[32:]) == {"A": 10_000, "B": 10_000}
