"""Memory laws and boot ledgers (FRANK-ARCHON): what a pool backs, and what a start says it got.

Expected numbers are the document's own, each beside the sum that gives it.
"""

from __future__ import annotations

import json
import textwrap
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.unit.memory import (
    Ledger,
    Shape,
    alternatives,
    budget_ceiling,
    check_ledger,
    diff_ledgers,
    law_against,
    make_plan,
    parse_ledger,
    read_law,
)

RADIANCE = read_law("radiance")
GEMMA = read_law("llamacpp-gemma3-270m")
WINDOW = 200_000

BF16_BOOT = """\
kv cache           6.75 GiB   349% of it -- backs 2 sequences all at 200000
                                tokens at once, which is the worst case
vram_weights      21.69 GiB   stated by --vram-weights-mib
vram_kv            6.75 GiB   stated by --vram-kv-mib
unclaimed          2.03 GiB
kv_attn      full 13 layers block 4 tok page 52.00 KiB 115688 blocks = 5.74 GiB (462752 tokens)
kv_qsa_bkey  full 13 layers block 4 tok page  3.25 KiB 115688 blocks = 367.17 MiB (462752 tokens)
load: rank 0, mover took 21.69 GiB, weights pool 147.00 KiB free of 21.69 GiB
mover: 5146 slots can be lent out of the KV cache (6.08 GiB)
card 0 settled at 1.85 GiB free
serving on http://:::7770
"""
FP8_BOOT = """\
kv cache 5.00 GiB … backs 3 sequences all at 200000 tokens at once, which is the worst case
vram_weights      23.44 GiB   stated by --vram-weights-mib
vram_kv            5.00 GiB   stated by --vram-kv-mib
unclaimed          2.03 GiB
3.42 GiB is neither budgeted nor accounted — the driver's context, the activation arena and
  --gpu-headroom-mib come out of it; anything past those is throughput on the floor
kv_attn      full 13 layers block 4 tok page 26.00 KiB 151935 blocks = 3.77 GiB (607740 tokens)
kv_qsa_bkey  full 13 layers block 4 tok page  3.25 KiB 151935 blocks = 482.22 MiB (607740 tokens)
load: rank 0, mover took 23.44 GiB, weights pool 147.00 KiB free of 23.44 GiB
mover: 4967 slab slots (64 shadow), 8893 pinned pool slots, 4.24 GiB static vram
mover: 4967 slots can be lent out of the KV cache (5.87 GiB)
card 0 settled at 2.01 GiB free against 209.19 MiB (the 96.00 MiB --gpu-headroom-mib
    and 113.19 MiB kept for the static region)
card 1 settled at 2.02 GiB free against 209.19 MiB (the 96.00 MiB --gpu-headroom-mib and
    113.19 MiB kept for the static region)
a line of a newer engine
serving on http://:::7770
"""


# -- the law --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "seqs", "dtype", "backed", "ledger"),
    [
        (3543, 3, "fp8", 387_194, 386_904),  # (3543 - 330 - 448) * 1024 / 7.3125
        (6912, 2, "bf16", 462_903, 462_752),  # (6912 - 220 - 448) * 1024 / 13.8125
        (6912, 4, "fp8", 843_565, 843_276),
        (5120, 3, "fp8", 608_028, 607_740),
    ],
)
def test_a_pool_backs_what_the_boots_said_less_their_rounding(
    pool: float, seqs: int, dtype: str, backed: int, ledger: int
) -> None:
    assert RADIANCE.backed_tokens(dtype, seqs, WINDOW, pool) == backed
    assert 0.0003 <= (backed - ledger) / backed <= 0.0008


@pytest.mark.parametrize(
    ("seqs", "dtype", "need"),
    [
        (2, "bf16", 6063.5),
        (2, "fp8", 3524.4),
        (3, "fp8", 5063),
        (4, "fp8", 6601),
        (4, "bf16", 11_679),
    ],
)
def test_a_shape_needs_its_tokens_its_sequences_and_the_fixed_part(
    seqs: int, dtype: str, need: float
) -> None:
    found = RADIANCE.need_mib(dtype, seqs, WINDOW)
    assert found == pytest.approx(need, abs=0.5 if need == int(need) else 0.05)


