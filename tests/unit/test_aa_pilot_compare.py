"""The A/A pilot's verdict and figures, from records of two starts (WIN2, "Seeded A/A pilot")."""

from __future__ import annotations

import copy
import json
import math
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.quality.aa_compare import (
    ACCUMULATED_SCHEMA,
    PILOT_SCHEMA,
    START_SCHEMA,
    accumulate,
    compare_starts,
    identical_fault,
    registration_line,
)
from pytest_dsv41.quality.bridge import BRIDGE_CELLS, bridge_report, pin_fault
from pytest_dsv41.quality.sealed import write_sealed

B1, B2 = "seeded-short-b1", "seeded-32k-b2"
PROMPT = "ab" * 32


def definition(name: str, members: int = 1) -> dict[str, Any]:
    prompts = [f"p{member}" for member in range(members)]
    return {
        "cell": {"name": name, "prompts": prompts, "max_tokens": 256, "seed_base": 10_000},
        "pairs": 6,
        "prompt_sha256": PROMPT,
    }


def pairs(values: list[float], *, metric: str = "decode_tok_s") -> list[dict[str, Any]]:
    lower = metric == "ms_per_round"
    return [
        {
            "seeds": [10_000 + 10 * index],
            "outputs": [f"{index:064d}"],
            "rounds": 100 + index,
            "accepted": 156 - index,
            "values": {metric: {"value": value, "unit": "", "lower_is_better": lower}},
        }
        for index, value in enumerate(values)
    ]


def start(name: str, *, b1: list[float], b2: list[float] | None = None) -> dict[str, Any]:
    cells = {B1: {"profile": "single", "pairs": pairs(b1)}}
    known = {B1: definition(B1)}
    if b2 is not None:
        cells[B2] = {"profile": "multi", "pairs": pairs(b2, metric="ms_per_round")}
        known[B2] = definition(B2, 2)
    return {
        "schema": START_SCHEMA,
        "start": name,
        "utc": "2026-11-01T00:00:00Z",
        "salt": f"salt-{name}",
        "definition": {
            "engine": "vllm",
            "version": "1",
            "model": "m",
            "commit": "c" * 40,
            "clock_cap_mhz": 2150,
            "cells": known,
        },
        "cells": cells,
        "bridge": None,
    }


FLAT = [100.0] * 6
OTHER = [101.0, 99.0, 102.0, 100.0, 103.0, 98.0]  # d = .01 -.01 .02 0 .03 -.02


def test_equal_streams_and_rounds_at_b1_pass_and_allow_expect_identical() -> None:
    pilot = compare_starts(start("A", b1=FLAT), start("B", b1=OTHER))
    assert (pilot["schema"], pilot["passed"], pilot["reasons"]) == (PILOT_SCHEMA, True, [])
    assert pilot["expect_identical"] is True
    assert identical_fault(pilot, definition(B1)["cell"], PROMPT) is None


def _other_output(pair: dict[str, Any]) -> None:
    pair["outputs"] = ["f" * 64]


def _other_rounds(pair: dict[str, Any]) -> None:
    pair["rounds"] += 1


def _untold_rounds(pair: dict[str, Any]) -> None:
    pair["rounds"] = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_output, "1 of 6 pairs have different outputs"),
        (_other_rounds, "1 of 6 pairs have different round counts"),
        (_untold_rounds, "the server does not tell its rounds"),
    ],
)
def test_one_pair_that_differs_fails_and_forbids_expect_identical(change: Any, reason: str) -> None:
    other = start("B", b1=FLAT)
    change(other["cells"][B1]["pairs"][3])
    pilot = compare_starts(start("A", b1=FLAT), other)
    assert not pilot["passed"]
    assert pilot["expect_identical"] is False
    assert pilot["reasons"] == [f"{B1}: {reason}"]
    assert identical_fault(pilot, definition(B1)["cell"]) == f"the A/A pilot FAILED: {B1}: {reason}"


