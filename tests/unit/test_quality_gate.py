"""The distributional gate: three tests, what is only reported, and what it refuses to judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality_probes import FAR_KL, FLIP_KL, kinds, make_probe
from scipy.stats import binom

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.bands import (
    Band,
    load_band,
    register_band,
    save_band,
)
from pytest_dsv41.quality.compare import compare_probes
from pytest_dsv41.quality.dist_gate import GateResult, count_test, judge
from pytest_dsv41.quality.kl import PositionKL
from pytest_dsv41.quality.probe import Conditions, Probe
from pytest_dsv41.quality.sealed import seal_of

N = 64
SEAL = "5" * 64


def band_of(*others: Sequence[str] | int, **settings: object) -> Band:
    """A band with one comparison of a plain probe with each of `others`."""
    return register_band(
        [(make_probe(N, **settings), make_probe(other, **settings)) for other in others]  # type: ignore[arg-type]
    )


def judged(band: Band, candidate: Sequence[str] | int, **settings: object) -> GateResult:
    return judge(
        band,
        SEAL,
        make_probe(N, **settings),  # type: ignore[arg-type]
        make_probe(candidate, role="candidate", band=SEAL, **settings),  # type: ignore[arg-type]
    )


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(MeasurementRefused) as error:
        call()
    return error.value.kind


# ---- the comparison --------------------------------------------------------------------------


def test_a_comparison_counts_what_the_lists_were_made_for() -> None:
    found = compare_probes(make_probe(N), make_probe(kinds(N, flip=3, thin=5, far=2)))
    assert found.disagreements == 3
    assert found.untrusted == 5
    assert found.mean_kl == pytest.approx((3 * FLIP_KL + 2 * FAR_KL) / N, rel=1e-9)
    assert found.by_prompt() == pytest.approx(
        {f"p{i:03d}": value for i, value in enumerate([3 * FLIP_KL / 8, 2 * FAR_KL / 8] + [0] * 6)}
    )


# ---- top-1 and mass --------------------------------------------------------------------------


@pytest.mark.parametrize(("aa", "least"), [(0, 7), (1, 10), (2, 12), (3, 14)])
@pytest.mark.parametrize("kind", ["flip", "thin"])
def test_with_one_aa_run_the_least_losing_counts_are_the_published_ones(
    kind: str, aa: int, least: int
) -> None:
    band = band_of(kinds(N, **{kind: aa, "far": 1}))
    for count, verdict in ((least - 1, "PASS"), (least, "LOSS")):
        found = judged(band, kinds(N, **{kind: count}))
        test = found.top1 if kind == "flip" else found.mass
        assert (found.verdict, test.candidate, test.least_losing) == (verdict, count, least)
        assert test.aa == (aa,)
        assert not found.kl_loss
        assert len(found.reasons) == (verdict == "LOSS")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_counts_are_held_against_the_exact_conditional_binomial(c: int, aa: list[int]) -> None:
    found = count_test(c, tuple(aa))
    expected = binom.sf(c - 1, sum(aa) + c, 1 / (len(aa) + 1))
    assert found.p == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert found.loss == (expected < 0.01)
    # The least losing count loses, one less does not.
    least = found.least_losing
    assert binom.sf(least - 1, sum(aa) + least, 1 / (len(aa) + 1)) < 0.01
    assert binom.sf(least - 2, sum(aa) + least - 1, 1 / (len(aa) + 1)) >= 0.01


def test_more_aa_runs_see_a_smaller_excess() -> None:
    one, three = band_of(kinds(N, flip=1, far=1)), band_of(*[kinds(N, flip=1, far=1)] * 3)
    assert judged(one, kinds(N, flip=6)).verdict == "PASS"
    # 6 against 3 in three runs: P(X >= 6), X ~ Bin(9, 1/4).
    assert binom.sf(5, 9, 0.25) == pytest.approx(0.00999, abs=1e-4)
    assert judged(three, kinds(N, flip=6)).top1.p == pytest.approx(binom.sf(5, 9, 0.25))
    assert judged(three, kinds(N, flip=6)).verdict == "LOSS"


def test_where_the_aa_mostly_lacks_common_mass_the_mass_test_does_not_decide() -> None:
    saturated = band_of(kinds(N, thin=33, far=1))
    assert saturated.saturated
    found = judged(saturated, kinds(N, thin=N))
    assert found.mass.p < 1e-2 or found.mass.candidate == N
    assert (found.verdict, found.mass.decides, found.mass.loss) == ("PASS", False, False)
    assert any("saturated" in remark for remark in found.remarks)
    assert found.aa_trusted_share == pytest.approx(31 / N)
    assert found.trusted_share == 0
    half = band_of(kinds(N, thin=32, far=1))
    assert not half.saturated
    assert judged(half, kinds(N, thin=32)).mass.decides


def test_disjoint_lists_cannot_pass_unseen() -> None:
    # Their KL is 0 and so is the mean; the mass test must see them.
    band = band_of(kinds(N, far=1))
    found = judged(band, kinds(N, thin=20))
    assert found.mean_kl == pytest.approx(0, abs=1e-12)
    assert (found.verdict, found.mass.loss, found.top1.loss) == ("LOSS", True, False)


# ---- the ceiling -----------------------------------------------------------------------------


def test_the_ceiling_is_one_and_a_half_times_the_99th_percentile_of_resampled_means() -> None:
    band = band_of(kinds(N, far=20), kinds(N, far=10))
    # An independent bootstrap of the 128 positions: 30 of them have FAR_KL, so the mean of a
    # resample is FAR_KL times a binomial count over 128.
    expected = 1.5 * FAR_KL * binom.ppf(0.99, 128, 30 / 128) / 128
    assert band.kl_ceiling == pytest.approx(expected, rel=0.06)
    # Prompt by prompt: 16 prompts, of which 20 and 10 positions make 2.5 and 1.25.
    means = np.array([8, 8, 4, 0, 0, 0, 0, 0, 8, 2, 0, 0, 0, 0, 0, 0]) / 8 * FAR_KL
    rng = np.random.default_rng(3)
    resampled = means[rng.integers(0, 16, size=(40_000, 16))].mean(axis=1)
    assert band.prompt_ceiling == pytest.approx(1.5 * np.quantile(resampled, 0.99), rel=0.06)


def test_a_mean_above_the_ceiling_loses_and_one_at_it_does_not() -> None:
    # Every A/A position has the same KL: whatever is drawn, the ceiling is 1.5 times it.
    band = band_of(kinds(N, far=N))
    assert band.kl_ceiling == pytest.approx(1.5 * FAR_KL, rel=1e-9)
    assert judged(band, kinds(N, far=N)).verdict == "PASS"
    low = band_of(kinds(N, far=8), kinds(N, far=8))
    found = judged(low, kinds(N, far=N))
    assert found.kl_loss
    assert found.verdict == "LOSS"
    assert found.mean_kl == pytest.approx(FAR_KL)
    assert found.aa_mean_kl == pytest.approx(FAR_KL / 8)
    assert "above the ceiling" in found.reasons[0]


def test_an_exact_aa_has_a_ceiling_of_a_millionth_and_says_so() -> None:
    band = band_of(N, N)
    assert band.exact
    assert band.kl_ceiling == 1e-6
    assert band.cv is None
    found = judged(band, N)
    assert found.verdict == "PASS"
    assert any("exact" in remark for remark in found.remarks)
    assert judged(band, kinds(N, far=1)).verdict == "LOSS"


def test_an_aa_that_is_not_exact_has_the_ceiling_that_its_positions_give() -> None:
    # A flip is a KL of 8e-8: the millionth of an exact A/A would let 12 times as much pass.
    band = band_of(kinds(N, flip=N))
    assert FLIP_KL < 1e-7
    assert not band.exact
    assert band.kl_ceiling == pytest.approx(1.5 * FLIP_KL, rel=1e-6)
    assert band.prompt_ceiling == pytest.approx(1.5 * FLIP_KL, rel=1e-6)


def test_a_ceiling_that_the_spread_makes_untrustworthy_is_said() -> None:
    assert not [r for r in band_of(*[kinds(N, far=20)] * 2).remarks() if "cv" in r]
    wide = band_of(kinds(N, far=1), kinds(N, far=1))
    # 2 of 128 positions: the cv of a 0/1 value with p = 1/64 is sqrt((1 - p) / p), about 7.9.
    assert wide.cv == pytest.approx(7.97, abs=0.05)
    assert [r for r in wide.remarks() if "cv of 8.0" in r]


def test_one_aa_run_is_said_to_be_nearly_blind() -> None:
    assert [r for r in band_of(kinds(N, far=20)).remarks() if "nearly blind" in r]
    assert not [r for r in band_of(*[kinds(N, far=20)] * 2).remarks() if "nearly blind" in r]


# ---- what is reported only -------------------------------------------------------------------


def test_the_literal_rule_is_reported_and_does_not_decide() -> None:
    band = band_of(kinds(N, flip=1, far=1), kinds(N, flip=3, far=1))
    for count, loss in ((4, False), (5, True)):
        found = judged(band, kinds(N, flip=count))
        assert found.fmethod_top1_rule == {"limit": 5, "candidate": count, "loss": loss}
        assert found.verdict == "PASS"


def test_subsets_and_the_worst_prompt_are_told() -> None:
    settings = {"subsets": ("short", "32k")}
    band = band_of(kinds(N, far=24), **settings)
    # Prompts take turns: positions 0 to 7 are short, 8 to 15 are 32k.
    found = judged(band, ["flip"] * 2 + ["same"] * 6 + ["far"] * 8 + ["same"] * 48, **settings)
    assert found.worst_prompt == "p001"
    assert found.worst_prompt_kl == pytest.approx(FAR_KL)
    short, long = found.by_subset["short"], found.by_subset["32k"]
    assert (short.positions, long.positions) == (32, 32)
    assert short.mean_kl == pytest.approx(2 * FLIP_KL / 32, rel=1e-6)
    assert long.mean_kl == pytest.approx(FAR_KL / 4)
    assert (short.disagreements, long.disagreements) == (2, 0)
    assert short.aa_mean_kl == pytest.approx(FAR_KL / 2)
    assert long.aa_mean_kl == pytest.approx(FAR_KL / 4)


def test_prompts_resampled_instead_of_positions_are_reported_beside() -> None:
    # All of the A/A's KL lies in one prompt: resampling prompts allows for more.
    band = band_of(kinds(N, far=8), kinds(N, far=8))
    assert band.prompt_ceiling > band.kl_ceiling
    count = next(c for c in range(N) if c * FAR_KL / N > band.kl_ceiling)
    found = judged(band, kinds(N, far=count))
    assert found.verdict == "LOSS"
    assert any("prompts resampled" in remark for remark in found.remarks)


def test_a_probes_notes_reach_the_report() -> None:
    band = band_of(kinds(N, far=20))
    found = judge(
        band,
        SEAL,
        make_probe(N, notes=("cache-unproved",)),
        make_probe(N, role="candidate", band=SEAL),
    )
    assert "the control: cache-unproved" in found.remarks


def test_a_cache_that_one_side_alone_used_is_remarked_on() -> None:
    band, control = band_of(kinds(N, far=20)), make_probe(N)
    candidate = make_probe(N, role="candidate", band=SEAL)
    warm = replace(
        candidate,
        positions=tuple(
            replace(position, cached_tokens=position.prefix_tokens // 2)
            for position in candidate.positions
        ),
    )
    assert not [r for r in judge(band, SEAL, control, candidate).remarks if "cache" in r]
    assert [r for r in judge(band, SEAL, control, warm).remarks if "the candidate 50 %" in r]
    # What is not told is not compared.
    silent = tuple(replace(position, cached_tokens=None) for position in control.positions)
    unknown = replace(control, positions=silent)
    assert unknown.cached_share is None
    assert not [r for r in judge(band, SEAL, unknown, warm).remarks if "from a cache" in r]


# ---- refusals --------------------------------------------------------------------------------


def test_a_band_registered_after_the_candidate_was_probed_is_refused() -> None:
    band = band_of(kinds(N, far=20))
    for named in (None, "6" * 64):
        late = make_probe(N, role="candidate", band=named)
        assert refused(lambda late=late: judge(band, SEAL, make_probe(N), late)) == "band-late"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"corpus": "another"}, "other-prompts"),
        ({"conditions": Conditions(cache="cold")}, "conditions"),
        ({"conditions": Conditions(concurrency=4)}, "conditions"),
        ({"conditions": Conditions(others="allowed")}, "conditions"),
        ({"top_n": 10}, "top-n"),
    ],
)
def test_what_differs_but_the_answers_is_refused_on_either_side(
    settings: dict[str, object], kind: str
) -> None:
    band = band_of(kinds(N, far=20))
    control, candidate = make_probe(N), make_probe(N, role="candidate", band=SEAL)
    assert judge(band, SEAL, control, candidate).verdict == "PASS"
    other = make_probe(N, **settings)  # type: ignore[arg-type]
    assert refused(lambda: judge(band, SEAL, other, candidate)) == kind
    other = make_probe(N, role="candidate", band=SEAL, **settings)  # type: ignore[arg-type]
    assert refused(lambda: judge(band, SEAL, control, other)) == kind
    assert refused(lambda: compare_probes(control, other)) == kind


def test_fewer_positions_are_other_positions() -> None:
    band = band_of(kinds(N, far=20))
    short = make_probe(N - 8, role="candidate", band=SEAL)
    assert refused(lambda: judge(band, SEAL, make_probe(N), short)) == "other-prompts"


def test_the_control_must_be_the_bands_production_and_no_part_of_it() -> None:
    pair = (make_probe(N), make_probe(kinds(N, far=20)))
    band, candidate = register_band([pair]), make_probe(N, role="candidate", band=SEAL)
    assert refused(lambda: judge(band, SEAL, pair[0], candidate)) == "band-overlap"
    newer = make_probe(N, version="2")
    assert refused(lambda: judge(band, SEAL, newer, candidate)) == "band-production"
    # The candidate may well be another version: that may be what is judged.
    newer = make_probe(N, role="candidate", band=SEAL, version="2")
    assert judge(band, SEAL, make_probe(N), newer).verdict == "PASS"


def test_roles_are_not_mixed_up() -> None:
    band, control = band_of(kinds(N, far=20)), make_probe(N)
    candidate = make_probe(N, role="candidate", band=SEAL)
    assert refused(lambda: judge(band, SEAL, candidate, candidate)) == "role"
    assert refused(lambda: judge(band, SEAL, control, control)) == "role"


def test_a_band_is_made_of_disjoint_pairs_of_one_production() -> None:
    a, b, c = (make_probe(kinds(N, far=count)) for count in (0, 8, 16))
    for pairs in ([(a, a)], [(a, b), (b, c)], [(a, b), (c, a)], [(a, b), (a, b)]):
        assert refused(lambda pairs=pairs: register_band(pairs)) == "band-overlap"
    other = make_probe(N, version="2")
    assert refused(lambda: register_band([(a, other)])) == "band-production"
    candidate = make_probe(N, role="candidate")
    assert refused(lambda: register_band([(a, candidate)])) == "band-candidate"
    strange = (make_probe(N, corpus="another"), make_probe(N, corpus="another"))
    assert refused(lambda: register_band([(a, b), strange])) == "other-prompts"
    cold = make_probe(N, conditions=Conditions(cache="cold"))
    assert refused(lambda: register_band([(a, cold)])) == "conditions"
    with pytest.raises(UsageError, match="at least one pair"):
        register_band([])


# ---- the band's file -------------------------------------------------------------------------


def saved(tmp_path: Path, band: Band) -> tuple[Path, str]:
    path = tmp_path / "band.json"
    return path, save_band(path, band)


def test_a_band_reads_back_the_same_under_its_seal(tmp_path: Path) -> None:
    band = band_of(kinds(N, far=20, flip=2, thin=1), kinds(N, far=8))
    path, seal = saved(tmp_path, band)
    assert load_band(path) == (band, seal)
    assert len(seal) == 64
    with pytest.raises(UsageError, match="never overwritten"):
        save_band(path, band)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kl_ceiling": ', '"kl_ceiling": 1'),
        ('"registered_utc": "2', '"registered_utc": "1'),
        ('"top_n": 20', '"top_n": 21'),
        ("false", "true"),
    ],
)
def test_an_edited_band_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path, _ = saved(tmp_path, band_of(kinds(N, flip=1, far=20)))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert refused(lambda: load_band(path)) == "band-edited"


def test_a_band_sealed_anew_with_overlapping_runs_is_still_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, band_of(kinds(N, far=20), kinds(N, far=8)))
    body = json.loads(path.read_text())
    del body["sha256"]
    body["comparisons"][1]["b_run"] = body["comparisons"][0]["a_run"]
    path.write_text(json.dumps({**body, "sha256": seal_of(body)}))
    assert refused(lambda: load_band(path)) == "band-overlap"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body.update(schema="dsv41-band-9"), "schema 'dsv41-band-9'"),
        (lambda body: body.update(kl_ceiling="0.1"), "kl_ceiling"),
        (lambda body: body.pop("model"), "model"),
        (lambda body: body.update(more=1), "more"),
        (lambda body: body["comparisons"][0]["kl"].pop(), "one entry a position"),
        (lambda body: body["conditions"].update(cache="hot"), "conditions.cache"),
        (lambda body: body.update(prompts=[]), "not those of its prompts"),
        (lambda body: body.update(prompt_of=["p000"] * N), "not those of its prompts"),
        (lambda body: body["prompt_of"].__setitem__(0, "p001"), "as many positions each"),
        (lambda body: body.update(prefixes=["0" * 64] * N), "stands there twice"),
        (lambda body: body.update(top_n=0), "top_n: 0; at least 1"),
        (lambda body: body.update(kl_ceiling=0.0), "a ceiling is not above 0"),
        (lambda body: body.update(prompt_ceiling=-1.0), "a ceiling is not above 0"),
        (lambda body: body["comparisons"][0]["kl"].__setitem__(3, -1e-9), "a KL is below 0"),
        (
            lambda body: body["comparisons"][0]["common_mass"].__setitem__(3, 1.5),
            "a common mass is not between 0 and 1",
        ),
    ],
)
def test_a_file_that_is_no_band_names_the_field(
    tmp_path: Path, change: Callable[[dict[str, object]], object], says: str
) -> None:
    path, _ = saved(tmp_path, band_of(kinds(N, far=20)))
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    path.write_text(json.dumps({**body, "sha256": seal_of(body)}))
    with pytest.raises(UsageError, match=says) as error:
        load_band(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\udcff"])
def test_other_files_are_no_band(tmp_path: Path, text: str) -> None:
    path = tmp_path / "band.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match="no band"):
        load_band(path)
    with pytest.raises(UsageError, match="No such file"):
        load_band(tmp_path / "nothing.json")


def test_a_pipe_or_a_device_is_no_band_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(UsageError, match=f"{name}: not a regular file"):
            load_band(tmp_path / name)


# ---- the whole -------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(["same", "flip", "thin", "far"]), min_size=N, max_size=N),
    st.lists(
        st.lists(st.sampled_from(["same", "flip", "thin", "far"]), min_size=N, max_size=N),
        min_size=1,
        max_size=3,
    ),
)
def test_the_verdict_is_the_or_of_the_three_tests(
    candidate: list[str], aa: list[list[str]]
) -> None:
    band = band_of(*aa)
    found = judged(band, candidate)
    k = len(aa)

    def loses(kind: str) -> bool:
        a, c = sum(one.count(kind) for one in aa), candidate.count(kind)
        return bool(binom.sf(c - 1, a + c, 1 / (k + 1)) < 0.01)

    thin = sum(one.count("thin") for one in aa)
    mass = loses("thin") and thin <= k * N / 2
    kl = (candidate.count("flip") * FLIP_KL + candidate.count("far") * FAR_KL) / N > band.kl_ceiling
    assert found.top1.loss == loses("flip")
    assert found.mass.loss == mass
    assert found.kl_loss == kl
    assert found.verdict == ("LOSS" if loses("flip") or mass or kl else "PASS")
    json.dumps(found.to_json(), allow_nan=False)


def test_a_probe_knows_what_it_covers() -> None:
    found: Probe = make_probe(N, subsets=("short", "32k"))
    assert found.subset == "short,32k"
    found.check()
    compared = compare_probes(found, make_probe(N, subsets=("short", "32k")))
    assert all(isinstance(position, PositionKL) for position in compared.positions)