def test_exact_keys_cost_less_than_twice_because_the_indexer_does_not_change() -> None:
    ratio = RADIANCE.kib_per_token("bf16") / RADIANCE.kib_per_token("fp8")
    assert (RADIANCE.kib_per_token("fp8"), RADIANCE.kib_per_token("bf16")) == (7.3125, 13.8125)
    assert ratio == pytest.approx(1.89, abs=0.005)


def test_two_slots_at_fp8_do_not_fit_the_pool_that_the_document_gives_them() -> None:
    plan = make_plan(RADIANCE, Shape("fp8", 2, WINDOW, pool=3072))
    assert plan.backed == 336_642
    (line,) = plan.refused
    assert "backs 336,642 tokens = 1.68 windows; 2 of 200,000 tokens need 3,525 MiB" in line
    assert make_plan(RADIANCE, Shape("fp8", 2, WINDOW, pool=3525)).refused == ()
    assert make_plan(RADIANCE, Shape("fp8", 2, WINDOW, pool=3524)).refused != ()


@given(
    seqs=st.integers(1, 8),
    window=st.integers(1, 300_000),
    law=st.sampled_from([RADIANCE, GEMMA]),
    which=st.integers(0, 2),
)
def test_a_pool_of_what_is_needed_backs_what_was_asked(
    seqs: int, window: int, law: object, which: int
) -> None:
    assert law in (RADIANCE, GEMMA)
    chosen = RADIANCE if law is RADIANCE else GEMMA
    dtype = chosen.dtypes[which % len(chosen.dtypes)]
    need = chosen.need_mib(dtype, seqs, window)
    # Floating point may lose the last token.
    assert chosen.backed_tokens(dtype, seqs, window, need) >= seqs * window - 1
    assert chosen.backed_tokens(dtype, seqs, window, need - 1) < seqs * chosen.groups[0].cells(
        window
    )


# -- llama.cpp: its own lines, seen at -c 4096 -np 2 ----------------------------------------------

LLAMA = """\
0.07.574.844 I llama_context: n_ctx                 = 4096
0.07.574.851 I llama_context: n_ctx_seq             = 2048
0.07.575.209 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 2048 cells
0.07.575.341 I llama_kv_cache:        CPU KV buffer size =  {a} MiB
0.07.595.292 I llama_kv_cache: size = {a} MiB (  2048 cells,   3 layers,  2/2 seqs), \
K ({t}): {a2} MiB, V ({t}): {a2} MiB
0.07.606.478 I llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells
0.07.606.667 I llama_kv_cache:        CPU KV buffer size =   {b} MiB
0.07.810.478 I llama_kv_cache: size = {b} MiB (  1024 cells,  15 layers,  2/2 seqs), \
K ({t}): {b2} MiB, V ({t}): {b2} MiB
0.07.823.469 I sched_reserve:        CPU compute buffer size =    21.28 MiB
"""


@pytest.mark.parametrize(
    ("dtype", "a", "a2", "b", "b2"),
    [
        ("f16", "12.00", "6.00", "30.00", "15.00"),
        ("q8_0", "6.38", "3.19", "15.94", "7.97"),
        ("q4_0", "3.38", "1.69", "8.44", "4.22"),
    ],
)
def test_llamacpps_ledger_is_its_law_to_a_thousandth(
    dtype: str, a: str, a2: str, b: str, b2: str
) -> None:
    ledger = parse_ledger(LLAMA.format(t=dtype, a=a, a2=a2, b=b, b2=b2), "llamacpp")
    assert check_ledger(ledger) == []
    assert ledger.missing == ()
    assert ledger.unknown == ()
    caches = [ledger.number(f"kv ({kind})", "size") or 0.0 for kind in ("non-SWA", "SWA")]
    assert caches == [float(a), float(b)]
    assert ledger.number("kv (SWA)", "cells") == 1024
    assert ledger.find("kv (SWA)", "K dtype").value == dtype  # type: ignore[union-attr]
    assert sum(caches) == pytest.approx(GEMMA.need_mib(dtype, 2, 2048), rel=1e-3)