def test_several_requests_at_a_time_are_reported_only() -> None:
    other = start("B", b1=FLAT, b2=[8.0] * 6)
    for pair in other["cells"][B2]["pairs"]:
        _other_output(pair)
    pilot = compare_starts(start("A", b1=FLAT, b2=[8.0] * 6), other)
    assert pilot["passed"]
    assert pilot["cells"][B2]["outputs_identical"] == 0
    assert pilot["cells"][B2]["rounds_identical"] == 6
    told = identical_fault(pilot, definition(B2, 2)["cell"])
    assert told is not None
    assert "several requests at a time" in told


def test_a_refused_cell_at_b1_fails_and_names_the_start_and_the_reason() -> None:
    other = start("B", b1=FLAT)
    other["cells"][B1] = {"profile": "single", "refused": "foreign-request: 3 requests, not 1"}
    pilot = compare_starts(start("A", b1=FLAT), other)
    assert pilot["reasons"] == [f"{B1}: start B: foreign-request: 3 requests, not 1"]
    assert pilot["diff_cv"] == {}


def test_without_a_cell_at_b1_there_is_nothing_to_pass() -> None:
    a, b = start("A", b1=FLAT, b2=[8.0] * 6), start("B", b1=FLAT, b2=[8.0] * 6)
    for record in (a, b):
        del record["cells"][B1], record["definition"]["cells"][B1]
    pilot = compare_starts(a, b)
    assert pilot["reasons"] == ["no seeded cell with one request at a time was run"]


def test_the_figures_are_those_of_the_paired_differences() -> None:
    pilot = compare_starts(start("A", b1=FLAT, b2=[8.0] * 6), start("B", b1=OTHER, b2=[8.2] * 6))
    one = pilot["cells"][B1]["series"][0]
    # By hand: mean .03/6 = .005; squares about it .0000250 .000225 .000225 .000025 .000625 .000625.
    assert one["mean_difference"] == pytest.approx(0.005, abs=1e-12)
    assert one["diff_cv"] == pytest.approx(math.sqrt(0.00175 / 5), abs=1e-12)
    assert one["start_sd"] == pytest.approx(0.005 / math.sqrt(2), abs=1e-12)
    assert one["pair_noise"] == pytest.approx(math.sqrt(0.00175 / 5 / 12), abs=1e-12)
    # ms per round: lower is better, so 8.2 after 8.0 is 2.5 % worse.
    assert pilot["cells"][B2]["series"][0]["mean_difference"] == pytest.approx(-0.025, abs=1e-12)
    assert pilot["df"] == {f"{B1}/decode_tok_s": 1, f"{B2}/ms_per_round": 1}


@given(st.lists(st.floats(1.0, 1000.0), min_size=6, max_size=6))
def test_the_start_sd_is_the_sd_of_the_two_starts_means(values: list[float]) -> None:
    # With one common factor between the starts, both starts' relative means have this SD exactly.
    pilot = compare_starts(start("A", b1=values), start("B", b1=[1.02 * v for v in values]))
    one = pilot["cells"][B1]["series"][0]
    assert one["start_sd"] == pytest.approx(statistics.stdev([1.0, 1.02]), rel=1e-6)
    assert one["diff_cv"] == pytest.approx(0.0, abs=1e-9)


def test_a_metric_needs_three_pairs_and_values_above_zero() -> None:
    a, b = start("A", b1=FLAT), start("B", b1=FLAT)
    for index, pair in enumerate(a["cells"][B1]["pairs"]):
        if index < 4:
            del pair["values"]["decode_tok_s"]
        pair["values"]["accepted_per_round"] = {"value": 0.0, "lower_is_better": False}
        b["cells"][B1]["pairs"][index]["values"]["accepted_per_round"] = {"value": 1.0}
    cell = compare_starts(a, b)["cells"][B1]
    assert cell["series"] == []
    assert cell["missing"] == {
        "decode_tok_s": "2 of 6 pairs have it in both starts",
        "accepted_per_round": "start A has a value of 0, which no difference can be relative to",
    }


# -- two starts that are no pilot ------------------------------------------------------------------


