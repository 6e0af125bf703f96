"""The window file: what it becomes, and that every fault is one line with file, line and key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_dsv41.errors import SpecError
from pytest_dsv41.window.schedule import Start
from pytest_dsv41.window.spec import Arm, WindowSpec, example_names, load_spec

WINDOW = """\
[window]
lane = "DEMO"
name = "demo"
hypothesis = "It is faster."
schedule = "K/I/K/I"
repeats = 3

[arms.control]
role = "control"

[arms.fast]
role = "candidate"
args = ["--fast"]

[[cells]]
name = "decode-b1"
decision = true
primary = "ms_per_round"
guards = ["accepted_per_round"]

[[cells]]
name = "prefill-b1"

[limits]
watch_s = 2

[target]
kind = "local"
command = ["{python}", "{port}"]
"""


def load(folder: Path, text: str, **options: Any) -> WindowSpec:
    file = folder / "w.toml"
    file.write_text(text, encoding="utf-8")
    return load_spec(file, **options)


def edited(old: str, new: str) -> str:
    assert WINDOW.count(old) == 1, old
    return WINDOW.replace(old, new)


def message(folder: Path, text: str, **options: Any) -> str:
    with pytest.raises(SpecError) as caught:
        load(folder, text, **options)
    told = str(caught.value)
    assert "\n" not in told
    return told.removeprefix(f"{folder}/")


# -- what a file becomes ---------------------------------------------------------------------------


def test_a_window_is_read_with_its_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, WINDOW)
    assert (spec.lane, spec.name, spec.hypothesis, spec.kind) == (
        "DEMO",
        "demo",
        "It is faster.",
        "candidate",
    )
    assert [start.name for start in spec.starts] == ["K1", "I1", "K2", "I2"]
    assert [start.arm for start in spec.starts] == ["control", "fast", "control", "fast"]
    assert spec.control == Arm(name="control", role="control", symbol="K")
    assert spec.candidates == (Arm(name="fast", role="candidate", symbol="I", args=("--fast",)),)
    assert spec.decision_cells == ("decode-b1",)
    assert spec.cell("prefill-b1").primary == ""
    assert spec.pairing == "adjacent"
    assert {name: spec.repeats_of(name) for name in ("K1", "I2")} == {"K1": 3, "I2": 3}
    assert spec.limits.model_dump() == {
        "item_s": 120.0,
        "start_s": 600.0,
        "stop_s": 60.0,
        "watch_s": 2.0,
        "quiet_s": 60.0,
        "window_s": None,
    }
    assert (spec.out, spec.campaign) == (Path("dsv41-windows"), Path("dsv41-windows"))
    assert (spec.seed, spec.interleave, spec.report_only) == (None, False, False)
    assert spec.target.table == {"kind": "local", "command": ["{python}", "{port}"]}
    assert spec.target.where == str(tmp_path / "w.toml")


def test_the_resolved_window_can_be_read_back_from_its_json(tmp_path: Path) -> None:
    spec = load(tmp_path, WINDOW)
    again = WindowSpec.model_validate(spec.to_json())
    assert again.to_json() == spec.to_json()
    assert again.starts == spec.starts


def test_options_win_over_the_file(tmp_path: Path) -> None:
    text = edited("repeats = 3", 'repeats = 3\nseed = 1\nout = "a"\ncampaign = "b"')
    spec = load(tmp_path, text)
    assert (spec.seed, spec.out, spec.campaign) == (1, Path("a"), Path("b"))
    spec = load(tmp_path, text, seed=0, out="c", campaign="d", report_only=True)
    assert (spec.seed, spec.out, spec.campaign) == (0, Path("c"), Path("d"))
    assert spec.report_only
    assert load(tmp_path, WINDOW, out="c").campaign == Path("c")
    assert message(tmp_path, WINDOW, seed=-1).startswith("seed: -1 is out of range")


@pytest.mark.parametrize(
    ("schedule", "candidates", "symbols"),
    [
        ("C/X/C", 1, ["C", "X"]),
        ("K/I/K/I", 1, ["K", "I"]),
        ("K/X/K", 1, ["K", "X"]),
        ("C/X1/C/X2/C", 2, ["C", "X1", "X2"]),
        ("K/X1/K/X2", 2, ["K", "X1", "X2"]),
        ("control/c1/control/c1", 1, ["C", "X"]),
    ],
)
def test_an_arm_without_a_symbol_gets_the_usual_one(
    tmp_path: Path, schedule: str, candidates: int, symbols: list[str]
) -> None:
    arms = "".join(f'[arms.c{n}]\nrole = "candidate"\n' for n in range(1, candidates + 1))
    text = edited("K/I/K/I", schedule).replace(
        '[arms.fast]\nrole = "candidate"\nargs = ["--fast"]\n', arms
    )
    spec = load(tmp_path, text)
    assert [arm.symbol for arm in spec.arms] == symbols


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        ("4", [4, 4, 4]),
        ("{control = 2, fast = 3}", [2, 3, 2]),
        ("{C1 = 2, X = 4, C2 = 3}", [2, 4, 3]),
        ("{control = 2, fast = 3, C2 = 5}", [2, 3, 5]),
    ],
)
def test_repeats_are_given_for_all_by_arm_or_by_start(
    tmp_path: Path, repeats: str, expected: list[int]
) -> None:
    text = edited("K/I/K/I", "C/X/C").replace("repeats = 3", f"repeats = {repeats}")
    spec = load(tmp_path, text)
    assert [spec.repeats_of(start.name) for start in spec.starts] == expected
    assert spec.starts[1] == Start(name="X", arm="fast", index=1)


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (("repeats = 3", "repeats = 3"), "candidate"),
        (("decision = true\n", ""), "report"),
        (("decision = true\n", "decision = false\n"), "report"),
    ],
)
def test_a_window_without_kind_decides_if_a_cell_does(
    tmp_path: Path, edit: tuple[str, str], kind: str
) -> None:
    assert load(tmp_path, edited(*edit)).kind == kind


def test_variables_come_from_the_option_then_the_environment_then_the_default(
    tmp_path: Path,
) -> None:
    text = WINDOW.replace('["--fast"]', '["{size}", "{port}", "{{size}}", "{\\"a\\": 1}"]') + (
        '[variables.size]\nenv = "SIZE"\ndefault = "1"\n'
    )
    assert load(tmp_path, text, environ={}).candidates[0].args[0] == "1"
    assert load(tmp_path, text, environ={"SIZE": "2"}).candidates[0].args[0] == "2"
    spec = load(tmp_path, text, environ={"SIZE": "2"}, variables={"size": "{port}3"})
    assert spec.candidates[0].args == ("{port}3", "{port}", "{{port}3}", '{"a": 1}')
    assert spec.variables == {"size": "{port}3"}


def test_the_target_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    target = WINDOW[WINDOW.index("[target]") :].replace("{port}", "{server}")
    (tmp_path / "t.toml").write_text(target + '[variables.server]\ndefault = "s"\n')
    spec = load(tmp_path, 'target = "t.toml"\n' + WINDOW[: WINDOW.index("[target]")])
    assert spec.target.table["command"] == ["{python}", "s"]
    assert spec.target.where == str(tmp_path / "t.toml")
    told = spec.target.located(SpecError("target.command: too short"))
    assert str(told) == f"{tmp_path}/t.toml:3: target.command: too short"
    assert str(spec.target.located(SpecError("arms.x: no"))) == "arms.x: no"


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    spec = load(tmp_path, WINDOW)
    (tmp_path / "w.toml").write_bytes(b"\xef\xbb\xbf" + WINDOW.replace("\n", "\r\n").encode())
    assert load_spec(tmp_path / "w.toml") == spec


def test_a_plain_arm_may_be_compared_by_what_it_has(tmp_path: Path) -> None:
    text = edited('"ms_per_round"\nguards = ["accepted_per_round"]', '"decode_tok_s"')
    text = text.replace('role = "control"', 'role = "control"\nspeculation = false')
    assert load(tmp_path, text).control.speculation is False
    both = text.replace('role = "candidate"', 'role = "candidate"\nspeculation = false')
    assert load(tmp_path, both.replace('"decode_tok_s"', '"ms_per_round"')).kind == "candidate"


def test_cell_modules_lie_beside_the_window_file(tmp_path: Path) -> None:
    (tmp_path / "my_cells.py").write_text("")
    spec = load(tmp_path, edited("repeats = 3", 'repeats = 3\ncell_modules = ["my_cells.py"]'))
    assert spec.cell_modules == (tmp_path / "my_cells.py",)


def test_plugins_add_metrics_and_kinds_of_target(tmp_path: Path) -> None:
    text = edited('"ms_per_round"', '"watts"').replace('"local"', '"mine"')
    spec = load(tmp_path, text, extra_metrics=["watts"], target_kinds=["mine"])
    assert (spec.cells[0].primary, spec.target.kind) == ("watts", "mine")


# -- what is refused -------------------------------------------------------------------------------

METRICS = (
    "ms_per_round, accepted_per_round, ttft_ms, decode_tok_s, client_tok_s, prefill_tok_s, rounds, "
    "fairness"
)
NAME_RULE = "1 to 64 of letters, digits, '.', '_' and '-', the first a letter or digit"

REFUSED = {
    "unknown key": (
        "primary =",
        "primry =",
        "w.toml:18: cells[0].primry: unknown key; did you mean 'primary'?; valid: name, decision, "
        "primary, guards, expected_gain, profile, estimated_s, sampling, expect_identical",
    ),
    "unknown table": (
        "[limits]",
        "[limit]",
        "w.toml:24: limit: unknown key; did you mean 'limits'?; valid: window, arms, cells, "
        "claims, limits, advice, noise, gates, pilot, variables, target",
    ),
    "misspelt required key": (
        'lane = "DEMO"',
        'lan = "DEMO"',
        "w.toml:2: window.lan: unknown key; did you mean 'lane'?; valid: lane, name, hypothesis, "
        "kind, schedule, repeats, pairing, interleave, by_profile, smoke, start_sd, diff_cv, "
        "clock_cap_mhz, seed, out, campaign, cell_modules, start_estimate_s",
    ),
    "missing key": ('lane = "DEMO"\n', "", "w.toml:1: window.lane: missing"),
    "missing decision cell's primary": (
        'primary = "ms_per_round"\n',
        "",
        f"w.toml:15: cells[0].primary: missing; a decision cell names its primary metric; "
        f"valid: {METRICS}",
    ),
    "wrong type, text": (
        'lane = "DEMO"',
        "lane = 7",
        "w.toml:2: window.lane: expected a string, got the integer 7",
    ),
    "wrong type, flag": (
        "decision = true",
        'decision = "yes"',
        "w.toml:17: cells[0].decision: expected true or false, got 'yes'",
    ),
    "wrong type, array element": (
        '["--fast"]',
        '["--fast",\n 2]',
        "w.toml:14: arms.fast.args[1]: expected a string, got the integer 2",
    ),
    "wrong type, a number as a flag": (
        "watch_s = 2",
        "watch_s = true",
        "w.toml:25: limits.watch_s: expected a number, got true",
    ),
    "unknown value": (
        'role = "candidate"',
        'role = "candidat"',
        "w.toml:12: arms.fast.role: unknown value 'candidat'; did you mean 'candidate'?; "
        "valid: control, candidate",
    ),
    "unknown kind": (
        "repeats = 3",
        'repeats = 3\nkind = "compare"',
        "w.toml:7: window.kind: unknown value 'compare'; valid: candidate, report, admission",
    ),
    "unknown pairing": (
        "repeats = 3",
        'repeats = 3\npairing = "pairs"',
        "w.toml:7: window.pairing: unknown value 'pairs'; valid: adjacent, bracket, none",
    ),
    "unknown metric": (
        '"ms_per_round"',
        '"ms_per_rond"',
        "w.toml:18: cells[0].primary: unknown metric 'ms_per_rond'; did you mean 'ms_per_round'?; "
        f"valid: {METRICS}",
    ),
    "unknown guard": (
        '["accepted_per_round"]',
        '["ttft_ms", "foo"]',
        f"w.toml:19: cells[0].guards[1]: unknown metric 'foo'; valid: {METRICS}",
    ),
    "guard is primary": (
        '["accepted_per_round"]',
        '["ms_per_round"]',
        "w.toml:19: cells[0].guards[0]: metric 'ms_per_round' is used twice in cell 'decode-b1'",
    ),
    "few repeats": (
        "repeats = 3",
        "repeats = 1",
        "w.toml:6: window.repeats: arm 'control' has 2 repeats over all its starts; a decision "
        "cell needs at least 3 in every arm",
    ),
    "no repeats": (
        "repeats = 3",
        "repeats = 0",
        "w.toml:6: window.repeats: 0 is out of range; valid: 1 to 10000",
    ),
    "repeats of another type": (
        "repeats = 3",
        "repeats = 3.0",
        "w.toml:6: window.repeats: expected an integer or a table of integers, got the number 3.0",
    ),
    "repeats of an unknown start": (
        "repeats = 3",
        "repeats = {control = 3, I = 3}",
        "w.toml:6: window.repeats.I: unknown arm or start; did you mean 'I2'?; valid: control, "
        "fast, K1, I1, K2, I2",
    ),
    "repeats missing for an arm": (
        "repeats = 3",
        "repeats = {control = 3}",
        "w.toml:6: window.repeats: no repeats for start I1 (arm 'fast')",
    ),
    "too many items": (
        "repeats = 3",
        "repeats = 10_000\nseed = 1\n[window.x]",
        "w.toml:8: window.x: unknown key; valid: lane, name, hypothesis, kind, schedule, repeats, "
        "pairing, interleave, by_profile, smoke, start_sd, diff_cv, clock_cap_mhz, seed, out, "
        "campaign, cell_modules, start_estimate_s",
    ),
    "pairs of unequal repeats": (
        "repeats = 3",
        "repeats = {control = 3, fast = 4}",
        "w.toml:6: window.repeats: pairing 'adjacent' needs equal repeats: K1 has 3, I1 has 4",
    ),
    "impossible pairing": (
        "repeats = 3",
        'repeats = 3\npairing = "bracket"',
        "w.toml:7: window.pairing: pairing 'bracket' is impossible: start I2 needs a control start "
        "right before and right after it",
    ),
    "unused control": (
        '"K/I/K/I"\nrepeats = 3',
        '"K/I/K/I/K"\nrepeats = 3\npairing = "adjacent"',
        "w.toml:7: window.pairing: pairing 'adjacent' is impossible: no pair uses control start K3",
    ),
    "unknown token": (
        "K/I/K/I",
        "K/I/K/J",
        "w.toml:5: window.schedule: unknown token 'J'; valid: I, K, control, fast",
    ),
    "empty token": (
        "K/I/K/I",
        "K/I//I",
        "w.toml:5: window.schedule: an empty token; write it like K/I/K/I",
    ),
    "arm never started": (
        "K/I/K/I",
        "K/K/K",
        "w.toml:11: arms.fast: never started; the schedule 'K/K/K' has neither 'X' nor 'fast'",
    ),
    "no control": (
        'role = "control"',
        'role = "candidate"',
        'w.toml:8: arms: no arm has role = "control"; exactly one is needed',
    ),
    "two controls": (
        'role = "candidate"',
        'role = "control"',
        "w.toml:12: arms.fast.role: a second control; 'control' is the control, exactly one is "
        "needed",
    ),
    "symbol twice": (
        'role = "candidate"',
        'role = "candidate"\nsymbol = "K"',
        "w.toml:13: arms.fast.symbol: symbol 'K' is arm 'control' already",
    ),
    "symbol is another arm": (
        'role = "candidate"',
        'role = "candidate"\nsymbol = "control"',
        "w.toml:13: arms.fast.symbol: symbol 'control' is the name of another arm",
    ),
    "arm twice": (
        "[arms.fast]",
        "[arms.control]",
        "w.toml:11: invalid TOML: the table arms.control is declared twice",
    ),
    "cell twice": (
        '"prefill-b1"',
        '"decode-b1"',
        "w.toml:22: cells[1].name: cell 'decode-b1' is listed twice",
    ),
    "key twice": (
        'name = "demo"',
        'name = "demo"\nname = "demo"',
        "w.toml:4: invalid TOML: a key is given twice",
    ),
    "window name with a slash": (
        'name = "demo"',
        'name = "de/mo"',
        f"w.toml:3: window.name: 'de/mo' is no valid name; valid: {NAME_RULE}",
    ),
    "lane that leaves its folder": (
        'lane = "DEMO"',
        'lane = ".."',
        f"w.toml:2: window.lane: '..' is no valid name; valid: {NAME_RULE}",
    ),
    "long name": (
        'name = "demo"',
        f'name = "{"a" * 65}"',
        f"w.toml:3: window.name: '{'a' * 60} … (5 more characters)' is no valid name; "
        f"valid: {NAME_RULE}",
    ),
    "arm name": (
        "[arms.fast]",
        '[arms."a b"]',
        f"w.toml:11: arms.'a b': 'a b' is no valid name; valid: {NAME_RULE}",
    ),
    "cell name with a line break": (
        '"prefill-b1"',
        '"prefill\\n"',
        f"w.toml:22: cells[1].name: 'prefill' is no valid name; valid: {NAME_RULE}",
    ),
    "negative limit": (
        "watch_s = 2",
        "watch_s = -2",
        "w.toml:25: limits.watch_s: -2 is negative; valid: 0 or more",
    ),
    "limit of nothing": (
        "watch_s = 2",
        "item_s = 0.0",
        "w.toml:25: limits.item_s: 0 is not above 0",
    ),
    "limit that is no number": (
        "watch_s = 2",
        "watch_s = nan",
        "w.toml:25: limits.watch_s: nan is not a finite number",
    ),
    "decision in a report": (
        "repeats = 3",
        'repeats = 3\nkind = "report"',
        "w.toml:18: cells[0].decision: a window of kind 'report' decides nothing; remove it or use "
        'kind = "candidate"',
    ),
    "decision in an admission": (
        "repeats = 3",
        'repeats = 3\nkind = "admission"',
        "w.toml:18: cells[0].decision: a window of kind 'admission' decides nothing; remove it or "
        'use kind = "candidate"',
    ),
    "interleave on one machine": (
        "repeats = 3",
        "repeats = 3\ninterleave = true",
        "w.toml:7: window.interleave: needs target kind 'endpoints' (servers that run side by "
        "side), not 'local'",
    ),
    "gain in percent": (
        "decision = true",
        "decision = true\nexpected_gain = 5",
        "w.toml:18: cells[0].expected_gain: 5 is no fraction; valid: above 0 and below 1, "
        "0.05 is 5 %",
    ),
    "unknown target kind": (
        'kind = "local"',
        'kind = "locl"',
        "w.toml:28: target.kind: unknown target kind 'locl'; did you mean 'local'?; "
        "valid: local, endpoints, spark-pair, systemd-unit",
    ),
    "target without kind": (
        'kind = "local"\n',
        "",
        "w.toml:27: target.kind: missing; valid: local, endpoints, spark-pair, systemd-unit",
    ),
    "missing cell module": (
        "repeats = 3",
        'repeats = 3\ncell_modules = ["no.py"]',
        "w.toml:7: window.cell_modules[0]: no file 'no.py' beside the window file",
    ),
    "seed out of range": (
        "repeats = 3",
        "repeats = 3\nseed = 2147483648",
        "w.toml:7: window.seed: 2147483648 is out of range; valid: 0 to 2147483647",
    ),
    "sampling of another type": (
        '"prefill-b1"',
        '"prefill-b1"\nsampling = {temperature = [1]}',
        "w.toml:23: cells[1].sampling.temperature: expected a number, got an array",
    ),
    "sampling out of range": (
        '"prefill-b1"',
        '"prefill-b1"\nsampling = {temperature = -1}',
        "w.toml:23: cells[1].sampling: temperature -1: valid: 0 to 10",
    ),
    "sampling of an unknown value": (
        '"prefill-b1"',
        '"prefill-b1"\n[cells.sampling]\ncache = "hot"',
        "w.toml:24: cells[1].sampling.cache: unknown value 'hot'; valid: cold, fill, warm, any",
    ),
    "sampling of an unknown key": (
        '"prefill-b1"',
        '"prefill-b1"\nsampling = {temprature = 1}',
        "w.toml:23: cells[1].sampling.temprature: unknown key; did you mean 'temperature'?; "
        "valid: temperature, top_p, top_k, thinking, chat_template_kwargs, priority, ignore_eos, "
        "cache, logprobs",
    ),
    "unset variable": (
        "[limits]",
        '[variables.server]\nenv = "SRV"\nhelp = "the program"\n[limits]',
        "w.toml:24: variables.server: not set (the program); give --window-set server=VALUE or the "
        "environment variable SRV",
    ),
    "reserved variable": (
        "[limits]",
        '[variables.port]\ndefault = "1"\n[limits]',
        "w.toml:24: variables.port: no valid name; valid: letters, digits and '_', not starting "
        "with a digit, and none of port, python, seed, start",
    ),
    "control characters": (
        'lane = "DEMO"',
        'lane = "\\u001b[31mX"',
        f"w.toml:2: window.lane: '\\x1b[31mX' is no valid name; valid: {NAME_RULE}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_file_is_told_in_one_line(tmp_path: Path, case: str) -> None:
    old, new, expected = REFUSED[case]
    assert message(tmp_path, edited(old, new), environ={}) == expected


def test_arms_are_tables_by_name(tmp_path: Path) -> None:
    text = edited("[arms.control]", "[[arms]]").replace("[arms.fast]", "[[arms]]")
    assert message(tmp_path, text) == "w.toml:8: arms: expected tables [arms.NAME], got an array"


def test_repeats_of_the_candidate_are_counted_over_all_its_starts(tmp_path: Path) -> None:
    text = edited("K/I/K/I", "C/X/C").replace("repeats = 3", "repeats = 2")
    assert "arm 'fast' has 2 repeats over all its starts" in message(tmp_path, text)
    load(tmp_path, text.replace("C/X/C", "C/X/C/X"))


def test_what_only_speculation_has_is_refused_for_a_plain_arm(tmp_path: Path) -> None:
    text = edited('role = "control"', 'role = "control"\nspeculation = false')
    assert message(tmp_path, text) == (
        "w.toml:19: cells[0].primary: metric 'ms_per_round' cannot compare arm 'fast' with arm "
        "'control', which has no speculation: a round is not the same thing in both; use "
        "decode_tok_s"
    )
    text = text.replace('role = "candidate"', 'role = "candidate"\nsettings.speculation = false')
    assert message(tmp_path, text) == (
        "w.toml:21: cells[0].guards[0]: metric 'accepted_per_round' needs speculation, which arm "
        "'control' does not have"
    )


def test_a_candidate_window_needs_a_candidate_and_a_decision_cell(tmp_path: Path) -> None:
    text = WINDOW.replace('[arms.fast]\nrole = "candidate"\nargs = ["--fast"]\n', "")
    text = text.replace("K/I/K/I", "K/K")
    assert message(tmp_path, text) == (
        'w.toml:8: arms: no arm has role = "candidate"; kind = "candidate" needs one'
    )
    load(tmp_path, text.replace("decision = true\n", ""))
    assert message(
        tmp_path, edited("decision = true\n", "").replace("[window]", '[window]\nkind="candidate"')
    ) == (
        "w.toml:2: window.kind: no cell has decision = true; name one or two decision cells, or "
        'use kind = "report"'
    )


def test_ids_of_items_must_not_collide(tmp_path: Path) -> None:
    text = edited("K/I/K/I", "C/C-a/C/C-a").replace('role = "candidate"', 'role = "candidate"\n'
        'symbol = "C-a"')  # fmt: skip
    text = text.replace("C/C-a/C/C-a", "C/C-a").replace('"prefill-b1"', '"a-decode-b1"')
    assert message(tmp_path, text) == (
        "w.toml:5: window.schedule: start C-a with cell decode-b1 and start C with cell "
        "a-decode-b1 would have the same item id; choose other symbols"
    )


def test_names_of_starts_must_not_collide(tmp_path: Path) -> None:
    text = edited("K/I/K/I", "C/C1/C").replace('role = "candidate"', 'role = "candidate"\n'
        'symbol = "C1"')  # fmt: skip
    assert message(tmp_path, text) == (
        "w.toml:5: window.schedule: two starts would be called 'C1'; choose other symbols"
    )


def test_the_whole_window_is_bounded(tmp_path: Path) -> None:
    many = edited("repeats = 3", "repeats = 10_000").replace("K/I/K/I", "/".join(["K/I"] * 20))
    assert message(tmp_path, many) == "w.toml:6: window.repeats: 800000 items; at most 100000"
    cells = "".join(f'[[cells]]\nname = "c{n}"\n' for n in range(255))
    assert message(tmp_path, edited("[limits]", cells + "[limits]")) == (
        "w.toml:15: cells: 257 cells; at most 256"
    )
    arms = "".join(f'[arms.c{n}]\nrole = "candidate"\n' for n in range(255))
    assert message(tmp_path, edited("[limits]", arms + "[limits]")) == (
        "w.toml:8: arms: 257 arms; at most 256"
    )
    long = edited("K/I/K/I", "/".join(["K"] * 10_001))
    assert message(tmp_path, long) == "w.toml:5: window.schedule: 10001 starts; at most 10000"


def test_variables_that_nobody_declared_are_refused(tmp_path: Path) -> None:
    assert message(tmp_path, WINDOW, variables={"x": "1"}) == (
        "w.toml: variable 'x' is not declared; valid: none"
    )


def test_faults_of_a_target_file_name_that_file(tmp_path: Path) -> None:
    head = 'target = "t.toml"\n' + WINDOW[: WINDOW.index("[target]")]
    assert message(tmp_path, head) == ("w.toml:1: target: no file 't.toml' beside the window file")
    target = tmp_path / "t.toml"
    for text, expected in [
        ("", "t.toml:1: target: missing; the file needs a [target] table"),
        ("[window]\n", "t.toml:1: window: unknown key; valid: target, variables"),
        ("[target]\nkind = 1\n", "t.toml:2: target.kind: expected a string, got the integer 1"),
        ("[target\n", "t.toml:1: invalid TOML: "),
    ]:
        target.write_text(text)
        assert message(tmp_path, head).startswith(expected)


def test_a_missing_file_lists_the_shipped_examples(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("demoo")
    assert str(caught.value) == (
        "demoo: no such window file or shipped example; did you mean 'demo'?; "
        f"valid: {', '.join(example_names())}"
    )
    with pytest.raises(SpecError, match="not a regular file"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="no such window file"):
        load_spec("a\0b")
    with pytest.raises(SpecError, match="cannot be read: File name too long"):
        load_spec("x" * 5000)


def test_a_folder_called_like_an_example_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_spec("demo").name == "demo"


# -- whatever is in the file -----------------------------------------------------------------------

PIECES = [
    "[", "]", "{", "}", "=", ".", ",", '"', "'", '"""', "\n", "#", "\\", "\0", "\ufeff", "é", "nan",
    "-1", "1e999", "99999999999999999999", "0", "true", "1979-05-27", "[[cells]]\n", "[window]\n",
    "[arms.x]\n", "[arms]\n", "[target]\n", "cells = 1\n", "x = {a = [1, {b = 2}]}\n", "C/X/C", "/",
    'role = "control"\n', "repeats = {K1 = 1}\n", "decision = true\n", 'pairing = "bracket"\n',
    'kind = "report"\n', "[variables]\nx = 1\n", "settings = {a = nan}\n", "guards = [[]]\n",
]  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = WINDOW
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.sampled_from([0, 0, 1, 3, 20, 80]))
        if data.draw(st.booleans()):
            # Whole lines swap or double more often into valid TOML than single characters do.
            lines = text.splitlines(keepends=True)
            row = data.draw(st.integers(0, len(lines) - 1)) if lines else 0
            lines[row : row + data.draw(st.integers(0, 2))] = [
                data.draw(st.sampled_from([*PIECES, *WINDOW.splitlines(keepends=True)]))
            ]
            text = "".join(lines)
        else:
            text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[at + cut :]
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_text(text, encoding="utf-8")
    told = ""
    try:
        spec = load_spec(file, environ={})
    except SpecError as error:
        told = str(error)
    if told:
        assert told.isprintable()
        return
    assert WindowSpec.model_validate(spec.to_json()).to_json() == spec.to_json()
    assert tomllib.loads(text.removeprefix("\ufeff"))["window"]["lane"] == spec.lane


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.toml"
    file.write_bytes(raw)
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    assert "\n" not in str(caught.value)