def test_a_context_is_rounded_up_to_whole_cells() -> None:
    """Seen: -c 3000 gives 3072 cells and 9 MiB at f16, beside 15 MiB of windowed layers."""
    assert GEMMA.need_mib("f16", 1, 3000) == 24.0
    assert GEMMA.need_mib("f16", 1, 300) == 512 * 18 / 1024


# -- the ledger -----------------------------------------------------------------------------------


def test_a_boot_ledger_is_read_as_printed_wrapped_lines_too() -> None:
    ledger = parse_ledger(BF16_BOOT, "radiance")
    assert ledger.unknown == ()
    assert ledger.missing == ()
    assert check_ledger(ledger, {"--vram-weights-mib": 22208, "--vram-kv-mib": 6912}) == []
    for subject, name, value in (
        ("kv cache", "size", 6912.0),
        ("kv cache", "share", 349),
        ("kv cache", "sequences", 2),
        ("kv cache", "tokens each", 200_000),
        ("vram_weights", "stated", 21.69 * 1024),
        ("card", "unclaimed", 2.03 * 1024),
        ("kv_attn", "page", 52 / 1024),
        ("kv_attn", "blocks", 115_688),
        ("kv_qsa_bkey", "size", 367.17),
        ("kv_qsa_bkey", "tokens", 462_752),
        ("rank 0", "weights pool free", 147 / 1024),
        ("mover", "lendable slots", 5146),
        ("mover", "lendable", 6.08 * 1024),
        ("card 0", "settled free", 1.85 * 1024),
        ("server", "serving on", "http://:::7770"),
    ):
        fact = ledger.find(subject, name)
        assert fact is not None, (subject, name)
        assert fact.value == value or fact.value == pytest.approx(value), (subject, name)


def test_lines_of_a_newer_engine_are_kept_and_the_rest_is_read() -> None:
    ledger = parse_ledger(FP8_BOOT, "radiance")
    assert ledger.unknown == ("a line of a newer engine",)
    assert ledger.number("card 0", "headroom") == 96.0
    assert ledger.number("card 1", "static region") == 113.19
    assert ledger.number("mover", "pinned pool slots") == 8893
    assert ledger.number("card", "not accounted") == pytest.approx(3.42 * 1024)
    assert ledger.number("kv_attn", "tokens") == 607_740


SENTENCES = (
    "kv cache 6.75 GiB 349% of it -- backs 2 sequences all at 200000 tokens at once, which is the "
    "worst case",
    "vram_kv 6.75 GiB stated by --vram-kv-mib",
    "3.42 GiB is neither budgeted nor accounted — the driver's context, the activation arena and "
    "--gpu-headroom-mib come out of it; anything past those is throughput on the floor",
    "kv_attn full 13 layers block 4 tok page 52.00 KiB 115688 blocks = 5.74 GiB (462752 tokens)",
    "load: rank 0, mover took 21.69 GiB, weights pool 147.00 KiB free of 21.69 GiB",
    "mover: 4967 slab slots (64 shadow), 10375 pinned pool slots, 4.24 GiB static vram",
    "card 0 settled at 2.01 GiB free against 209.19 MiB (the 96.00 MiB --gpu-headroom-mib and "
    "113.19 MiB kept for the static region)",
)


def test_the_width_of_the_terminal_changes_nothing() -> None:
    lines = [*SENTENCES[:3], "a line of a newer engine", *SENTENCES[3:]]
    whole = parse_ledger("\n".join(lines), "radiance")
    # Numbers and words of the seven sentences, in their order.
    assert len(whole.facts) == 4 + 2 + 1 + 6 + 3 + 4 + 4
    said = [(fact.subject, fact.name, fact.value) for fact in whole.facts]
    for width in range(40, 130):
        text = "\n".join(
            textwrap.fill(line, width, subsequent_indent=" " * 8, break_on_hyphens=False)
            for line in lines
        )
        ledger = parse_ledger(text, "radiance")
        assert ledger.unknown == ("a line of a newer engine",), width
        assert [(fact.subject, fact.name, fact.value) for fact in ledger.facts] == said, width