def test_starts_of_two_definitions_are_refused_with_the_key() -> None:
    for path, value, told in (
        (("commit",), "d" * 40, "commit is"),
        (("version",), "2", "version is 1 and 2"),
        (("clock_cap_mhz",), 2300, "clock_cap_mhz is 2150 and 2300"),
        (("cells", B1, "cell", "max_tokens"), 512, "cell.max_tokens is 256 and 512"),
        (("cells", B1, "prompt_sha256"), "cd" * 32, "prompt_sha256 is"),
    ):
        other = copy.deepcopy(start("B", b1=FLAT))
        where: Any = other["definition"]
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value
        with pytest.raises(UsageError, match="not of one definition") as caught:
            compare_starts(start("A", b1=FLAT), other)
        assert told in str(caught.value)


def test_a_start_that_does_not_know_its_clock_takes_the_others() -> None:
    other = start("B", b1=FLAT)
    other["definition"]["clock_cap_mhz"] = None
    assert compare_starts(start("A", b1=FLAT), other)["definition"]["clock_cap_mhz"] == 2150


def test_a_start_is_not_compared_with_itself() -> None:
    a, b = start("A", b1=FLAT), start("B", b1=FLAT)
    with pytest.raises(UsageError, match="given as start B is one of start A"):
        compare_starts(a, a)
    b["salt"] = a["salt"]
    with pytest.raises(UsageError, match="one and the same run"):
        compare_starts(a, b)


def test_another_cell_or_prompt_is_not_covered() -> None:
    pilot = compare_starts(start("A", b1=FLAT), start("B", b1=FLAT))
    cell = definition(B1)["cell"]
    assert "is another one: max_tokens is 256 and 512" in str(
        identical_fault(pilot, {**cell, "max_tokens": 512})
    )
    assert "ran on another prompt" in str(identical_fault(pilot, cell, "0" * 64))
    assert "has no cell seeded-x" in str(identical_fault(pilot, {**cell, "name": "seeded-x"}))


def test_an_edited_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = start("A", b1=FLAT), start("B", b1=OTHER)
    one, two = written(tmp_path, "a.json", a), written(tmp_path, "b.json", b)
    table = json.loads(Path(two).read_text())
    table["cells"][B1]["pairs"][0]["values"]["decode_tok_s"]["value"] = 100.0
    Path(two).write_text(json.dumps(table))
    assert main(["aa-pilot", "compare", one, two]) == 4
    assert "the start was edited" in capsys.readouterr().err
    assert main(["aa-pilot", "accumulate", one]) == 4
    assert "no pilot: schema 'dsv41-aa-start-v1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [(5.0, 5.0, True), (5.0, 6.0, False), (None, None, False), (5.0, None, False)],
)
def test_two_starts_on_one_server_process_are_said_to_be_none(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    a: float | None,
    b: float | None,
    said: bool,
) -> None:
    one = written(tmp_path, "a.json", {**start("A", b1=FLAT), "server_began": a})
    two = written(tmp_path, "b.json", {**start("B", b1=FLAT), "server_began": b})
    assert main(["aa-pilot", "compare", one, two]) == 0
    assert (
        "note: both starts were measured on one and the same" in capsys.readouterr().out
    ) == said


def test_a_probe_that_is_not_there_is_said(tmp_path: Path) -> None:
    probed = {"sha256": "1" * 64, "subset": "short"}
    a, b = start("A", b1=FLAT), start("B", b1=FLAT)
    assert compare_starts(a, b)["distribution"] is None
    one = compare_starts({**a, "probe": probed}, b)
    assert one["distribution"] == {"refused": "only start A was probed"}
    both = compare_starts({**a, "probe": probed}, {**b, "probe": probed})
    assert both["distribution"] == {"refused": "the starts' probes do not lie beside their records"}
    assert both["passed"]