# -- the shipped examples --------------------------------------------------------------------------


def test_the_shipped_examples() -> None:
    names = ("demo", "demo-loss", "demo-null", "demo-quality", "demo-tiny", "llamacpp")
    assert example_names() == names


@pytest.mark.parametrize("name", ["demo", "demo-null", "demo-loss"])
def test_the_demonstrations_alternate_with_six_a_side_and_one_decision_cell(name: str) -> None:
    spec = load_spec(name)
    assert (spec.name, spec.schedule, spec.pairing) == (name, "K/I/K/I", "adjacent")
    for arm in spec.arms:
        starts = [start.name for start in spec.starts if start.arm == arm.name]
        assert sum(spec.repeats_of(start) for start in starts) == 6
    assert spec.decision_cells == ("decode-b1",)
    assert spec.cells[0].guards == ("accepted_per_round", "client_tok_s")
    rounds = {arm.role: float(arm.args[arm.args.index("--round-ms") + 1]) for arm in spec.arms}
    assert rounds["control"] == 8.0
    assert rounds["candidate"] == {"demo": 7.36, "demo-null": 8.0, "demo-loss": 8.64}[name]


def test_the_llamacpp_example_takes_its_server_from_option_or_environment() -> None:
    with pytest.raises(SpecError, match=r"variables\.server: not set .*LLAMA_SERVER"):
        load_spec("llamacpp", environ={})
    spec = load_spec("llamacpp", environ={"LLAMA_SERVER": "/s"}, variables={"model": "m.gguf"})
    assert spec.target.table["command"][0] == "/s"
    assert "m.gguf" in spec.target.table["command"]
    assert spec.cells[0].primary == "decode_tok_s"