def test_an_indented_line_that_belongs_to_none_is_kept() -> None:
    text = BF16_BOOT.replace("unclaimed", "  a part of a newer engine\nunclaimed")
    assert parse_ledger(text, "radiance").unknown == ("a part of a newer engine",)


def test_a_journals_prefix_is_taken_off() -> None:
    text = "".join(f"Oct 13 19:21:08 box server[42]: {line}\n" for line in BF16_BOOT.splitlines())
    plain, journal = parse_ledger(BF16_BOOT, "radiance"), parse_ledger(text, "radiance")
    assert journal.facts == plain.facts


def test_what_is_missing_is_named() -> None:
    kept = "\n".join(
        line for line in BF16_BOOT.splitlines() if not line.startswith(("kv_attn", "s"))
    )
    assert parse_ledger(kept, "radiance").missing == ("kv_attn tokens", "server serving on")
    assert set(parse_ledger("", "llamacpp").missing) == {"context n_ctx", "kv size"}
    with pytest.raises(UsageError, match="dialect 'vllm': not known; valid: llamacpp, radiance"):
        parse_ledger("", "vllm")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "(462752 tokens)",
            "(462751 tokens)",
            "115,688 blocks of 4 tokens are 462,752, not 462,751",
        ),
        ("= 5.74 GiB", "= 5.76 GiB", "kv_attn: 115,688 blocks of their page are 5,874.78 MiB"),
        ("= 367.17 MiB", "= 368.20 MiB", "kv_qsa_bkey: 115,688 blocks of their page are 367.17"),
        ("vram_kv            6.75", "vram_kv            6.70", "vram_kv: states 6,860.8 MiB; the"),
    ],
)
def test_numbers_that_do_not_agree_are_named(old: str, new: str, message: str) -> None:
    ledger = parse_ledger(BF16_BOOT.replace(old, new, 1), "radiance")
    flags = {"--vram-weights-mib": 22208.0, "--vram-kv-mib": 6912.0}
    assert any(message in line for line in check_ledger(ledger, flags)), check_ledger(ledger, flags)


def test_a_cards_floor_is_the_sum_of_its_parts() -> None:
    assert check_ledger(parse_ledger(FP8_BOOT, "radiance")) == []
    wrong = parse_ledger(FP8_BOOT.replace("96.00 MiB", "97.00 MiB", 1), "radiance")
    (line,) = check_ledger(wrong)
    assert line == "card 0: headroom and static region are 210.19 MiB, not 209.19"


def test_the_ceiling_is_what_the_ledger_leaves_never_a_constant() -> None:
    """24,000 + 5,120 at a card with 2.01 GiB free above 209.19 MiB: 30,969 MiB."""
    ledger = parse_ledger(FP8_BOOT, "radiance")
    ceiling = budget_ceiling(ledger, (24_000, 5_120))
    assert ceiling is not None
    assert int(ceiling[0]) == 30_969
    rounded = budget_ceiling(ledger)
    assert rounded is not None
    assert abs(rounded[0] - ceiling[0]) <= rounded[1]
    assert budget_ceiling(parse_ledger(BF16_BOOT, "radiance")) is None
    # The tightest card counts.
    tighter = parse_ledger(FP8_BOOT.replace("2.02 GiB", "1.01 GiB"), "radiance")
    assert budget_ceiling(tighter, (24_000, 5_120))[0] == pytest.approx(  # type: ignore[index]
        29_120 + 1.01 * 1024 - 209.19
    )


@pytest.mark.parametrize(("weights", "fits"), [(25_600, True), (26_112, False)])
def test_weights_beside_the_pool_are_held_to_the_ceiling(weights: float, fits: bool) -> None:
    plan = make_plan(
        RADIANCE,
        Shape("fp8", 3, WINDOW, pool=5_120, weights=weights),
        ledger=parse_ledger(FP8_BOOT, "radiance"),
        pair=(24_000, 5_120),
    )
    assert (plan.refused == ()) is fits
    if not fits:
        assert plan.refused == ("weights and pool take 31,232 MiB; the ledger leaves 30,969",)


