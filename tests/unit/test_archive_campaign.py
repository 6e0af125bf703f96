"""A synthetic campaign with the document's figures: 11 windows, 596 control rows.

540 rows of ten windows and 56 of one. Most ran 512 tokens at 2150 MHz on one commit; one ran 1,500
tokens, one at 2300 MHz, one on the next commit. The spread of one repeat within a window is
exactly 2.55 % (short-b1) and 1.07 % (32k-b1) for ms per round, 6.8 % and 6.7 % for decode tok/s.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import (
    MixedDefinitions,
    archive_append,
    archive_head,
    archive_rows,
    archive_spread,
    archive_spreads,
)
from pytest_dsv41.archive.history import backfill
from pytest_dsv41.archive.migrate import migrate
from pytest_dsv41.archive.verify import verify_archive
from pytest_dsv41.cli import main

Row = dict[str, Any]
FIRST, NEXT = "596ba1c" + "0" * 33, "7c41d20" + "0" * 33
CV = {
    ("short-b1", "ms_per_round"): 0.0255,
    ("32k-b1", "ms_per_round"): 0.0107,
    ("short-b1", "decode_tok_s"): 0.068,
    ("32k-b1", "decode_tok_s"): 0.067,
}
MEAN = {"ms_per_round": 50.0, "decode_tok_s": 40.0}
WINDOWS: list[tuple[str, int, int, str]] = [
    *((f"UP{n}-a-W-202610{20 + n}T080000Z", 512, 2150, FIRST) for n in range(7)),
    ("NBW-a-W-20261027T080000Z", 1500, 2150, FIRST),
    ("PP4-a-W-20261027T200000Z", 512, 2300, FIRST),
    ("PP4-b-W-20261028T080000Z", 512, 2300, NEXT),
]
SMALL = ("PC1-threshold512-W-20261027T181314Z", 512, 2150, FIRST)
DEFINITION = {"max_tokens": 512, "clock_cap_mhz": 2150, "commit": FIRST}


def prompt(cell: str) -> str:
    return hashlib.sha256(cell.encode()).hexdigest()


def window_rows(
    window: tuple[str, int, int, str],
    cells: tuple[str, ...],
    metrics: tuple[str, ...],
    repeats: int,
) -> list[Row]:
    name, tokens, clock, commit = window
    day = 1 + int(name[-10:-8]) / 100
    n = 2 * repeats
    # Alternating by this much, n values have a sample SD of exactly one.
    unit = math.sqrt((n - 1) / n)
    return [
        {
            "window": name,
            "cell": cell,
            "metric": metric,
            "value": MEAN.get(metric, 1.3)
            * day
            * (1 + CV.get((cell, metric), 0.12) * unit * (-1) ** (start * repeats + repeat)),
            "max_tokens": tokens,
            "commit": commit,
            "clock_cap_mhz": clock,
            "clock_source": "start-log",
            "date": name[-16:-8],
            "start": f"C{start + 1}",
            "repeat": repeat,
            "prompt_sha256": prompt(cell),
        }
        for cell in cells
        for start in range(2)
        for repeat in range(repeats)
        for metric in metrics
    ]


def campaign_rows() -> list[Row]:
    three = ("accepted_per_round", "decode_tok_s", "ms_per_round")
    seven = (*three, "client_tok_s", "prefill_tok_s", "rounds", "ttft_ms")
    rows = [
        row
        for window in WINDOWS
        for row in window_rows(window, ("32k-b1", "32k-b3", "short-b1"), three, 3)
    ]
    return rows + window_rows(SMALL, ("32k-b1", "short-b1"), tuple(sorted(seven)), 2)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("campaign") / "control-archive.jsonl"
    rows = campaign_rows()
    for window in (*WINDOWS, SMALL):
        archive_append(path, [row for row in rows if row["window"] == window[0]])
    return path


def test_it_has_the_documents_size(archive: Path) -> None:
    rows = archive_rows(archive)
    assert rows == campaign_rows()
    assert archive_head(archive).rows == len(rows) == 596
    assert Counter(row["window"] == SMALL[0] for row in rows) == {False: 540, True: 56}
    assert len({row["window"] for row in rows}) == 11


@pytest.mark.parametrize(
    ("key", "cv"), CV.items(), ids=lambda x: "/".join(x) if isinstance(x, tuple) else ""
)
def test_the_spread_of_one_repeat_is_pooled_within_windows(
    archive: Path, key: tuple[str, str], cv: float
) -> None:
    spread = archive_spread(archive, *key, where=DEFINITION)
    assert spread.cv_within == pytest.approx(cv, rel=1e-12)
    # Seven windows of six repeats and one of four.
    assert (spread.n, len(spread.windows), spread.df_within) == (46, 8, 7 * 5 + 3)
    assert spread.definition == {
        "cell": key[0],
        "metric": key[1],
        **DEFINITION,
        "prompt_sha256": prompt(key[0]),
    }
    # The days differ by a few percent, which is not the spread within a window.
    assert spread.cv_between is not None
    assert 0.01 < spread.cv_between < 0.05
    values = [
        row["value"]
        for row in archive_rows(archive, {**DEFINITION, "cell": key[0], "metric": key[1]})
    ]
    mean = sum(values) / 46
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / 45)
    assert spread.mean == pytest.approx(mean)
    assert spread.sd == pytest.approx(sd)
    assert spread.cv == pytest.approx(sd / mean)
    assert (spread.minimum, spread.maximum) == (min(values), max(values))


def test_mixed_definitions_are_refused_until_each_is_picked(archive: Path) -> None:
    with pytest.raises(MixedDefinitions) as refused:
        archive_spread(archive, "short-b1", "ms_per_round")
    assert refused.value.differ == {
        "max_tokens": [512, 1500],
        "clock_cap_mhz": [2150, 2300],
        "commit": [FIRST, NEXT],
    }
    assert str(refused.value) == (
        "short-b1/ms_per_round: rows of 4 definitions are never pooled; pick one by "
        "max_tokens 512, 1500; clock_cap_mhz 2150, 2300; commit 596ba1c00000, 7c41d2000000"
    )
    with pytest.raises(MixedDefinitions) as refused:
        archive_spread(archive, "short-b1", "ms_per_round", {"clock_cap_mhz": 2300})
    assert list(refused.value.differ) == ["commit"]
    with pytest.raises(MixedDefinitions, match="max_tokens 512, 1500"):
        archive_spread(
            archive,
            "short-b1",
            "ms_per_round",
            {"max_tokens": [512, 1500], "commit": FIRST, "clock_cap_mhz": 2150},
        )
    assert archive_spread(archive, "short-b1", "ms_per_round", {"date": "20261028"}).n == 6
    assert (
        archive_spread(archive, "short-b1", "ms_per_round", {**DEFINITION, "start": "C1"}).n == 23
    )


def test_a_prompt_is_part_of_the_definition(tmp_path: Path) -> None:
    rows = window_rows(WINDOWS[0], ("short-b1",), ("ms_per_round",), 3)
    for row in rows[3:]:
        row["prompt_sha256"] = "f" * 64
    archive_append(tmp_path / "a.jsonl", rows)
    with pytest.raises(MixedDefinitions, match=r"2 definitions .*prompt_sha256"):
        archive_spread(tmp_path / "a.jsonl", "short-b1", "ms_per_round")
    spread = archive_spread(
        tmp_path / "a.jsonl", "short-b1", "ms_per_round", {"prompt_sha256": "f" * 64}
    )
    assert spread.n == 3


def test_spreads_give_one_per_definition(archive: Path) -> None:
    found = archive_spreads(archive, "32k-b1", "ms_per_round")
    assert [(s.max_tokens, s.clock_cap_mhz, s.commit, s.n) for s in found] == [
        (512, 2150, FIRST, 46),
        (1500, 2150, FIRST, 6),
        (512, 2300, FIRST, 6),
        (512, 2300, NEXT, 6),
    ]
    assert archive_spreads(archive, "none", "ms_per_round") == []


def test_no_rows_give_an_empty_spread_and_one_repeat_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    empty = archive_spread(path, "short-b1", "ms_per_round", {"max_tokens": 512})
    assert (empty.n, empty.mean, empty.cv, empty.cv_within, empty.windows) == (
        0,
        None,
        None,
        None,
        (),
    )
    assert empty.max_tokens == 512
    rows = window_rows(WINDOWS[0], ("short-b1",), ("ms_per_round",), 1)[:1]
    archive_append(path, rows)
    one = archive_spread(path, "short-b1", "ms_per_round")
    assert (one.n, one.mean, one.sd, one.cv_within, one.df_within) == (
        1,
        rows[0]["value"],
        None,
        None,
        0,
    )


def test_v3_becomes_v4_as_a_multiset_equal_on_every_v3_field(tmp_path: Path) -> None:
    rows = campaign_rows()
    path = tmp_path / "control-archive.jsonl"
    old = [{k: v for k, v in row.items() if k != "prompt_sha256"} for row in rows]
    with path.open("w") as file:
        for row in old:
            file.write(json.dumps({"schema": "dsv41-control-archive-v3", **row}) + "\n")
    table = {
        window[0]: {cell: prompt(cell) for cell in ("32k-b1", "32k-b3", "short-b1")}
        for window in (*WINDOWS, SMALL)
    }
    done = migrate(path, prompts=table, apply=True)
    assert (done.rows, done.windows, done.multiset_equal, done.problems) == (596, 11, True, ())
    assert done.identities == 10 * 3 + 2
    new = archive_rows(path)
    assert Counter(json.dumps(row, sort_keys=True) for row in old) == Counter(
        json.dumps({k: v for k, v in row.items() if k != "prompt_sha256"}, sort_keys=True)
        for row in new
    )
    assert verify_archive(path, fields=True).ok


def test_a_backfill_of_the_windows_folders_gives_the_same_rows(
    tmp_path: Path, archive: Path
) -> None:
    folders = []
    for window in (*WINDOWS, SMALL):
        folder = tmp_path / window[0]
        (folder / "cmd").mkdir(parents=True)
        folders.append(folder)
        (folder / "summary.json").write_text(json.dumps({"production_commit": window[3]}))
        values: dict[tuple[Any, ...], Row] = {}
        for row in archive_rows(archive, {"window": window[0]}):
            line = values.setdefault(
                (row["start"], row["cell"], row["repeat"]),
                {**row, "arm": "control", "outcome": "measured", "values": {}},
            )
            line["values"][row["metric"]] = {"value": row["value"]}
        (folder / "values.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values.values()))
        hosts = ("head-a", "worker-b")
        log = "".join(f"{host} clock cap {window[2]} MHz\n" for host in hosts)
        for start in ("C1", "C2"):
            (folder / "cmd" / f"0001-{start}-start.log").write_text(log)
    done = backfill(tmp_path / "a.jsonl", folders)
    assert done.head == archive_head(archive)
    assert archive_rows(tmp_path / "a.jsonl") == campaign_rows()
    again = backfill(tmp_path / "a.jsonl", folders)
    assert sum(new for _, _, new in again.windows) == 0


# -- the resolution filter -------------------------------------------------------------------------


def resolution(archive: Path, cell: str, design: str, gain: str, *more: str) -> list[str]:
    return [
        *("resolution", "--archive", str(archive), "--cell", cell, "--metric", "ms_per_round"),
        *("--design", design, "--expected-gain", gain, "--max-tokens", "512"),
        *("--clock", "2150", "--commit", FIRST, *more),
    ]


@pytest.mark.parametrize(
    ("cell", "design", "gain", "half", "code"),
    [
        ("short-b1", "seeded:6", "0.03", 3.785, 2),
        ("32k-b1", "seeded:6", "0.03", 1.588, 2),
        ("32k-b1", "seeded:7", "0.03", 1.399, 0),
        ("32k-b1", "seeded:8", "3%", 1.265, 0),
        ("32k-b1", "pairs:7", "0.03", 1.399, 0),
        ("short-b1", "seeded:6", "0.08", 3.785, 0),
        # t(0.975, 5) 2.5706 times 2.55 % times sqrt(1/4 + 1/3)
        ("short-b1", "unpaired:4v3", "0.05", 5.006, 2),
    ],
)
def test_half_widths_and_queue_answers_are_the_documents(
    archive: Path,
    capsys: pytest.CaptureFixture[str],
    cell: str,
    design: str,
    gain: str,
    half: float,
    code: int,
) -> None:
    assert main(resolution(archive, cell, design, gain)) == code
    out = capsys.readouterr().out
    assert out.startswith("REFUSE: " if code else "QUEUE: ")
    assert f"half-width ±{half:.3f} %" in out
    assert main([*resolution(archive, cell, design, gain), "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert 100 * found["half_width"] == pytest.approx(half, abs=0.0005)
    assert (found["archive_rows"], found["archive_windows"]) == (46, 8)


def test_the_least_designs_and_their_minutes(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = resolution(archive, "32k-b1", "seeded:6", "0.03", "--estimated-s", "60", "--json")
    assert main(command) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["least"]["seeded"] == {"design": "seeded:7", "minutes": 21.0}
    assert found["least"]["pairs"] == {"design": "pairs:7", "minutes": 14.0}
    assert found["minutes"] == 18.0
    main(resolution(archive, "32k-b1", "seeded:6", "0.03", "--estimated-s", "60"))
    out = capsys.readouterr().out
    assert "least seeded: seeded:7, 21.0 min of measuring without the starts" in out
    assert (
        "CV of one repeat of ms_per_round 1.07 %, from 46 rows of 8 windows: 512 tokens, 2150 MHz"
        in out
    )


@pytest.mark.parametrize(
    # WIN2's estimates for six pairs of one arm, in seconds; C/X/C has three.
    ("cell", "arm_s"),
    [
        ("seeded-short-b1", 38),
        ("seeded-32k-b1", 56),
        ("seeded-32k-b2", 88),
        ("seeded-32k-b3", 120),
    ],
)
def test_the_minutes_of_the_documents_seeded_cells_need_no_estimate(
    archive: Path, capsys: pytest.CaptureFixture[str], cell: str, arm_s: int
) -> None:
    command = resolution(archive, cell, "seeded:6", "0.05", "--diff-cv", "0.02", "--json")
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["minutes"] == pytest.approx(3 * arm_s / 60)
    assert main([*command, "--estimated-s", "10"]) == 0
    assert json.loads(capsys.readouterr().out)["minutes"] == pytest.approx(3.0)


def test_seeded_decode_speed_is_estimated_from_ms_per_round(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # WIN2 item 3: ±3.8 % at 2.55 %; the 6.8 % of decode tok/s itself holds for pairs of repeats.
    command = resolution(archive, "short-b1", "seeded:6", "0.08", "--json")
    command[command.index("ms_per_round")] = "decode_tok_s"
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert 100 * found["half_width"] == pytest.approx(3.785, abs=0.0005)
    assert (found["metric"], found["definition"]["metric"]) == ("decode_tok_s", "ms_per_round")
    assert list(found["least"]) == ["seeded"]
    command[command.index("seeded:6")] = "pairs:6"
    assert main(command) == 2
    found = json.loads(capsys.readouterr().out)
    # t(0.975, 5) 2.5706 times √2 times 6.8 % over √6
    assert 100 * found["half_width"] == pytest.approx(10.092, abs=0.0005)
    assert list(found["least"]) == ["pairs", "unpaired"]


def test_a_measured_diff_cv_is_taken_from_the_command_or_from_a_file(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # t(0.975, 5) 2.5706 times 2 % over sqrt 6
    for given in ("0.02", "2%"):
        command = resolution(archive, "32k-b1", "seeded:6", "0.05", "--diff-cv", given)
        assert main(command) == 0
        assert "half-width ±2.099 %" in capsys.readouterr().out

    def summary_of(cv: float) -> dict[str, Any]:
        return {"cells": {"32k-b1": {"series": [{"metric": "ms_per_round", "diff_cv": cv}]}}}

    summary = {"decisions": {"fast": summary_of(0.02)}}
    pilot = {"diff_cv": {"32k-b1/ms_per_round": 0.02, "short-b1/ms_per_round": 0.05}}
    for document in (summary, pilot):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(document))
        command = resolution(archive, "32k-b1", "seeded:6", "0.05", "--diff-cv", str(path))
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "half-width ±2.099 %" in out
        assert f"CV of paired differences 2.00 % ({path})" in out
    # A window with a pilot beside it: the pilot's is the one to plan by, not the arm's.
    path.write_text(json.dumps({"decisions": {"fast": summary_of(0.5)}, "pilot": pilot}))
    assert main(command) == 0
    assert f"CV of paired differences 2.00 % ({path})" in capsys.readouterr().out
    path.write_text(json.dumps({"decisions": {"a": summary_of(0.5), "b": summary_of(0.4)}}))
    assert main(command) == 4
    assert "holds 2 values" in capsys.readouterr().err
    path.write_text("{}")
    assert main(command) == 4
    assert "holds 0 values of diff_cv for 32k-b1/ms_per_round" in capsys.readouterr().err


def test_no_archive_data_is_not_judged_and_said_so(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(resolution(archive, "new-cell", "seeded:6", "0.03")) == 0
    assert capsys.readouterr().out.startswith("NOT JUDGED: new-cell/ms_per_round")
    command = resolution(tmp_path / "none.jsonl", "short-b1", "seeded:6", "0.03")
    assert main(command) == 4
    assert "there is no such archive" in capsys.readouterr().err


def test_a_mix_and_a_bad_design_are_refused_by_name(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [
        "resolution",
        "--archive",
        str(archive),
        "--cell",
        "short-b1",
        "--expected-gain",
        "0.03",
    ]
    assert main([*bare, "--design", "pairs:6"]) == 4
    assert "rows of 4 definitions are never pooled; pick one" in capsys.readouterr().err
    assert main([*bare, "--design", "pairs:6", "--commit", "7c41d"]) == 2
    assert (
        main(
            [
                *bare,
                "--design",
                "pairs:6",
                "--prompt",
                prompt("short-b1")[:8],
                "--max-tokens",
                "1500",
            ]
        )
        == 2
    )
    capsys.readouterr()
    assert main(resolution(archive, "short-b1", "trio:3", "0.03")) == 4
    assert "valid: pairs:N, seeded:N, unpaired:AvB" in capsys.readouterr().err
