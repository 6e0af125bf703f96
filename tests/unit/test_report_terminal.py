"""The terminal report: what a person must see, at 80 columns, plain, from hostile files."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from report_folder import (
    broken,
    decide,
    demo_folder,
    make_plan,
    make_summary,
    make_values,
    write_folder,
)

from pytest_dsv41.report.model import (
    duration_text,
    interval_text,
    load_window,
    number_text,
    percent_text,
    seconds_between,
    spread_rows,
)
from pytest_dsv41.report.terminal import (
    console_width,
    render_decision,
    render_files,
    render_window,
    wants_color,
)


def text_of(folder: Path, width: int = 100) -> str:
    return render_files(load_window(folder), width=width, color=False)


def row(text: str, start: str) -> str:
    """The one line that begins with `start`, with runs of blanks as one."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def test_the_table_says_everything_at_a_glance(tmp_path: Path) -> None:
    plan = make_plan(cells={"short-b1": True})
    values = make_values(plan, {"fast": 0.08})
    summary = make_summary(plan, {"fast": decide(plan, values, "fast")})
    text = render_window(summary, plan, values, width=100, color=False)
    assert "DEMO demo: CANDIDATE" in text
    assert "seed 7, 1 min 51 s, 12 of 12 items measured" in text
    assert row(text, "fast:") == "fast: CANDIDATE win2-v1, revision 3"
    assert row(text, "short-b1 WIN") == "short-b1 WIN"
    primary = row(text, "ms_per_round")
    assert re.fullmatch(r"ms_per_round 20\.00 18\.40 \+8\.0 % \+7\.\d to \+8\.\d % 0/6", primary)
    assert row(text, "accepted_per_round").endswith("0/6 no loss")
    assert row(text, "promotion") == "promotion fast, profile single, on short-b1"
    assert row(text, "restore") == "restore RESTORED, 6 of 6 answers identical, 3.2 s"
    assert row(text, "watch") == "watch PASS, 5.0 s, 12 samples"
    assert text.endswith("CANDIDATE  exit 0\n")


def test_the_sentences_of_the_decision_are_shown(tmp_path: Path) -> None:
    flat = " ".join(text_of(demo_folder(tmp_path / "w")).split())
    assert "short-b1: ms per round 8.0 % better" in flat
    assert "Window: CANDIDATE (decided by short-b1)." in flat


def test_a_report_only_cell_is_marked(tmp_path: Path) -> None:
    text = text_of(demo_folder(tmp_path / "w"))
    assert row(text, "32k-b1 (reported)") == "32k-b1 (reported) WIN"


def test_a_loss_and_its_losing_guard(tmp_path: Path) -> None:
    text = text_of(demo_folder(tmp_path / "w", gain=-0.08))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines.count("short-b1 LOSS") == 1
    assert any(re.fullmatch(r"client_tok_s .* 6/6 LOSS", line) for line in lines)
    assert lines[-1] == "NOT A CANDIDATE exit 11"


def test_a_larger_spread_in_the_archive_is_said_and_raises_nothing(tmp_path: Path) -> None:
    # 2.55 % and 1.07 % are the published spreads of short-b1 and 32k-b1.
    text = text_of(demo_folder(tmp_path / "w"))
    flat = " ".join(text.split())
    assert "short-b1 ms_per_round 0.31 % 2.55 %" in flat
    assert "32k-b1 ms_per_round 0.31 % 1.07 %" in flat
    assert "short-b1 accepted_per_round 1.20 % none" in flat
    assert flat.count("is larger than the required 2 %, which stays as it is") == 1


def test_a_guards_spread_is_shown_without_the_line() -> None:
    # 12 % is the published spread of accepted per round; no guard has to gain 2 %.
    plan = make_plan()
    values = make_values(plan, {"fast": 0.08})
    summary = make_summary(
        plan,
        {"fast": decide(plan, values, "fast")},
        spreads={"short-b1/accepted_per_round": {"in_window_cv": 0.11, "archive_cv": 0.12}},
    )
    (only,) = spread_rows(summary)
    assert (only.archive, only.larger, only.note) == (0.12, False, "")


