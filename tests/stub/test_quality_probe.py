"""The probe over real sockets: what it asks, what it keeps, and which answers it refuses."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from wire_groups import endpoint, stub

from pytest_dsv41.engines import ENGINES, Vllm, get_engine
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.kl import top20_kl
from pytest_dsv41.quality.probe import (
    Conditions,
    Probe,
    ProbeProgress,
    load_probe,
    run_probe,
    save_probe,
)
from pytest_dsv41.quality.prompts import ProbePrompt
from pytest_dsv41.stub import Serving

PROMPTS = tuple(
    ProbePrompt(
        name, "short", f"{name} is a place where {what}, and people say of it that it is so."
    )
    for name, what in (
        ("one", "rivers meet"),
        ("two", "nobody counts the steps"),
        ("three", "bells"),
    )
)


@pytest.fixture(scope="module", params=["vllm", "llamacpp"])
def served(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with stub(
        engine=request.param, round_ms=0.0, prefill_ms=0.0, perturb=0.3, block_size=4
    ) as running:
        yield running


def probe(served: Serving, **settings: object) -> Probe:
    return run_probe(endpoint(served), PROMPTS, deadline_s=30, **settings)  # type: ignore[arg-type]


def test_positions_are_the_tokens_before_each_of_the_last_eight(served: Serving) -> None:
    found = probe(served)
    engine, where = get_engine(served.server.profile.engine), endpoint(served)
    assert [position.prompt for position in found.positions] == [
        name for name in ("one", "two", "three") for _ in range(8)
    ]
    at = 0
    client = httpx.Client(trust_env=False)
    for prompt in PROMPTS:
        ids = engine.tokenize(where.url, where.model, prompt.text, client=client)
        for length in range(len(ids) - 8, len(ids)):
            position = found.positions[at]
            at += 1
            assert position.prefix_tokens == length
            text = json.dumps(ids[:length], separators=(",", ":"))
            assert position.prefix_sha256 == hashlib.sha256(text.encode()).hexdigest()
            # What the server itself says of this prefix, asked once more.
            again = engine.next_token(
                where.url, where.model, ids[:length], 20, cache="any", salt=None, client=client
            )
            assert sorted(position.top) == sorted(
                sorted(again.top, key=lambda t: (-t[1], t[0]))[:20]
            )
    client.close()
    assert [row.sha256 for row in found.prompts] == [
        hashlib.sha256(prompt.text.encode()).hexdigest() for prompt in PROMPTS
    ]
    assert found.notes == ()
    assert found.subset == "short"
    assert found.version == {"vllm": "0.33.0", "llamacpp": "b11434-stub"}[found.engine]


def test_the_same_server_says_the_same_and_another_model_does_not(served: Serving) -> None:
    one, two = probe(served), probe(served)
    assert one.run != two.run
    assert one.prefixes == two.prefixes
    assert [p.top for p in one.positions] == [p.top for p in two.positions]
    with stub(
        engine=served.server.profile.engine, round_ms=0.0, prefill_ms=0.0, perturb=0.35
    ) as other:
        three = probe(other)
    kls = [top20_kl(a.top, b.top).kl for a, b in zip(one.positions, three.positions, strict=True)]
    assert all(kl > 0 for kl in kls)


def test_cached_means_one_cold_prefill_a_prompt_and_cold_means_none_cached(served: Serving) -> None:
    cached = [position.cached_tokens for position in probe(served).positions]
    assert cached[0] == cached[8] == cached[16] == 0
    assert all(value for value in cached[1:8])
    cold = probe(served, conditions=Conditions(cache="cold"))
    assert {position.cached_tokens for position in cold.positions} == {0}


def test_several_at_a_time_give_the_same_positions_in_the_same_order(served: Serving) -> None:
    seen: list[ProbeProgress] = []
    beside = probe(served, conditions=Conditions(concurrency=3), progress=seen.append)
    assert beside.prefixes == probe(served).prefixes
    assert [now.done for now in seen] == list(range(1, 25))
    assert {now.total for now in seen} == {24}


def test_the_record_holds_no_text_and_reads_back_the_same(served: Serving, tmp_path: Path) -> None:
    found = probe(served, role="candidate", band="b" * 64)
    path = tmp_path / "probe.json"
    assert save_probe(path, found) == found.sha256
    assert load_probe(path) == found
    raw = path.read_text()
    assert "rivers" not in raw
    assert found.band == "b" * 64
    with pytest.raises(UsageError, match="never overwritten"):
        save_probe(path, found)


def test_no_probe_lies_in_a_git_work_tree(served: Serving, tmp_path: Path) -> None:
    found = probe(served)
    (tmp_path / "tree" / ".git").mkdir(parents=True)
    inside = tmp_path / "tree" / "deep" / "er"
    inside.mkdir(parents=True)
    # Also where the way there is a link from outside.
    link = tmp_path / "link"
    link.symlink_to(inside)
    for folder in (tmp_path / "tree", inside, link):
        with pytest.raises(UsageError, match="git work tree"):
            save_probe(folder / "probe.json", found)
    # A linked work tree and a submodule have a file of that name.
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".git").write_text("gitdir: elsewhere\n")
    with pytest.raises(UsageError, match="git work tree"):
        save_probe(tmp_path / "sub" / "probe.json", found)


def test_an_edited_probe_is_named(served: Serving, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    save_probe(path, probe(served))
    raw = path.read_text()
    for old, new in (('"role": "control"', '"role": "candidate"'), ('"top_n": 20', '"top_n": 21')):
        assert old in raw
        path.write_text(raw.replace(old, new))
        with pytest.raises(MeasurementRefused) as refused:
            load_probe(path)
        assert refused.value.kind == "probe-edited"


def test_a_foreign_request_beside_the_probe_refuses_it(served: Serving) -> None:
    path = "/v1/completions" if served.server.profile.engine == "vllm" else "/completion"
    served.faults(f"{path}:foreign=4")
    try:
        with pytest.raises(MeasurementRefused) as refused:
            probe(served)
        assert refused.value.kind == "foreign-request"
        allowed = probe(served, conditions=Conditions(others="allowed"))
    finally:
        served.faults()
    assert allowed.conditions.others == "allowed"


def test_a_stop_ends_the_run_with_its_name(served: Serving) -> None:
    stop = threading.Event()

    def at(now: ProbeProgress) -> None:
        if now.done == 5:
            stop.set()

    for conditions in (Conditions(), Conditions(concurrency=2)):
        stop.clear()
        with pytest.raises(MeasurementFailed) as failed:
            probe(served, stop=stop, progress=at, conditions=conditions)
        assert failed.value.kind == "stopped"


def test_a_prompt_must_have_more_tokens_than_positions(served: Serving) -> None:
    short = (ProbePrompt("tiny", "short", "one two"),)
    with pytest.raises(UsageError, match="tiny"):
        run_probe(endpoint(served), short, deadline_s=10)
    with pytest.raises(UsageError, match="each once"):
        run_probe(endpoint(served), PROMPTS[:1] * 2, deadline_s=10)


def test_logprobs_add_up_to_no_more_than_all(served: Serving) -> None:
    for position in probe(served).positions:
        assert len(position.top) == 20
        assert math.fsum(math.exp(lp) for _, lp in position.top) <= 1.001


# ---- servers that cannot be believed ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("duplicate", "duplicate-id", "twice"),
        ("zeros", "all-zero", "every log-probability is 0"),
        ("fewer", "fewer", "20 asked"),
        ("nan", "nan", "nan"),
        ("positive", "logprob", "above 0"),
        ("absent", "no-logprobs", "no log-probabilities"),
        ("other", "other-prompt", "another prompt"),
        ("cut", "bad-answer", "no JSON"),
    ],
)
def test_an_answer_that_cannot_be_believed_refuses_the_probe_with_its_place(
    served: Serving, fault: str, kind: str, says: str
) -> None:
    probe(served)
    path = "/v1/completions" if served.server.profile.engine == "vllm" else "/completion"
    served.faults(f"{path}:logprobs={fault}")
    try:
        with pytest.raises(MeasurementRefused, match=says) as refused:
            probe(served)
    finally:
        served.faults()
    assert refused.value.kind == kind
    # Which position, in one line.
    assert str(refused.value).startswith("one, ")
    assert "\n" not in str(refused.value)


def test_a_later_position_may_be_the_wrong_one(served: Serving) -> None:
    path = "/v1/completions" if served.server.profile.engine == "vllm" else "/completion"

    def at(now: ProbeProgress) -> None:
        if now.done == 10:
            served.faults(f"{path}:logprobs=other")

    try:
        with pytest.raises(MeasurementRefused) as refused:
            probe(served, progress=at)
    finally:
        served.faults()
    assert refused.value.kind == "other-prompt"
    assert str(refused.value).startswith("two, ")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_answers_with_an_error_fails_the_probe(
    served: Serving, concurrency: int
) -> None:
    path = "/v1/completions" if served.server.profile.engine == "vllm" else "/completion"
    served.faults(f"{path}:status=503:99")
    try:
        with pytest.raises(MeasurementFailed, match="503") as failed:
            probe(served, conditions=Conditions(concurrency=concurrency))
    finally:
        served.faults()
    assert failed.value.kind == "status"


def test_answers_from_a_cache_are_not_cold() -> None:
    # This server keeps everything whatever the salt: the second cold run is none.
    with stub(engine="vllm", round_ms=0.0, prefill_ms=0.0, block_size=4) as running:
        engine = get_engine("vllm")
        plain = type(engine)()
        plain.dress = lambda body, **_: body  # type: ignore[method-assign]
        ENGINES["unsalted"] = plain
        try:
            where = Endpoint(running.url, "unsalted", "stub")
            with pytest.raises(MeasurementRefused) as refused:
                run_probe(where, PROMPTS, deadline_s=20, conditions=Conditions(cache="cold"))
        finally:
            del ENGINES["unsalted"]
    assert refused.value.kind == "warm-cache"


class NoEcho(Vllm):
    """A server that does not repeat prompts."""

    def _next_body(self, model: str, ids: Sequence[int], top_n: int) -> dict[str, Any]:
        body = super()._next_body(model, ids, top_n)
        del body["return_token_ids"]
        return body


def test_without_an_echo_the_same_answer_twice_is_a_mix_up() -> None:
    ENGINES["no-echo"] = NoEcho()
    try:
        with stub(round_ms=0.0, prefill_ms=0.0, perturb=0.3) as running:
            where = Endpoint(running.url, "no-echo", "stub")
            assert run_probe(where, PROMPTS, deadline_s=20).notes == ("prompt-echo-unproved",)
            # Two prompts of one length: a count tells nothing, and the one's answer comes again.
            twins = (
                ProbePrompt("left", "short", "a b c d e f g h i j"),
                ProbePrompt("right", "short", "k l m n o p q r s t"),
            )

            def at(now: ProbeProgress) -> None:
                if now.prompt == "left" and now.done == 8:
                    running.faults("/v1/completions:logprobs=other")

            with pytest.raises(MeasurementRefused) as refused:
                run_probe(where, (twins[0], twins[1]), positions=8, deadline_s=20, progress=at)
            assert refused.value.kind == "other-prompt"
    finally:
        del ENGINES["no-echo"]


def test_a_server_without_counters_is_asked_only_where_others_are_allowed() -> None:
    with stub(round_ms=0.0, prefill_ms=0.0, perturb=0.3) as running:
        running.faults("/metrics:status=404:999")
        with pytest.raises(MeasurementRefused) as refused:
            run_probe(endpoint(running), PROMPTS, deadline_s=20)
        assert refused.value.kind == "no-counters"
        run_probe(
            endpoint(running), PROMPTS, deadline_s=20, conditions=Conditions(others="allowed")
        )


@pytest.mark.parametrize("others", ["none", "allowed"])
def test_a_server_that_began_anew_in_the_middle_refuses_the_probe(
    others: Literal["none", "allowed"],
) -> None:
    with stub(round_ms=0.0, prefill_ms=0.0, perturb=0.3) as running:

        def at(now: ProbeProgress) -> None:
            if now.done == 12:
                running.faults("/metrics:metrics-restart")

        with pytest.raises(MeasurementRefused) as refused:
            probe(running, progress=at, conditions=Conditions(others=others))
        assert refused.value.kind == "reset"


def test_other_positions_than_the_bands_are_refused_before_anything_is_asked(
    served: Serving,
) -> None:
    found = probe(served)
    probe(served, prefixes=found.prefixes)
    asked: list[ProbeProgress] = []
    wrong = ("0" * 64, *found.prefixes[1:])
    for prefixes in (wrong, found.prefixes[:-1], ()):
        with pytest.raises(MeasurementRefused) as refused:
            probe(served, prefixes=prefixes, progress=asked.append)
        assert refused.value.kind == "other-prompts"
    assert not asked