def test_a_plan_says_what_follows() -> None:
    plan = make_plan(
        RADIANCE,
        Shape("fp8", 4, WINDOW, pool=6_912, weights=22_208),
        ledger=parse_ledger(FP8_BOOT, "radiance"),
        pair=(24_000, 5_120),
    )
    said = "\n".join(plan.consequences)
    assert "12 all-reduce rows, at most 25: with more, the fused all-reduce" in said
    assert "a prefix entry takes 58.50 KiB" in said
    # 5.87 GiB of 4,967 slots: 1.21 MiB each; 6,912 - 5,120 = 1,792 MiB.
    assert "1,792 MiB go from the slab at the same sum: about 1,481 slots of 1.21 MiB" in said
    # 2 x 44,928 MiB + 47.7 GiB + 8 GiB: 143.45 GiB, not 147.
    assert "= 146,893 MiB (143.45 GiB), under the knob's floor of 150,000 MiB" in said
    bf16 = make_plan(RADIANCE, Shape("bf16", 2, WINDOW, pool=6_912))
    assert any("a prefix entry takes 110.50 KiB" in line for line in bf16.consequences)
    assert any("6 all-reduce rows" in line for line in bf16.consequences)
    nine = make_plan(RADIANCE, Shape("fp8", 9, 1000))
    assert any(line.startswith("WARNING: 27 all-reduce rows") for line in nine.consequences)


def test_a_knob_out_of_its_range_is_refused_with_the_reason() -> None:
    shape = Shape("fp8", 2, WINDOW, pool=3_600)
    assert make_plan(RADIANCE, shape, knobs={"max-num-batched-tokens": 2048}).refused == ()
    (line,) = make_plan(RADIANCE, shape, knobs={"max-num-batched-tokens": 2560}).refused
    assert line.startswith("max-num-batched-tokens 2560: at most 2048: above it decode collapses")
    with pytest.raises(UsageError, match="knob 'mnbt': the law has none; valid: max-num"):
        make_plan(RADIANCE, shape, knobs={"mnbt": 2048})
    with pytest.raises(UsageError, match="dtype 'q8_0': --kv-cache-dtype takes fp8, bf16"):
        make_plan(RADIANCE, Shape("q8_0", 2, WINDOW))


@pytest.mark.parametrize(
    "words",
    [
        ["--pool", "nan"],
        ["--pool", "inf"],
        ["--pool=-1"],
        ["--pool", "5120", "--weights", "nan"],
        ["--pool", "5120", "--weights=-1"],
        ["--pool", "5120", "--weights", "26112", "--ledger-pair", "nan/5120"],
        ["--pool", "5120", "--weights", "26112", "--ledger-pair", "inf/5120"],
        ["--pool", "5120", "--knob", "max-num-batched-tokens=nan"],
        ["--pool", "5120", "--knob", "max-num-batched-tokens=-inf"],
    ],
)
def test_a_number_that_is_none_fits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """nan is below every bound and above none: it must never make a plan fit."""
    (tmp_path / "boot.log").write_text(FP8_BOOT)
    asked = ["--law", "radiance", "--dtype", "fp8", "--seqs", "3", "--window", "200000"]
    assert main(["kv", "plan", *asked, "--ledger", str(tmp_path / "boot.log"), *words]) == 4
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert main(["kv", "ledger", str(tmp_path / "boot.log"), "--flag", "vram-kv-mib=nan"]) == 4


def test_three_slots_in_the_pool_of_four_back_what_the_document_says() -> None:
    """(6912 - 330 - 448) * 1024 / 7.3125 = 858,969: 43 % more than three windows."""
    backed = RADIANCE.backed_tokens("fp8", 3, WINDOW, 6912)
    assert backed == 858_969
    assert backed / (3 * WINDOW) == pytest.approx(1.43, abs=0.005)


def test_alternatives_show_each_dtype_and_one_sequence_more() -> None:
    found = {
        (one.dtype, one.seqs): one
        for one in alternatives(RADIANCE, Shape("fp8", 3, WINDOW), 29_120)
    }
    assert set(found) == {(dtype, seqs) for dtype in ("fp8", "bf16") for seqs in (1, 2, 3, 4)}
    # The document's table under the bound of that day.
    assert found["bf16", 4].weights_left == pytest.approx(17_441, abs=1)
    assert round(found["fp8", 4].need) == 6_601