def test_exactly_two_percent_is_not_larger() -> None:
    summary = make_summary(
        make_plan(),
        {},
        spreads={
            "a/ms_per_round": {"in_window_cv": 0.01, "archive_cv": 0.02},
            "a/b/ttft_ms": {"in_window_cv": None, "archive_cv": 0.0201},
        },
    )
    first, second = spread_rows(summary)
    assert (first.larger, first.note) == (False, "")
    assert (second.cell, second.metric, second.larger) == ("a/b", "ttft_ms", True)


@pytest.mark.parametrize("width", [1, 80, 97, 120, 500])
def test_no_line_is_wider_than_asked(tmp_path: Path, width: int) -> None:
    text = text_of(demo_folder(tmp_path / "w"), width=width)
    limit = min(120, max(80, width))
    assert console_width(width) == limit
    assert max(map(len, text.splitlines())) <= limit
    assert all(line == line.rstrip() for line in text.splitlines())


def test_no_number_is_cut_at_80_columns(tmp_path: Path) -> None:
    plan = make_plan(cells={"a-cell-with-a-rather-long-name-b3": True})
    values = make_values(plan, {"fast": -0.6})
    summary = make_summary(plan, {"fast": decide(plan, values, "fast")})
    text = render_window(summary, plan, values, width=80, color=False)
    assert "…" not in text
    assert re.search(r"ms_per_round\s+20\.00\s+32\.00\s+−60\.0 %\s+−\d+\.\d to −\d+\.\d %", text)
    assert "a-cell-with-a-rather-long-name-b3" in "".join(text.split())


def test_every_candidate_has_its_own_table(tmp_path: Path) -> None:
    plan = make_plan(
        arms=("control", "fast", "slow"),
        starts=(("C1", "control"), ("X1", "fast"), ("X2", "slow"), ("C2", "control")),
        repeats=3,
    )
    values = make_values(plan, {"fast": 0.08, "slow": -0.08})
    decided = {arm: decide(plan, values, arm, paired=False) for arm in ("fast", "slow")}
    text = render_window(make_summary(plan, decided), plan, values, width=100, color=False)
    assert row(text, "fast:").startswith("fast: CANDIDATE")
    assert row(text, "slow:").startswith("slow: NOT A CANDIDATE")


def test_what_went_wrong_is_at_the_end(tmp_path: Path) -> None:
    plan = make_plan()
    values = make_values(plan, {})
    values[1] = broken(values[1], "refused", "foreign_request", "a second client was seen")
    summary = make_summary(
        plan,
        {},
        status="INCOMPLETE",
        exit_code=20,
        stopped="SIGTERM",
        incomplete=["stopped: SIGTERM", "K1-short-b1-r1 was refused"],
        restore={"status": "FAILED", "reason": "port 8000 refuses"},
        alerts=["production is down: dsv41 recover"],
    )
    text = render_window(summary, plan, values, width=100, color=False)
    assert row(text, "stopped") == "stopped SIGTERM"
    assert row(text, "incomplete") == "incomplete K1-short-b1-r1 was refused"
    assert row(text, "restore") == "restore FAILED, port 8000 refuses"
    assert row(text, "ALERT") == "ALERT production is down: dsv41 recover"
    assert row(text, "K1-short-b1-r1 refused:").endswith("a second client was seen")
    assert "production is down, or not known to be up" in text.splitlines()[-1]


def test_a_killed_window_says_so(tmp_path: Path) -> None:
    plan = make_plan()
    text = text_of(write_folder(tmp_path / "w", plan, make_values(plan, {})[:3], None))
    assert "no summary.json: the window was killed, or it still runs" in text


def test_hostile_texts_reach_no_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202egood\r\n[bold]x[/bold] :skull:"
    plan = make_plan()
    values = make_values(plan, {})
    values[0] = broken(values[0], "failed", evil, evil)
    summary = make_summary(
        plan,
        {"fast": ({"verdict": evil, "rule": evil, "cells": {evil: {"series": [{}]}}}, [evil])},
        status="INCONCLUSIVE",
        stopped=evil,
        alerts=[evil],
        incomplete=[evil],
        spreads={f"{evil}/{evil}": {"in_window_cv": 0.01}},
    )
    for color in (False, True):
        text = render_window(summary, plan, values, width=80, color=color)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert not {char for char in plain if ord(char) < 32 or ord(char) == 127} - {"\n"}
        assert "\u202e" not in plain
        assert "\\x1b[2J" in plain
        assert "[bold]x[/bold] :skull:" in " ".join(plain.split())


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert wants_color(Terminal())
    assert not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())


