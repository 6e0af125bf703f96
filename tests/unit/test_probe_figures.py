"""What the probes make of streams and texts: figures by hand, and the laws that refuse them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.engines.base import Server, Snapshot
from pytest_dsv41.engines.served import Served, agreed
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure import Sampling
from pytest_dsv41.measure.group import GroupResult
from pytest_dsv41.measure.metrics import values_of
from pytest_dsv41.measure.probes import (
    LAWS,
    ProbeCell,
    audit_answer,
    judge_capacity,
    obey,
    rung_of,
)
from pytest_dsv41.measure.probes.capacity import Refusal
from pytest_dsv41.measure.probes.ladder import jain
from pytest_dsv41.measure.probes.laws import check_class, repetition, said
from pytest_dsv41.measure.probes.prompts import Fitted, filler, fit, marker
from pytest_dsv41.measure.stream import EventRecord, StreamRecord
from pytest_dsv41.stub.language import encode
from pytest_dsv41.unit.memory import ledger_shape, parse_ledger


def stream(
    *,
    start_s: float = 0.0,
    first_s: float,
    last_s: float,
    tokens: int = 512,
    finish: str = "length",
    prompt: int = 1000,
    **more: Any,
) -> StreamRecord:
    """A stream whose first token came at `first_s` and the others, in one event, at `last_s`."""

    def ns(seconds: float) -> int:
        return int(seconds * 1e9)

    events = (EventRecord(ns(first_s), 100, 1, "token"),
              EventRecord(ns(last_s), 100, tokens - 1, "token"))  # fmt: skip
    given: dict[str, Any] = {
        "start_ns": ns(start_s), "send_ns": 1, "end_ns": ns(last_s) + 1, "prompt_tokens": prompt,
        "completion_tokens": tokens, "count_source": "usage", "cached_tokens": 0,
        "finish_reason": finish, "events": events, "role_ns": None, "first_token_ns": ns(first_s),
        "first_content_ns": None, "last_token_ns": ns(last_s), "finish_ns": None,
        "usage_ns": None, "first_tokens": 1, "first_merged": False, "first_source": "kernel",
        "output_sha256": "0" * 64, "prompt_sha256": "1" * 64,
    }  # fmt: skip
    return StreamRecord(**(given | more))


def group(*streams: StreamRecord, **server: Any) -> GroupResult:
    counted = Server(
        len(streams), sum(s.completion_tokens for s in streams), accepted=0, cached_tokens=0,
        **({"preemptions": 0} | server),
    )  # fmt: skip
    values, missing = values_of(streams, counted)
    nothing = Snapshot(0, {}, 0, 0)
    return GroupResult(
        values, missing, "2" * 64, (), streams, counted, nothing, nothing, beside=len(streams)
    )


# -- the ladder --------------------------------------------------------------------------------


def test_the_documents_three_streams_by_hand() -> None:
    # FRANK-ARCHON "The decode ladder": 3 streams of 512 tokens at 43.5k, wall 83.4 s, decode
    # 113.9 / 43.3 / 10.9 tokens/s; together 18.4 tokens/s.
    rates = (113.9, 43.3, 10.9)
    streams = [
        stream(first_s=83.4 - 511 / rate, last_s=83.4 if rate == 10.9 else 83.4 - 0.001)
        for rate in rates
    ]
    rung = rung_of(group(*streams, decode_ms=1.0), depth=43520, corpus="repetitive")
    assert rung.rates == pytest.approx(rates, rel=1e-3)
    assert rung.wall_tok_s == pytest.approx(18.4, abs=0.05)
    # First token 511 / 10.9 s before the last: 1533 tokens in 46.88 s.
    assert rung.decode_tok_s == pytest.approx(1533 / (511 / 10.9), rel=1e-3)
    assert rung.fairness == pytest.approx(10.9 / 113.9, rel=1e-3)
    # (113.9 + 43.3 + 10.9)² / (3 · (113.9² + 43.3² + 10.9²)) = 28257.61 / 44901.33
    assert rung.jain == pytest.approx(0.62933, abs=1e-4)


@pytest.mark.parametrize(
    ("rates", "wall_s", "aggregate"),
    # The document's two rungs of three streams, at 43.5k and at 197k.
    [((113.9, 43.3, 10.9), 83.4, 18.4), ((88.9, 16.3, 64.6), 122.4, 12.5)],
)
def test_the_aggregate_by_the_wall_is_the_documents_at_both_depths(
    rates: tuple[float, ...], wall_s: float, aggregate: float
) -> None:
    streams = [stream(first_s=wall_s - 511 / rate, last_s=wall_s) for rate in rates]
    rung = rung_of(group(*streams, decode_ms=1.0), depth=43520, corpus="repetitive")
    assert rung.rates == pytest.approx(rates, rel=1e-3)
    assert rung.wall_tok_s == pytest.approx(aggregate, abs=0.05)
    assert rung.fairness == pytest.approx(min(rates) / max(rates), rel=1e-3)


def test_client_and_engine_rates_stand_beside_each_other() -> None:
    one = stream(first_s=1.0, last_s=6.0, tokens=501)
    rung = rung_of(group(one, decode_ms=4000.0), depth=100, corpus="varied")
    assert (rung.client_stream_tok_s, rung.engine_tok_s) == (100.0, 125.0)
    assert rung.disagreement == pytest.approx(-0.2)
    assert rung_of(group(one), depth=100, corpus="varied").disagreement is None


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=8))
def test_fairness_is_one_only_for_equal_rates(rates: list[float]) -> None:
    assert 1 / len(rates) - 1e-9 <= jain(rates) <= 1 + 1e-9
    assert jain([5.0] * len(rates)) == pytest.approx(1.0)


def test_a_rate_of_few_tokens_is_refused_by_name() -> None:
    short = stream(first_s=1.0, last_s=1.1, tokens=127)
    with pytest.raises(MeasurementRefused) as refused:
        rung_of(group(short), depth=100, corpus="varied")
    assert refused.value.kind == "law-rate-tokens"
    assert "127 tokens" in str(refused.value)
    kept = obey(group(short))
    assert {"decode_tok_s", "client_tok_s"}.isdisjoint(kept.values)
    assert kept.missing["decode_tok_s"] == "law-rate-tokens: 127 tokens; a rate needs 128"
    assert kept.values["ttft_ms"].value == 1000.0
    enough = group(stream(first_s=1.0, last_s=1.1, tokens=128))
    assert obey(enough) is enough


# -- capacity ----------------------------------------------------------------------------------

SHAPE = Served.of("/props", slots=2, window=1024)
REFUSED = Refusal(1025, 1024, True, "HTTP 400")


def pair(**second: Any) -> list[StreamRecord]:
    asked = [marker(0), marker(1)]
    base = {"first_s": 1.0, "last_s": 2.0, "tokens": 9, "finish": "stop", "prompt": 992}
    return [
        stream(**base, text=f" {asked[0]}"),
        stream(**({**base, "text": f" {asked[1]}"} | second)),
    ]


PROMPTS = [Fitted("a", 992, marker(0)), Fitted("b", 992, marker(1))]


def judged(result: GroupResult, refusal: Refusal = REFUSED) -> tuple[str, list[str]]:
    found = judge_capacity(SHAPE, PROMPTS, result, refusal)
    return found.verdict, [check.name for check in found.checks if check.passed is not True]


def test_capacity_is_passed_when_everything_holds() -> None:
    assert judged(group(*pair())) == ("PASS", [])


def test_the_documents_four_full_slots_by_hand() -> None:
    """FRANK-ARCHON "Capacity probe": prompt, wall, and the prefill rate of each of four streams.

    Together 787,842 tokens in 238.4 s, 3,305 tokens/s. The first to start began 0.1 s before B1.
    """
    table = (
        (196_961, 238.3, 1_423),
        (196_960, 98.0, 2_043),
        (196_961, 201.1, 993),
        (196_960, 149.9, 1_327),
    )
    streams = [
        stream(
            start_s=0.1 if member == 0 else 0.0,
            # Its first token came when its own prompt was read at that rate.
            first_s=(0.1 if member == 0 else 0.0) + prompt / rate,
            last_s=(0.1 if member == 0 else 0.0) + wall,
            tokens=8,
            finish="stop",
            prompt=prompt,
            text=f" {marker(member)}",
        )
        for member, (prompt, wall, rate) in enumerate(table)
    ]
    prompts = [Fitted("p", prompt, marker(member)) for member, (prompt, _, _) in enumerate(table)]
    shape = Served.of("start.log", slots=4, window=200_000)
    found = judge_capacity(shape, prompts, group(*streams), REFUSED)
    assert (found.verdict, found.streams) == ("PASS", 4)
    assert [row["prefill_tok_s"] for row in found.rows] == pytest.approx(
        [rate for _, _, rate in table], rel=1e-6
    )
    assert [row["wall_s"] for row in found.rows] == pytest.approx([wall for _, wall, _ in table])
    assert found.prompt_tokens == 787_842
    assert found.wall_s == pytest.approx(238.4)
    assert round(found.prefill_tok_s) == 3_305


@pytest.mark.parametrize(
    ("second", "name"),
    [
        ({"text": f" {marker(0)}"}, "exact answers"),
        ({"text": f" {marker(1)} again"}, "exact answers"),
        ({"text": ""}, "exact answers"),
        ({"finish": "length"}, "finish stop"),
        ({"cached_tokens": 16}, "cached 0"),
        ({"prompt": 991}, "prompt tokens as sent"),
    ],
)
def test_one_stream_that_does_not_keep_it_fails_all(second: dict[str, Any], name: str) -> None:
    assert judged(group(*pair(**second))) == ("FAIL", [name])


def test_what_cannot_be_seen_is_not_proved() -> None:
    assert judged(group(*pair(cached_tokens=None))) == ("NOT PROVED", ["cached 0"])
    untold = group(*pair(), preemptions=None)
    assert judged(untold) == ("NOT PROVED", ["nothing preempted"])


def test_preemption_waiting_and_a_taken_prompt_fail() -> None:
    assert judged(group(*pair(), preemptions=1)) == ("FAIL", ["nothing preempted"])
    from dataclasses import replace

    assert judged(replace(group(*pair()), beside=1)) == ("FAIL", ["all alive together"])
    taken = replace(REFUSED, refused=False)
    assert judged(group(*pair()), taken) == ("FAIL", ["one token too many refused"])


def test_an_answer_in_the_reasoning_channel_is_read_there() -> None:
    found = judge_capacity(
        SHAPE, PROMPTS, group(*pair(text="", reasoning=f"\n{marker(1)}.")), REFUSED
    )
    assert found.verdict == "PASS"
    assert [row["channel"] for row in found.rows] == ["content", "reasoning"]


def test_a_budget_spent_in_thinking_is_no_answer() -> None:
    spent = stream(first_s=1, last_s=2, tokens=32, finish="length", reasoning="We need to find")
    with pytest.raises(MeasurementRefused) as refused:
        said(spent)
    assert refused.value.kind == "law-thinking"


# -- prompts -----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(80, 4000), st.sampled_from(["varied", "repetitive"]), st.integers(0, 3))
def test_a_prompt_has_the_height_that_was_asked(tokens: int, corpus: Any, seed: int) -> None:
    def make(piece: str) -> str:
        return f"THE PASSWORD IS: harbour-1234\n\n{piece}\n\nTHE PASSWORD IS:"

    def count(text: str) -> int:
        return len(encode(text))

    text, size = fit(make, filler(corpus, tokens, seed), tokens, count)
    assert size == count(text) == tokens
    assert text.startswith("THE PASSWORD IS: harbour-1234\n\n")
    assert text.endswith("\n\nTHE PASSWORD IS:")


def test_a_window_that_holds_no_prompt_says_so() -> None:
    with pytest.raises(UsageError, match="10 tokens hold no prompt"):
        fit(lambda piece: "word " * 20 + piece, "filler", 10, lambda text: len(text.split()))


def test_no_two_passwords_begin_alike() -> None:
    first = [marker(member).split("-")[0] for member in range(300)]
    assert len(set(first)) == 300


def test_a_text_is_of_the_class_its_cell_names() -> None:
    check_class(filler("varied", 500), "varied")
    check_class(filler("repetitive", 500), "repetitive")
    with pytest.raises(MeasurementRefused) as refused:
        check_class(filler("repetitive", 500), "varied")
    assert refused.value.kind == "law-corpus-class"
    assert repetition(list("abcdefgh")) == 0.0
    # 8 equal letters more: 9 places, of which the first alone is new.
    assert repetition("a" * 16) == pytest.approx(8 / 9)


def test_the_class_of_the_corpus_is_part_of_the_cell() -> None:
    cells = [
        ProbeCell("ladder", ("stream-0",), 512, depth=1024, corpus=corpus)
        for corpus in ("varied", "repetitive")
    ]  # fmt: skip
    assert cells[0].definition() != cells[1].definition()


@pytest.mark.parametrize(
    ("changed", "law"),
    [
        ({"max_tokens": 127}, "rate-tokens"),
        ({"api": "chat"}, "thinking"),
        ({"api": "chat", "sampling": Sampling(temperature=0.0, thinking=True)}, "thinking"),
        ({"sampling": Sampling(temperature=0.0, cache="any")}, "salt"),
    ],
)
def test_a_cell_that_breaks_a_law_is_none(changed: dict[str, Any], law: str) -> None:
    given: dict[str, Any] = {"name": "x", "prompts": ("stream-0",), "max_tokens": 512} | changed
    with pytest.raises(ValueError, match=f"law-{law}"):
        ProbeCell(**given)
    assert law in LAWS


# -- the audit ---------------------------------------------------------------------------------

TITLES = [f"{place:02d}: {marker(place)}" for place in range(1, 11)]
GOOD = "\n".join(f"Section {title}" for title in TITLES)


def audited(text: str) -> list[str]:
    found = audit_answer(text, encode(text), TITLES)
    assert (found.verdict == "PASS") == (not found.reason)
    return [check.name for check in found.checks if not check.passed]


def test_an_index_in_order_passes() -> None:
    assert audited(GOOD) == []


def test_each_corruption_is_named() -> None:
    lines = GOOD.splitlines()
    swapped = "\n".join([lines[1], lines[0], *lines[2:]])
    assert audited(swapped) == ["expected order"]
    assert audited("\n".join(lines[:4]) + " and nothing else is in it") == ["expected order"]
    assert audited(GOOD + "\n�") == ["UTF-8"]
    assert audited(GOOD + "\n\x00") == ["UTF-8"]
    assert audited(GOOD + "\nand so on and so forth" * 60) == ["repetition"]
    assert audited("!" * 300) == ["repetition", "one-token share", "expected order"]
    letters = random.Random(1).choices("bcdefghjkl", k=400)
    every_second = " ".join(f"{letter} the" for letter in letters)
    assert audited(GOOD + "\n" + every_second) == ["one-token share"]
    assert "length" in audited("")


# -- the shape ---------------------------------------------------------------------------------


def test_a_boot_ledger_tells_slots_and_window() -> None:
    # The document's line, as its server prints it.
    text = (
        "kv cache           6.75 GiB   349% of it -- backs 2 sequences all at 200000\n"
        "                                tokens at once, which is the worst case\n"
    )
    shape = ledger_shape(parse_ledger(text, "radiance"), "start.log")
    assert (shape.slots, shape.window, shape.told["window"]) == (2, 200000, "start.log")
    assert shape.kv_dtype == ""
    # Its pages, where they are printed, tell the dtype: 52.00 KiB is bf16.
    pages = (
        "kv_attn full 13 layers block 4 tok page 52.00 KiB 115688 blocks = 5.74 GiB "
        "(462752 tokens)\nkv_qsa_bkey full 13 layers block 4 tok page 3.25 KiB 115688 blocks = "
        "367.17 MiB (462752 tokens)\n"
    )
    shape = ledger_shape(parse_ledger(text + pages, "radiance"), "start.log")
    assert (shape.kv_dtype, shape.told["kv_dtype"]) == ("bf16", "start.log")
    text = (
        "llama_context: n_ctx_seq = 1024\n"
        "llama_kv_cache: size = 6.00 MiB ( 1024 cells, 3 layers, 4/4 seqs), K (f16): 3.00 MiB, "
        "V (q8_0): 3.00 MiB\n"
    )
    shape = ledger_shape(parse_ledger(text, "llamacpp"), "start.log")
    assert (shape.window, shape.kv_dtype) == (1024, "f16/q8_0")


def test_two_sources_of_a_shape_must_agree() -> None:
    one = Served.of("/props", slots=3, window=4096)
    log = Served.of("start.log", window=4096, kv_dtype="f16")
    both = agreed(one, log)
    assert (both.slots, both.window, both.kv_dtype) == (3, 4096, "f16")
    assert both.told == {"slots": "/props", "window": "/props", "kv_dtype": "start.log"}
    with pytest.raises(MeasurementRefused, match="window: /props says 4096, /slots 1 says 2048"):
        agreed(one, Served.of("/slots 1", window=2048))


def test_a_probe_is_greedy() -> None:
    assert ProbeCell("x", ("stream-0",), 512).sampling == Sampling(temperature=0.0)
    with pytest.raises(ValueError, match="a probe is greedy"):
        ProbeCell("x", ("stream-0",), 512, sampling=Sampling(temperature=0.6))
