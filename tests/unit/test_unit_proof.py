"""What runs is held against what was asked for: flags, environment, model, ledger."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_dsv41.unit.memory import parse_ledger, read_law
from pytest_dsv41.unit.proof import Expected, flag_values, mismatches

ARGV = ["llama-server", "-m", "m.gguf", "--ctx-size", "20000", "-np", "2", "-fa", "on"]
ARGV += ["--cache-type-k=q8_0", "--cache-type-v", "q8_0", "--temp", "-0.5", "--metrics"]

# Lines as llama.cpp prints them with -lv 4 (n_ctx rounded up to whole cells of 256 a sequence).
LEDGER = """\
llama_context: n_ctx         = 20480
llama_kv_cache: size =   31.88 MiB ( 10240 cells,   3 layers,  2/2 seqs), \
K (q8_0):   15.94 MiB, V (q8_0):   15.94 MiB
"""


def faults(expected: Expected, **changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "argv": ARGV,
        "environ": {"SERVE": "/run/x.env", "KV": "q8_0"},
        "wanted_environ": {"SERVE": "/run/x.env"},
        "optional_environ": {"KV": "q8_0"},
        "models": ["tiny"],
        "ledger": parse_ledger(LEDGER, "llamacpp"),
    }
    return mismatches(expected, **{**given, **changes})


def test_flags_are_read_in_both_forms() -> None:
    assert flag_values(ARGV, "--cache-type-k") == ["q8_0"]
    assert flag_values(ARGV, "--ctx-size") == ["20000"]
    assert flag_values(ARGV, "--temp") == ["-0.5"]
    assert flag_values(ARGV, "--metrics") == [True]
    assert flag_values(["--a", "--b"], "--a") == [True]
    assert flag_values(ARGV, "--ctx") == []


def test_what_fits_is_proved() -> None:
    expected = Expected(
        flags={"--cache-type-k": "q8_0", "--metrics": True, "--no-mmap": False},
        ledger={"kv K dtype": "q8_0", "kv size": 31.88, "kv sequences": 2},
        model="tiny",
    )
    assert faults(expected) == []


@pytest.mark.parametrize(
    ("expected", "changes", "told"),
    [
        (Expected(flags={"--ctx-size": "4096"}), {}, "--ctx-size is 20000, not 4096"),
        (Expected(flags={"--mlock": True}), {}, "--mlock is not given"),
        (Expected(flags={"--metrics": False}), {}, "--metrics is given, and must not be"),
        (
            Expected(flags={"-np": "2"}),
            {"argv": [*ARGV, "-np", "4"]},
            "-np is 2 and 4, not 2",
        ),
        (Expected(), {"environ": {}}, "SERVE is missing in the environment of the main process"),
        (
            Expected(),
            {"environ": {"SERVE": "/run/x.env", "KV": "f16"}},
            "KV is another in the environment of the main process",
        ),
        (Expected(model="mine"), {}, "/v1/models lists tiny, not mine"),
        (
            Expected(ledger={"kv V dtype": "f16"}),
            {},
            "ledger: kv V dtype is q8_0; the arm says f16",
        ),
        (Expected(ledger={"kv pages": 1}), {}, "ledger: kv pages is not printed"),
        (
            Expected(ledger={"kv size": 1}),
            {"ledger": None},
            "the engine has no boot ledger that could be read",
        ),
        # The flag and the ledger contradict each other, whatever the arm says.
        (
            Expected(),
            {"argv": ["s", "-ctk", "f16"]},
            "ledger: kv K dtype is q8_0; --cache-type-k says f16",
        ),
        (
            Expected(),
            {"argv": ["s", "-c", "30000"]},
            "ledger: context n_ctx is 20,480; --ctx-size says 30,000",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    expected: Expected, changes: dict[str, Any], told: str
) -> None:
    assert faults(expected, **changes) == [told]


def test_no_value_of_the_environment_is_shown() -> None:
    told = faults(Expected(), environ={"SERVE": "canary-1", "KV": "canary-2"})
    assert len(told) == 2
    assert "canary" not in " ".join(told)


# FRANK-ARCHON's boot ledger of 2026-10-11, and its flags.
RADIANCE = """\
kv cache           6.75 GiB   349% of it -- backs 2 sequences all at 200000
                                tokens at once, which is the worst case