@pytest.mark.parametrize("schema", [PILOT_SCHEMA, ACCUMULATED_SCHEMA, START_SCHEMA])
def test_a_sealed_record_without_its_fields_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: str
) -> None:
    words = ["compare"] if schema == START_SCHEMA else ["accumulate"]
    for number, body in enumerate(({}, {"definition": 3, "start": "A"}, {"definition": {}})):
        path = written(tmp_path, f"{number}.json", {"schema": schema, **body})
        other = written(tmp_path, f"{number}b.json", {"schema": schema, **body, "start": "B"})
        assert main(["aa-pilot", *words, path, other]) == 4
        said = capsys.readouterr().err
        assert f"{number}.json" in said or "start A" in said
        assert said.count("\n") == 1


# -- several pilots --------------------------------------------------------------------------------


def pilot_of(shift: float, tag: str, *, wobble: float = 0.01) -> dict[str, Any]:
    a = start("A", b1=FLAT)
    b = start("B", b1=[100.0 * (1 + shift + wobble * (-1) ** n) for n in range(6)])
    for record in (a, b):
        record["salt"] += tag
    return compare_starts(a, b)


def test_pilots_are_pooled_by_degrees_of_freedom() -> None:
    shifts = [0.01, -0.02, 0.005]
    pilots = [pilot_of(shift, str(n)) for n, shift in enumerate(shifts)]
    pooled = accumulate(pilots)
    key = f"{B1}/decode_tok_s"
    expected = math.sqrt(sum(s**2 / 2 for s in shifts) / 3)
    assert pooled["start_sd"][key] == pytest.approx(expected, rel=1e-9)
    assert (pooled["df"][key], pooled["diff_df"][key]) == (3, 15)
    # The bound of a variance with 3 degrees of freedom: SD * sqrt(3 / chi2(0.05, 3)).
    assert pooled["start_sd_upper"][key] == pytest.approx(
        expected * math.sqrt(3 / stats.chi2(3).isf(0.95)), rel=1e-9
    )
    assert pooled["diff_cv"][key] == pytest.approx(
        statistics.stdev([0.01 * (-1) ** n for n in range(6)]), rel=1e-9
    )
    # In two steps it is the same: 2 degrees of freedom and 1.
    again = accumulate([accumulate(pilots[:2]), pilots[2]])
    assert again["df"] == pooled["df"]
    assert again["start_sd"][key] == pytest.approx(pooled["start_sd"][key], rel=1e-12)
    assert again["diff_cv"][key] == pytest.approx(pooled["diff_cv"][key], rel=1e-12)
    assert (again["schema"], len(again["pilots"])) == (ACCUMULATED_SCHEMA, 3)


def test_a_start_counts_once() -> None:
    one, two = pilot_of(0.01, "1"), pilot_of(0.02, "2")
    with pytest.raises(UsageError, match="each start counts once"):
        accumulate([one, two, one])
    with pytest.raises(UsageError, match="each start counts once"):
        accumulate([accumulate([one, two]), two])


def test_pilots_of_two_definitions_are_not_pooled() -> None:
    two = pilot_of(0.01, "2")
    two["definition"]["commit"] = "d" * 40
    with pytest.raises(UsageError, match="pilot 1 and pilot 2 are not of one definition: commit"):
        accumulate([pilot_of(0.01, "1"), two])


def test_the_line_registers_in_a_window_file() -> None:
    pooled = accumulate([pilot_of(0.01, "1"), pilot_of(0.02, "2")])
    line = registration_line(pooled, "start_sd", [f"{B1}/decode_tok_s"])
    table = tomllib.loads(f"[window]\n{line}\n")["window"]["start_sd"]
    expected = math.sqrt((0.01**2 + 0.02**2) / 4)
    assert table == {f"{B1}/decode_tok_s": pytest.approx(expected, rel=1e-3)}
    still = accumulate([pilot_of(0.0, "3", wobble=0.0)])
    assert registration_line(still, "start_sd", [f"{B1}/decode_tok_s"]) == ""
    assert registration_line(still, "diff_cv", [f"{B1}/decode_tok_s"]) == ""


# -- commands --------------------------------------------------------------------------------------