def test_a_diff_names_every_fact_that_differs() -> None:
    before, after = parse_ledger(BF16_BOOT, "radiance"), parse_ledger(FP8_BOOT, "radiance")
    changes = {f"{one.subject} {one.name}": str(one) for one in diff_ledgers(before, after)}
    assert (
        changes["kv_attn tokens"] == "kv_attn tokens: 462,752 tokens -> 607,740 tokens (+144,988)"
    )
    assert changes["kv cache sequences"] == "kv cache sequences: 2 -> 3 (+1)"
    assert changes["mover slab slots"] == "mover slab slots: new: 4,967 slots"
    assert changes["kv cache share"] == "kv cache share: gone: 349 %"
    assert "server serving on" not in changes
    assert diff_ledgers(before, before) == []


@pytest.mark.parametrize(
    ("boot", "dtype", "seqs", "backed", "ledger"),
    [(BF16_BOOT, "bf16", 2, 462_903, 462_752), (FP8_BOOT, "fp8", 3, 608_028, 607_740)],
)
def test_a_boot_is_held_to_its_law_with_the_boots_own_dtype_and_shape(
    boot: str, dtype: str, seqs: int, backed: int, ledger: int
) -> None:
    held = law_against(RADIANCE, parse_ledger(boot, "radiance"))
    assert held is not None
    assert (held.dtype, held.seqs, held.window) == (dtype, seqs, WINDOW)
    assert (held.law, held.ledger, held.unit) == (backed, ledger, "tokens")
    assert -0.0008 <= held.apart <= -0.0003
    other = parse_ledger(boot.replace("3.25 KiB", "4.00 KiB"), "radiance")
    assert law_against(RADIANCE, other) is None


def test_a_llamacpp_boot_is_held_to_its_law() -> None:
    text = LLAMA.format(t="q8_0", a="6.38", a2="3.19", b="15.94", b2="7.97")
    held = law_against(GEMMA, parse_ledger(text, "llamacpp"))
    assert held is not None
    # 2 x (2048 x 3 + 1024 x 15) cells of 512 values of 34/32 bytes.
    assert held.law == 2 * (2048 * 3 + 1024 * 15) * 512 * 34 / 32 / 2**20
    assert (held.dtype, held.seqs, held.window, held.unit) == ("q8_0", 2, 2048, "MiB")
    assert abs(held.apart) < 1e-3
    mixed = text.replace("V (q8_0)", "V (f16)")
    assert law_against(GEMMA, parse_ledger(mixed, "llamacpp")) is None


# -- the commands ---------------------------------------------------------------------------------