def test_plain_text_has_no_escape_and_colour_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FORCE_COLOR is for programs that decide by themselves; the caller has decided here.
    monkeypatch.setenv("FORCE_COLOR", "1")
    files = load_window(demo_folder(tmp_path / "w"))
    plain = render_files(files, width=100, color=False)
    colored = render_files(files, width=100, color=True)
    assert "\x1b" not in plain
    assert "\x1b[1;32mCANDIDATE" in colored
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()]
    assert lines == plain.splitlines()


def test_an_old_terminals_encoding_is_respected(tmp_path: Path) -> None:
    files = load_window(demo_folder(tmp_path / "w", gain=-0.08))
    text = render_files(files, width=80, color=False, encoding="ascii")
    assert text.isascii()
    assert "ms_per_round" in text


def test_a_seeded_decision_shows_its_p() -> None:
    # Six pairs that agree: the least p of the exact sign-flip test is 2/64 = 0.03125.
    decision = {
        "rule": "win2-paired-v1",
        "rule_revision": 1,
        "verdict": "CANDIDATE",
        "decision_cells": ["seeded-32k-b1"],
        "profiles": {"single": {"cells": ["seeded-32k-b1"], "verdict": "CANDIDATE"}},
        "cells": {
            "seeded-32k-b1": {
                "verdict": "WIN",
                "decides": True,
                "series": [
                    {
                        "metric": "decode_tok_s",
                        "role": "primary",
                        "design": "seeded 6",
                        "gain": 0.043,
                        "low": 0.021,
                        "high": 0.065,
                        "p": 0.03125,
                        "verdict": "WIN",
                        "reason": "the gain is above 2 %",
                    }
                ],
            }
        },
    }
    text = render_decision("fast", decision, width=80, color=False)
    assert row(text, "single:") == "single: CANDIDATE on seeded-32k-b1"
    assert row(text, "decode_tok_s –") == "decode_tok_s – – +4.3 % +2.1 to +6.5 % 0.03125 –"
    assert row(text, "seeded-32k-b1 decode_tok_s:").endswith("the gain is above 2 %")


def test_a_refused_cell_shows_its_reason() -> None:
    decision = {
        "verdict": "CANDIDATE",
        "decision_cells": ["a"],
        "cells": {
            "b": {"verdict": "REFUSED", "decides": False, "reason": "2 repeats", "series": []}
        },
    }
    text = render_decision("fast", decision, width=80, color=False)
    assert row(text, "b (reported)") == "b (reported) REFUSED"
    assert row(text, "b:") == "b: 2 repeats"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (18.4, "18.40"),
        (1.3, "1.300"),
        (0.98765, "0.9877"),
        (123456.0, "123456"),
        (9.9999, "10.00"),
        (1e9, "1.000e+09"),
        (1e-9, "1.000e-09"),
    ],
)
def test_numbers(value: float | None, shown: str) -> None:
    assert number_text(value) == shown


def test_percents() -> None:
    assert percent_text(0.041) == "+4.1 %"
    assert percent_text(-0.041) == "−4.1 %"
    assert percent_text(-0.0004) == percent_text(0.0004) == "0.0 %"
    assert percent_text(0.0255, signed=False, digits=2) == "2.55 %"
    assert interval_text(-0.012, 0.07) == "−1.2 to +7.0 %"
    assert interval_text(None, 0.07) == "–"
    assert interval_text(-0.9994, 0.07) == "−99.9 to +7.0 %"
    assert interval_text(-1.531, 0.359) == "−153 to +36 %"


def test_durations() -> None:
    assert duration_text(3.21) == "3.2 s"
    assert duration_text(245) == "4 min 05 s"
    assert duration_text(7800) == "2 h 10 min"
    assert seconds_between("2026-11-29T20:33:11Z", "2026-11-29T20:35:02Z") == 111
    assert seconds_between("yesterday", "2026-11-29T20:35:02Z") is None
    assert seconds_between("2026-11-29T20:33:11", "2026-11-29T20:35:02Z") is None
