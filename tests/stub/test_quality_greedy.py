"""Greedy answers of two arms: where they part, how near the tie was, and the KL at that place."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_groups import endpoint, stub

from pytest_dsv41.cli import main
from pytest_dsv41.engines import get_engine
from pytest_dsv41.engines.next_token import aligned
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.greedy import (
    GreedyPrompt,
    GreedyRecord,
    GreedyRow,
    compare_greedy,
    load_greedy,
    record_divergences,
    run_greedy,
    save_greedy,
)
from pytest_dsv41.quality.greedy_kl import compare_recorded, kl_bound, top20_kl
from pytest_dsv41.stub import Serving

PROMPTS = tuple(
    GreedyPrompt(f"p{i}", f"Say something about number {i}, at length.") for i in range(6)
)
CONTROL, CANDIDATE = 0.3, 0.45


@pytest.fixture(scope="module", params=["vllm", "llamacpp"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def control(engine: str) -> Iterator[Serving]:
    with stub(engine=engine, round_ms=0.0, prefill_ms=0.0, perturb=CONTROL) as running:
        yield running


@pytest.fixture(scope="module")
def candidate(engine: str) -> Iterator[Serving]:
    with stub(engine=engine, round_ms=0.0, prefill_ms=0.0, perturb=CANDIDATE) as running:
        yield running


def answers(served: Serving, **settings: object) -> GreedyRecord:
    return run_greedy(endpoint(served), PROMPTS, max_tokens=24, deadline_s=30, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ours(control: Serving) -> GreedyRecord:
    return answers(control)


@pytest.fixture(scope="module")
def theirs(candidate: Serving) -> GreedyRecord:
    return answers(candidate)


def test_the_same_server_answers_identically(control: Serving, ours: GreedyRecord) -> None:
    one, two = ours, answers(control)
    assert one.run != two.run
    assert {outcome.outcome for outcome in compare_greedy(one, two)} == {"IDENTICAL"}
    assert all(len(row.tokens) == 24 and row.finish == "length" for row in one.rows)
    assert all(top is not None and len(top) == 20 for row in one.rows for top in row.tops)
    # At temperature 0 every token is the likeliest of its own list.
    assert all(
        top is not None and top[0][0] == token
        for row in one.rows
        for token, top in zip(row.tokens, row.tops, strict=True)
    )


def test_where_two_models_part_and_by_how_much_the_control_minds(
    control: Serving, ours: GreedyRecord, theirs: GreedyRecord
) -> None:
    outcomes = compare_greedy(ours, theirs, near_tie_nats=math.nextafter(math.inf, 0))
    parted = [outcome for outcome in outcomes if outcome.at is not None]
    assert parted
    engine, where = get_engine(ours.engine), endpoint(control)
    rows = {row.name: (row, other) for row, other in zip(ours.rows, theirs.rows, strict=True)}
    for outcome in parted:
        row, other = rows[outcome.name]
        assert outcome.at is not None
        assert row.tokens[: outcome.at] == other.tokens[: outcome.at]
        assert row.tokens[outcome.at] != other.tokens[outcome.at]
        # The control itself, asked for its distribution there.
        top = dict(
            engine.next_token(
                where.url,
                where.model,
                row.prompt_ids + row.tokens[: outcome.at],
                20,
                cache="cold",
                salt=None,
            ).top
        )
        expected = top[row.tokens[outcome.at]] - top[other.tokens[outcome.at]]
        assert outcome.margin == pytest.approx(expected, abs=1e-9)
        assert outcome.outcome == "NEAR TIE"


def test_the_limit_is_registered_and_counts_to_the_limit_itself(
    ours: GreedyRecord, theirs: GreedyRecord
) -> None:
    margins = [o.margin for o in compare_greedy(ours, theirs) if o.margin is not None]
    limit = sorted(margins)[len(margins) // 2]
    found = {
        o.margin: o.outcome
        for o in compare_greedy(ours, theirs, near_tie_nats=limit)
        if o.margin is not None
    }
    assert {margin: "NEAR TIE" if margin <= limit else "DIVERGED" for margin in margins} == found
    assert found[limit] == "NEAR TIE"
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(UsageError, match="near tie"):
            compare_greedy(ours, theirs, near_tie_nats=wrong)


def test_a_following_control_is_asked_where_the_candidate_parted(
    control: Serving, candidate: Serving, ours: GreedyRecord, theirs: GreedyRecord
) -> None:
    theirs = record_divergences(
        endpoint(candidate),
        ours,
        theirs,
        probe_salt_prefix="window",
        deadline_s=30,
    )
    parted = [o for o in compare_greedy(ours, theirs) if o.at is not None]
    assert [(row.name, row.at) for row in theirs.divergences] == [(o.name, o.at) for o in parted]
    found = compare_recorded(
        endpoint(control), theirs.divergences, "window", bound=10.0, deadline_s=30
    )
    control_rows = {row.name: row for row in ours.rows}
    for one, row in zip(found, theirs.divergences, strict=True):
        # The control's list at that token was recorded in its own answer.
        recorded = control_rows[one.name].tops[one.at]
        assert recorded is not None
        assert one.position.kl == pytest.approx(top20_kl(recorded, row.top).kl, abs=1e-12)
        assert one.outcome == ("OK" if one.position.common_mass >= 0.99 else "MASS")
    worst = max(one.position.kl for one in found)
    tight = compare_recorded(
        endpoint(control), theirs.divergences, "window", bound=worst * 0.999, deadline_s=30
    )
    assert [one.outcome == "KL" for one in tight] == [one.position.kl == worst for one in found]
    # Against the candidate itself there is nothing to see.
    same = compare_recorded(endpoint(candidate), theirs.divergences, "w", bound=0.0, deadline_s=30)
    assert {one.position.kl for one in same} == {0.0}
    with pytest.raises(UsageError, match="bound"):
        compare_recorded(endpoint(control), (), "w", bound=-1.0, deadline_s=30)


def test_the_default_bound() -> None:
    assert kl_bound() == kl_bound(0.0) == kl_bound(0.0025) == 0.005
    assert kl_bound(0.004) == 0.008
    with pytest.raises(UsageError, match="floor"):
        kl_bound(-1)


def test_a_record_reads_back_the_same_and_lies_outside_of_git(
    ours: GreedyRecord, tmp_path: Path
) -> None:
    path = tmp_path / "greedy.json"
    save_greedy(path, ours)
    assert load_greedy(path) == ours
    path.write_text(path.read_text().replace('"max_tokens": 24', '"max_tokens": 25'))
    with pytest.raises(MeasurementRefused) as refused:
        load_greedy(path)
    assert refused.value.kind == "greedy-edited"
    (tmp_path / "tree" / ".git").mkdir(parents=True)
    with pytest.raises(UsageError, match="git work tree"):
        save_greedy(tmp_path / "tree" / "greedy.json", ours)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("fewer", "fewer"), ("zeros", "all-zero"), ("nan", "nan"), ("other", "other-prompt")],
)
def test_answers_that_cannot_be_believed_refuse_the_run(
    control: Serving, ours: GreedyRecord, fault: str, kind: str
) -> None:
    assert ours.rows
    path = "/v1/completions" if control.server.profile.engine == "vllm" else "/completion"
    control.faults(f"{path}:logprobs={fault}")
    try:
        with pytest.raises(MeasurementRefused, match="p0: ") as refused:
            answers(control)
    finally:
        control.faults()
    assert refused.value.kind == kind


# ---- by hand ---------------------------------------------------------------------------------


RUNS = itertools.count(1)


def record(
    *tokens: tuple[int, ...], tops: object = None, ids: tuple[int, ...] = (7,)
) -> GreedyRecord:
    """A control whose lists always have 1 before 2 before 3, 0.4 nats apart."""
    top = ((1, -0.7), (2, -1.1), (3, -1.5))
    return GreedyRecord(
        "dsv41-greedy-1", f"run-{next(RUNS)}", "vllm", "1", "m", 8, 20, "2026-01-01T00:00:00Z",
        tuple(
            GreedyRow(f"p{i}", "0" * 64, ids, row, "length",
                      tuple(top for _ in row) if tops is None else tops)  # type: ignore[arg-type]
            for i, row in enumerate(tokens)
        ),
        (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "theirs", "outcome", "at", "margin"),
    [
        ((1, 1, 1), (1, 1, 1), "IDENTICAL", None, None),
        ((1, 1, 1), (1, 2, 9), "NEAR TIE", 1, 0.4),
        ((1, 1, 1), (3, 1, 1), "DIVERGED", 0, 0.8),
        # A later, larger difference does not count: the texts are no longer the same.
        ((1, 1, 1), (1, 2, 3), "NEAR TIE", 1, 0.4),
        # Token 9 is in none of the control's lists: nothing says how near it was.
        ((1, 1, 1), (1, 9, 1), "DIVERGED", 1, None),
        ((1, 1, 1), (1, 1), "DIVERGED", 2, None),
        # The candidate took the control's favourite, the control did not: no preference at all.
        ((2, 1), (1, 1), "NEAR TIE", 0, -0.4),
    ],
)
def test_the_first_token_that_differs_decides(
    own: tuple[int, ...], theirs: tuple[int, ...], outcome: str, at: int, margin: float
) -> None:
    (found,) = compare_greedy(record(own), record(theirs))
    assert (found.outcome, found.at) == (outcome, at)
    assert found.margin == (None if margin is None else pytest.approx(margin))
    assert bool(found.why) == (found.outcome == "DIVERGED" and found.margin is None)


def test_a_token_the_control_says_nothing_of_is_no_near_tie() -> None:
    (found,) = compare_greedy(record((1, 1), tops=(None, None)), record((2, 1)))
    assert (found.outcome, found.margin) == ("DIVERGED", None)
    assert "tells no probability" in found.why


def test_other_prompts_and_lengths_are_refused() -> None:
    for other, kind in (
        (record((1,), ids=(8,)), "other-prompts"),
        (record((1,), (1,)), "other-prompts"),
        (replace(record((1,)), max_tokens=9), "max-tokens"),
    ):
        with pytest.raises(MeasurementRefused) as refused:
            compare_greedy(record((1,)), other)
        assert refused.value.kind == kind


def test_a_run_is_not_set_against_itself() -> None:
    same = record((1, 1))
    with pytest.raises(MeasurementRefused, match="both are the run run-") as refused:
        compare_greedy(same, replace(same, model="renamed"))
    assert refused.value.kind == "same-run"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_a_place_that_is_told_is_the_right_one(tokens: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    places = [i for i, keep in enumerate(kept) if keep]
    found = aligned(tokens, [tokens[i] for i in places])
    assert len(found) == len(places)
    assert all(
        place is None or tokens[place] == tokens[true]
        for place, true in zip(found, places, strict=True)
    )
    assert all(place in (None, true) for place, true in zip(found, places, strict=True))
    if len(places) == len(tokens):
        assert found == places


# ---- the command -----------------------------------------------------------------------------


def test_the_command_from_the_control_to_the_kl(
    engine: str,
    control: Serving,
    candidate: Serving,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def greedy(*words: object) -> int:
        capsys.readouterr()
        return main(["greedy", *map(str, words)])

    ours, same, theirs = (tmp_path / f"{name}.json" for name in ("ours", "same", "theirs"))
    server = ("--engine", engine)
    short = ("--prompt", "short", "--prompt", "demo-1", "--max-tokens", 48)
    assert greedy("run", control.url, "--out", ours, *short, *server) == 0
    assert greedy("run", control.url, "--out", same, "--against", ours, *server) == 0
    assert "2 IDENTICAL, 0 NEAR TIE, 0 DIVERGED" in capsys.readouterr().out
    words = ("--against", ours, "--near-tie-nats", "50", "--record-distribution")
    more = ("--probe-salt-prefix", "window")
    assert greedy("run", candidate.url, "--out", theirs, *words, *more, *server) == 0
    assert "NEAR TIE" in capsys.readouterr().out
    assert greedy("compare", ours, theirs, "--near-tie-nats", "0") == 2
    assert "DIVERGED" in capsys.readouterr().out
    assert greedy("compare", ours, theirs, "--near-tie-nats", "50", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["prompts"]
    assert {row["outcome"] for row in rows} <= {"IDENTICAL", "NEAR TIE"}
    assert greedy("kl", control.url, theirs, "--bound", "0", *server) == 2
    assert "within the bound of 0 nats" in capsys.readouterr().out
    assert greedy("kl", control.url, same, *server) == 0
    assert "nothing to compare" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--record-distribution"], "needs --against"),
        (["--max-tokens", "0"], "--max-tokens: at least 1"),
        (["--prompt", "nothing"], "in no corpus"),
        (["--against", "nothing.json"], "nothing.json: No such file"),
    ],
)
def test_wrong_use_is_one_line_and_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    out = str(tmp_path / "out.json")
    assert main(["greedy", "run", "http://127.0.0.1:9", "--out", out, *words]) == 4
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_control_that_answered_another_text_is_told_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = record((1, 1))
    rows = (replace(control.rows[0], name="short"),)
    save_greedy(tmp_path / "control.json", replace(control, rows=rows))
    words = ["--against", str(tmp_path / "control.json"), "--out", str(tmp_path / "out.json")]
    # Nobody listens there.
    assert main(["greedy", "run", "http://127.0.0.1:9", *words]) == 4
    assert "control.json: its prompt short hashes to 000000000000…" in capsys.readouterr().err