def test_the_commands_and_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boot.log").write_text(FP8_BOOT)
    (tmp_path / "old.log").write_text(BF16_BOOT)
    words = [
        "kv",
        "plan",
        "--law",
        "radiance",
        "--dtype",
        "fp8",
        "--seqs",
        "3",
        "--window",
        "200000",
    ]
    pair = ["--ledger", str(tmp_path / "boot.log"), "--ledger-pair", "24000/5120"]
    assert main([*words, *pair, "--pool", "5120", "--weights", "25600", "--alternatives"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FITS: 608,028 tokens = 3.04 windows of 200,000\n")
    assert "bf16  4 x 200,000: pool  11,679.0 MiB" in shown
    assert main([*words, *pair, "--pool", "5120", "--weights", "26112"]) == 2
    assert capsys.readouterr().out.startswith("REFUSED: weights and pool take 31,232 MiB")
    assert main([*words, "--pool", "3072", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["refused"][0].startswith("a pool of 3,072 MiB")
    assert main([*words, "--knob", "max-num-batched-tokens=many"]) == 4
    assert main([*words, "--ledger-pair", "24000"]) == 4
    assert main(["kv", "plan", "--law", "nothing", *words[4:]]) == 4
    assert "shipped: llamacpp-gemma3-270m, radiance" in capsys.readouterr().err

    assert main(["kv", "ledger", str(tmp_path / "old.log"), "--flag", "vram-kv-mib=6912"]) == 0
    assert main(["kv", "ledger", str(tmp_path / "old.log"), "--flag", "vram-kv-mib=3543"]) == 1
    assert "DOES NOT AGREE: vram_kv: states 6,912.0 MiB" in capsys.readouterr().out
    for flag, told in (
        (
            "kv-cache-dtype=fp8",
            "ledger: kv_attn has pages of 52.00 KiB, which is bf16; --kv-cache-dtype",
        ),
        ("--max-num-seqs=3", "ledger: kv cache sequences is 2; --max-num-seqs says 3"),
    ):
        assert main(["kv", "ledger", str(tmp_path / "old.log"), f"--flag={flag}"]) == 1
        assert f"DOES NOT AGREE: {told}" in capsys.readouterr().out
    assert main(["kv", "ledger", str(tmp_path / "old.log"), "--flag", "kv-cache-dtype"]) == 4
    assert "write NAME=VALUE" in capsys.readouterr().err
    assert main(["kv", "ledger", str(tmp_path / "old.log"), "--law", "radiance"]) == 0
    said = "bf16, 2 x 200,000: the law says 462,903 tokens, the ledger 462,752: -0.03 %"
    assert said in capsys.readouterr().out
    (tmp_path / "half.log").write_text(BF16_BOOT[:200])
    assert main(["kv", "ledger", str(tmp_path / "half.log")]) == 1
    assert "MISSING: kv_attn tokens" in capsys.readouterr().out
    assert main(["kv", "ledger", str(tmp_path / "none.log")]) == 4
    capsys.readouterr()
    assert main(["kv", "diff", str(tmp_path / "old.log"), str(tmp_path / "boot.log")]) == 0
    assert "kv_attn blocks: 115,688 -> 151,935 (+36,247)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block_tokens = 4", "block_tokens = 0", "law.toml:18: groups[0].block_tokens: an integer"),
        ("fp8 = 26.0, ", "", "law.toml:19: groups[0].page_kib.fp8: a number"),
        ("page_kib = 3.25", 'page_kib = "3.25"', "groups[1].page_kib: a number"),
        ('dtypes = ["fp8", "bf16"]', "dtypes = []", "law.toml:7: dtypes: at least one"),
        ("most = 2048", "maximum = 2048", "knobs[0].maximum: unknown key; valid: least, most"),
        ("mib = 110.0", "mib = -1", "per_sequence[0].mib: -1; valid: 0, or 1e-09 to"),
        ("mib = 110.0", "mib = 1e300", "per_sequence[0].mib: 1e+300; valid: 0, or 1e-09 to"),
        ("mib = 44928.0, times = 2", "mib = 1, times = 9000000000000000", "times: an integer is"),
        ("page_kib = 3.25", "page_kib = 1e-300", "groups[1].page_kib: 1e-300; valid: 0, or"),
        ('"bf16"]', '"bf16", "fp8"]', "law.toml:7: dtypes[2]: 'fp8' stands there twice"),
        ('name = "kv_qsa_bkey"', 'name = "kv_attn"', "groups[1]: 'kv_attn' stands there twice"),
        (
            "most = 2048",
            "most = 2048\nleast = 4096",
            "knobs[0].most: 2048, below the least of 4096",
        ),
        ('dialect = "radiance"', 'dialect = "of mine"', "dialect: not known; valid: llamacpp,"),
    ],
)
def test_a_wrong_law_is_one_line_that_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    from importlib.resources import files

    text = files("pytest_dsv41.unit.memory").joinpath("laws", "radiance.toml").read_text("utf-8")
    assert old in text
    path = tmp_path / "law.toml"
    path.write_text(text.replace(old, new, 1))
    words = ["kv", "plan", "--law", str(path), "--dtype", "fp8", "--seqs", "1", "--window", "9"]
    assert main(words) == 4
    error = capsys.readouterr().err
    assert message in error, error
    assert error.count("\n") == 1


def test_the_ledgers_facts_are_numbers_with_units() -> None:
    ledger: Ledger = parse_ledger(FP8_BOOT, "radiance")
    assert {fact.unit for fact in ledger.facts} <= {"MiB", "%", "tokens", "slots", ""}
    assert all(fact.line >= 1 for fact in ledger.facts)


_GROWS_NOT = (
    ("{ fp8 = 26.0, bf16 = 52.0 }", "{ fp8 = 0, bf16 = 52.0 }"),
    ("page_kib = 3.25", "page_kib = { fp8 = 0, bf16 = 3.25 }"),
)


def test_a_law_whose_tokens_take_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.resources import files

    text = files("pytest_dsv41.unit.memory").joinpath("laws", "radiance.toml").read_text("utf-8")
    for old, new in _GROWS_NOT:
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "law.toml").write_text(text)
    words = ["kv", "plan", "--law", str(tmp_path / "law.toml"), "--dtype", "bf16"]
    assert main([*words, "--seqs", "1", "--window", "9", "--pool", "1"]) == 4
    assert "groups: at dtype fp8 a token takes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seqs", "1" + 400 * "0", "--window", "9"], "sequences 1000"),
        (["--seqs", "65537", "--window", "9", "--alternatives"], "sequences 65537: valid: 1 to"),
        (["--seqs", "3", "--window", "1" + 400 * "0"], "window 1000"),
        (["--seqs", "3", "--window", "-9"], "window -9: valid: 1 to 1,099,511,627,776"),
        (["--seqs", "3", "--window", "9", "--pool", "1e308"], "pool 1e+308: valid: MiB, 0 to"),
        (
            ["--seqs", "3", "--window", "9", "--knob", "k=1", "--knob", "k=9"],
            "--knob k=9: k is given twice",
        ),
    ],
)
def test_a_shape_beyond_any_machine_is_one_line(
    capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["kv", "plan", "--law", "radiance", "--dtype", "fp8", *more]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_largest_shape_that_is_taken_is_computed() -> None:
    shape = Shape("bf16", 1 << 16, 1 << 40, float(1 << 40), float(1 << 40))
    plan = make_plan(RADIANCE, shape)
    # 55.25 KiB for four tokens, 110 MiB a sequence, 448 MiB: by whole numbers.
    need = Fraction(221, 4) / 4 / 1024 * 2**56 + 110 * 2**16 + 448
    assert plan.need == pytest.approx(float(need), rel=1e-12)
    assert plan.refused


def test_a_print_beyond_any_machine_is_no_fact() -> None:
    """Else inf less inf would be the budget: nan, which nothing is above."""
    endless = "9" * 400
    text = FP8_BOOT + f"\ncard 0 settled at {endless} GiB free against {endless} MiB\n"
    assert parse_ledger(text, "radiance").facts == parse_ledger(FP8_BOOT, "radiance").facts


def test_a_line_of_megabytes_is_looked_at_once() -> None:
    """The patterns look for a size anywhere in a line: quadratic in one that is all digits."""
    ledger = parse_ledger(FP8_BOOT + "\n" + "1" * (1 << 22) + "\n", "radiance")
    assert ledger.facts == parse_ledger(FP8_BOOT, "radiance").facts
    assert len(ledger.unknown[-1]) == 1 << 22


def test_a_pool_below_the_fixed_parts_is_held_to_the_law_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boot.log").write_text(FP8_BOOT)
    words = ["kv", "ledger", str(tmp_path / "boot.log"), "--law", "radiance"]
    assert main([*words, "--flag", "vram-kv-mib=400"]) == 1
    assert "the law says 0 tokens" in capsys.readouterr().out


def test_a_laws_words_reach_no_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.resources import files

    text = files("pytest_dsv41.unit.memory").joinpath("laws", "radiance.toml").read_text("utf-8")
    strange = "f\x1b[2J8"
    text = text.replace("fp8 =", '"f\\u001b[2J8" =').replace('["fp8"', '["f\\u001b[2J8"')
    (tmp_path / "law.toml").write_text(text)
    words = ["kv", "plan", "--law", str(tmp_path / "law.toml"), "--dtype", strange]
    assert main([*words, "--seqs", "1", "--window", "9", "--alternatives"]) == 0
    assert "\x1b" not in capsys.readouterr().out