def written(folder: Path, name: str, record: dict[str, Any]) -> str:
    write_sealed(folder / name, record)
    return str(folder / name)


def test_compare_ends_with_0_or_2_and_its_record_feeds_the_filter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = written(tmp_path, "a.json", start("A", b1=FLAT))
    b = written(tmp_path, "b.json", start("B", b1=OTHER))
    out = tmp_path / "pilot.json"
    assert main(["aa-pilot", "compare", a, b, "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("PASSED: ")
    filter_ = [
        "resolution", "--cell", B1, "--metric", "decode_tok_s", "--design", "seeded:6",
        "--expected-gain", "0.05", "--diff-cv", str(out), "--json",
    ]  # fmt: skip
    assert main(filter_) == 0
    told = json.loads(capsys.readouterr().out)
    cv = math.sqrt(0.00175 / 5)
    assert told["diff_cv"] == pytest.approx(cv)
    assert told["half_width"] == pytest.approx(stats.t(5).ppf(0.975) * cv / math.sqrt(6))
    assert main(["aa-pilot", "compare", a, b, "--out", str(out)]) == 4
    assert "never replaced" in capsys.readouterr().err
    other = start("B", b1=OTHER)
    _other_rounds(other["cells"][B1]["pairs"][0])
    c = written(tmp_path, "c.json", other)
    assert main(["aa-pilot", "compare", a, c]) == 2
    assert "expect_identical is forbidden" in capsys.readouterr().out


def test_accumulate_states_its_df_and_prints_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [written(tmp_path, f"{n}.json", pilot_of(0.01 * n, str(n))) for n in (1, 2, 3)]
    out = tmp_path / "pooled.json"
    assert main(["aa-pilot", "accumulate", *files, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 pilots of one definition, 3 PASSED"
    assert "(3 df; up to" in lines[1]
    assert lines[-3] == "to register under [window], start_sd with 3 df:"
    table = tomllib.loads("\n".join(lines[-2:]))
    key = f"{B1}/decode_tok_s"
    assert table["start_sd"][key] == pytest.approx(0.01 * math.sqrt(14 / 6), rel=1e-3)
    wobble = statistics.stdev([0.01 * (-1) ** n for n in range(6)])
    assert table["diff_cv"][key] == pytest.approx(wobble, rel=1e-3)
    assert main(["aa-pilot", "accumulate", *files, "--metric", "ttft_ms"]) == 4
    assert "valid: decode_tok_s" in capsys.readouterr().err


def test_a_run_without_execute_sends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["aa-pilot", "run", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "a.json")]
    words += ["--subset", "none"]
    assert main([*words, "--start", "A"]) == 0
    out = capsys.readouterr().out
    assert "nothing was sent" in out
    assert all(name in out for name in BRIDGE_CELLS)
    assert main([*words, "--start", "B"]) == 0
    out = capsys.readouterr().out
    # WIN2: about 5 minutes of seeded cells a start.
    assert out.startswith("start B: about 5.0 min")
    assert not any(name in out for name in BRIDGE_CELLS)
    for extra, told in (
        (["--cell", "decode-b1"], "valid: seeded-short-b1"),
        (["--cell", "seeded-32k-b2"], "needs a seeded cell with one request at a time"),
        (["--bridge-sampling", "{"], "--bridge-sampling"),
        (["--bridge-sampling", '{"temprature": 1}'], "temprature is no field; valid: temperature,"),
        (["--bridge-sampling", '{"chat_template_kwargs": 3}'], "chat_template_kwargs: "),
        (["--bridge-sampling", '{"priority": "x"}'], "priority: "),
        (["--bridge-sampling", '{"thinking": "yes"}'], "thinking: "),
        (["--bridge-sampling", '{"temperature": true}'], "temperature: "),
        (["--bridge-sampling", '{"top_p": NaN}'], "not JSON compliant"),
        (["--bridge-sampling", '{"temperature": 11}'], "temperature 11.0: valid: 0 to 10"),
    ):
        assert main([*words, "--start", "A", *extra]) == 4
        assert told in capsys.readouterr().err


# -- the bridge ------------------------------------------------------------------------------------


def bridged(name: str, accepted: float, prompt: str) -> dict[str, Any]:
    rounds = 500
    return {
        "profile": "single",
        "prompt_sha256": prompt.ljust(64, "0"),
        "speculates": True,
        "pairs": [{"accepted": round(accepted * rounds), "rounds": rounds} for _ in range(3)],
    }


SUMMARY = "bridge-bench2-summary32k-1500"


@pytest.mark.parametrize(("reading", "changed"), [(1.0, True), (1.324, True), (1.326, False)])
def test_the_h4_line_is_which_of_two_readings_is_nearer(reading: float, changed: bool) -> None:
    # The middle of 1.06 and 1.589 is 1.3245.
    report = bridge_report({SUMMARY: bridged(SUMMARY, reading, "82a1d8a1d7e7")})
    assert report["production_changed"] is changed
    flagged = "production changed between 10-24 and 10-26" in report["h4"]
    assert flagged is changed


def test_length_is_kept_apart_from_date_for_each_corpus_prompt() -> None:
    report = bridge_report(
        {
            "bridge-short-512": bridged("", 1.30, "932db59f8e4c"),
            "bridge-short-1500": bridged("", 1.14, "932db59f8e4c"),
            "bridge-32k0-512": bridged("", 1.05, "0ac74617c153"),
            "bridge-32k0-1500": {"refused": "not run: no such prompt"},
        }
    )
    assert report["lengths"]["short"] == pytest.approx(0.16)
    assert report["lengths"]["32k-0"] is None
    row = report["cells"]["bridge-short-512"]
    assert row["reference"]["value"] == 1.294
    assert row["difference"] == pytest.approx(0.006)
    assert report["cells"]["bridge-32k0-1500"]["missing"] == "not run: no such prompt"
    assert report["h4"] == "H4: not read (not run)"


def test_a_reference_counts_for_its_own_prompt_alone() -> None:
    report = bridge_report({SUMMARY: bridged(SUMMARY, 1.05, "ffff")})
    assert report["cells"][SUMMARY]["accepted_per_round"] == pytest.approx(1.05)
    assert report["cells"][SUMMARY]["reference"] is None
    assert report["production_changed"] is None


def test_a_bench_prompt_is_the_references_own_or_is_not_sent() -> None:
    own, other = "82a1d8a1d7e7".ljust(64, "0"), "f" * 64
    assert pin_fault(SUMMARY, own) is None
    assert pin_fault(SUMMARY, other) == (
        "prompt-pin: the prompt hashes to ffffffffffff…, pinned is 82a1d8a1d7e7…"
    )
    # A corpus cell runs on the prompt of the day; only its reference is of another one.
    assert pin_fault("bridge-short-512", other) is None


def test_a_server_without_a_drafter_has_no_reading() -> None:
    record = {**bridged(SUMMARY, 0.0, "82a1d8a1d7e7"), "speculates": False}
    row = bridge_report({SUMMARY: record})["cells"][SUMMARY]
    assert row["missing"] == "the server does not speculate"


def test_the_bridge_decides_nothing() -> None:
    a = start("A", b1=FLAT)
    a["bridge"] = {SUMMARY: bridged(SUMMARY, 1.0, "82a1d8a1d7e7")}
    pilot = compare_starts(a, start("B", b1=FLAT))
    assert pilot["passed"]
    assert pilot["bridge"]["production_changed"] is True


def test_the_bridges_cells_are_three_seeded_pairs_of_production_settings() -> None:
    for cell in BRIDGE_CELLS.values():
        assert (cell.pairs, cell.report_only, cell.batch) == (3, True, 1)
        sampling = cell.sampling
        assert (sampling.temperature, sampling.thinking, sampling.priority) == (1.0, True, 10)
        assert sampling.ignore_eos
    total = sum(cell.estimated_s * cell.pairs for cell in BRIDGE_CELLS.values())
    assert total / 60 == pytest.approx(8.6, abs=0.1)