vram_weights      21.69 GiB   stated by --vram-weights-mib
vram_kv            6.75 GiB   stated by --vram-kv-mib
kv_attn      full 13 layers block 4 tok page 52.00 KiB 115688 blocks = 5.74 GiB (462752 tokens)
kv_qsa_bkey  full 13 layers block 4 tok page  3.25 KiB 115688 blocks = 367.17 MiB (462752 tokens)
"""
# The fp8 pages of 2026-10-13: half of the first group's, the indexer's unchanged.
FP8_PAGES = """\
kv_attn      full 13 layers block 4 tok page 26.00 KiB 151935 blocks = 3.77 GiB (607740 tokens)
kv_qsa_bkey  full 13 layers block 4 tok page  3.25 KiB 151935 blocks = 482.22 MiB (607740 tokens)
"""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--vram-kv-mib", "6912", "--vram-weights-mib", "22208", "--max-num-seqs", "2"], []),
        (["--max-model-len", "200000"], []),
        (["--vram-kv-mib", "3543"], ["vram_kv: states 6,912.0 MiB; the flag says 3,543"]),
        (["--max-num-seqs", "3"], ["ledger: kv cache sequences is 2; --max-num-seqs says 3"]),
    ],
)
def test_radiances_ledger_against_its_flags(flags: list[str], told: list[str]) -> None:
    ledger = parse_ledger(RADIANCE, "radiance")
    assert faults(Expected(), argv=["serve", *flags], ledger=ledger) == told


@pytest.mark.parametrize(
    ("pages", "dtype", "told"),
    [
        (RADIANCE, "bf16", []),
        (FP8_PAGES, "fp8", []),
        (
            RADIANCE,
            "fp8",
            [
                "ledger: kv_attn has pages of 52.00 KiB, which is bf16; --kv-cache-dtype says fp8",
            ],
        ),
        (
            FP8_PAGES,
            "bf16",
            [
                "ledger: kv_attn has pages of 26.00 KiB, which is fp8; --kv-cache-dtype says bf16",
            ],
        ),
        # Another model's pages are none of the law's.
        (FP8_PAGES.replace("3.25 KiB", "3.50 KiB").replace("482.22", "519.30"), "bf16", []),
    ],
)
def test_radiances_pages_tell_the_dtype_that_the_flag_must_be(
    pages: str, dtype: str, told: list[str]
) -> None:
    """FRANK-ARCHON verifies the control from its argv and from the ledger's page size."""
    ledger = parse_ledger(pages, "radiance")
    for argv in (["serve", "--kv-cache-dtype", dtype], ["serve", f"--kv-cache-dtype={dtype}"]):
        assert faults(Expected(), argv=argv, ledger=ledger) == told
    assert faults(Expected(), argv=["serve"], ledger=ledger) == []


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("26.00 KiB", []),
        (26 / 1024, []),
        ("52.00 KiB", ["ledger: kv_attn page is 0.025390625 MiB; the arm says 52.00 KiB"]),
        ("26.00", ["ledger: kv_attn page is 0.025390625 MiB; the arm says 26.00"]),
        ("wide", ["ledger: kv_attn page is 0.025390625 MiB; the arm says wide"]),
    ],
)
def test_a_size_is_asked_for_as_it_is_printed(wanted: str | float, told: list[str]) -> None:
    ledger = parse_ledger(FP8_PAGES, "radiance")
    assert faults(Expected(ledger={"kv_attn page": wanted}), argv=["serve"], ledger=ledger) == told


def test_pages_of_no_dtype_of_the_law_that_was_named_are_a_fault() -> None:
    law = read_law("radiance")
    text = FP8_PAGES.replace("3.25 KiB", "3.50 KiB").replace("482.22", "519.30")
    other = parse_ledger(text, "radiance")
    (told,) = faults(Expected(), argv=["serve", "--kv-cache-dtype", "fp8"], ledger=other, law=law)
    assert told == "ledger: its pages are those of no dtype of the law (fp8, bf16)"
    ledger = parse_ledger(FP8_PAGES, "radiance")
    assert faults(Expected(), argv=["serve"], ledger=ledger, law=law) == []
