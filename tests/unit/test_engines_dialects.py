"""Health, models, and what each dialect's counters say, from texts as the servers print them."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.address import parse_url
from pytest_dsv41.engines import InBand, Snapshot, engine_names, get_engine
from pytest_dsv41.engines.base import base_url, check_url
from pytest_dsv41.engines.counters import read_samples
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.measure.wire import Call

NAME = 'model_name="a \\"b\\" /c"'


def vllm_text(
    *,
    success: float = 0,
    tokens: float = 0,
    drafts: float | None = None,
    accepted: tuple[float, ...] = (),
    decode_s: float = 0,
    running: float = 0,
    created: float = 1.79e9,
    engines: int = 1,
) -> str:
    lines = []
    for engine in range(engines):
        label = f'engine="{engine}",{NAME}'
        part = 1 / engines
        lines += [
            f"vllm:num_requests_running{{{label}}} {running * part}",
            f"vllm:num_requests_waiting{{{label}}} 0.0",
            f'vllm:request_success_total{{{label},finished_reason="length"}} {success * part}',
            f'vllm:request_success_total{{{label},finished_reason="abort"}} 0.0',
            f"vllm:generation_tokens_total{{{label}}} {tokens * part}",
            f"vllm:prompt_tokens_total{{{label}}} {5 * success * part}",
            f"vllm:request_decode_time_seconds_sum{{{label}}} {decode_s * part}",
            f"vllm:request_decode_time_seconds_count{{{label}}} {success * part}",
            f'vllm:request_decode_time_seconds_bucket{{{label},le="+Inf"}} {success * part}',
        ]
        if drafts is not None:
            name = "vllm:spec_decode_num_accepted_tokens"
            lines += [
                "# TYPE vllm:spec_decode_num_drafts counter",
                f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts * part}",
                f"vllm:spec_decode_num_drafts_created{{{label}}} {created}",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {2 * drafts * part}",
                f"{name}_total{{{label}}} {sum(accepted) * part}",
                f"{name}_created{{{label}}} {created}",
            ]
            lines += [
                f'{name}_per_pos_total{{{label},position="{i}"}} {value * part}'
                for i, value in enumerate(accepted)
            ]
    return "\n".join(lines) + "\n"


@contextmanager
def answering(text: str | Callable[[httpx.Request], httpx.Response]) -> Iterator[httpx.Client]:
    def respond(request: httpx.Request) -> httpx.Response:
        return text(request) if callable(text) else httpx.Response(200, text=text)

    with httpx.Client(transport=httpx.MockTransport(respond)) as client:
        yield client


def look(text: str, engine: str = "vllm") -> Snapshot:
    with answering(text) as client:
        return get_engine(engine).scrape("http://server", client=client)


def done(*tokens: int) -> list[InBand]:
    return [InBand(prompt_tokens=5, completion_tokens=count, cached_tokens=0) for count in tokens]


def test_deltas_are_exact_names_summed_over_engines() -> None:
    before = look(vllm_text(success=4, tokens=100, drafts=10, accepted=(6, 2), engines=2))
    after = look(
        vllm_text(success=5, tokens=140, drafts=25, accepted=(16, 8), decode_s=0.4, engines=2)
    )
    server = get_engine("vllm").account(before, after, done(40))
    assert (server.tokens, server.accepted, server.drafts) == (40, 16, 15)
    assert server.rounds == 40 - 16 - 1
    assert server.decode_ms == pytest.approx(400)


def test_drafts_are_not_rounds() -> None:
    before = look(vllm_text(drafts=0, accepted=(0,)))
    after = look(vllm_text(success=1, tokens=128, drafts=0, accepted=(0,), decode_s=1))
    server = get_engine("vllm").account(before, after, done(128))
    assert (server.drafts, server.rounds, server.speculates) == (0, 127, True)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        ({"success": 2, "tokens": 50}, "foreign-request"),
        ({"success": 1, "tokens": 50}, "foreign-request"),
        ({"success": 1, "tokens": 40, "created": 1.8e9}, "reset"),
        ({"success": 1, "tokens": 40, "accepted": (10, 12)}, "identity"),
        ({"success": 1, "tokens": 40, "accepted": (10, 2), "drafts": 28}, "identity"),
        ({"success": 1, "tokens": 40, "accepted": (10, 2), "drafts": None}, "missing-family"),
    ],
)
def test_what_counters_refuse(after: dict[str, object], kind: str) -> None:
    given = {"drafts": 20, "accepted": (10, 2), "decode_s": 1.0} | after
    before = look(vllm_text(drafts=0, accepted=(0, 0)))
    with pytest.raises(MeasurementRefused) as refused:
        get_engine("vllm").account(before, look(vllm_text(**given)), done(40))  # type: ignore[arg-type]
    assert refused.value.kind == kind


def without(text: str, family: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith(family))


@pytest.mark.parametrize(
    "family",
    [
        "vllm:request_success_total",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:request_decode_time_seconds_sum",
        "vllm:num_requests_running",
    ],
)
def test_a_family_that_every_server_has_is_named_when_it_is_gone(family: str) -> None:
    with pytest.raises(MeasurementRefused, match=family) as refused:
        look(without(vllm_text(), family))
    assert refused.value.kind == "missing-family"


@pytest.mark.parametrize("gone", ["drafts", "draft_tokens", "accepted_tokens_total"])
def test_half_of_the_speculative_families_are_no_speculation(gone: str) -> None:
    family = f"vllm:spec_decode_num_{gone}"
    before = look(without(vllm_text(drafts=0, accepted=(0, 0)), family))
    text = vllm_text(success=1, tokens=40, drafts=20, accepted=(10, 2), decode_s=1)
    with pytest.raises(MeasurementRefused, match=family) as refused:
        get_engine("vllm").account(before, look(without(text, family)), done(40))
    assert refused.value.kind == "missing-family"


OUTPUTS = "vllm:inter_token_latency_seconds_count"


@pytest.mark.parametrize(("outputs", "fits"), [(39, True), (27, False), (40, False)])
def test_engine_outputs_are_the_rounds_of_a_server_that_tells_no_drafts(
    outputs: int, fits: bool
) -> None:
    # 40 tokens in 27 steps after the first were drafted, whatever the counters leave out.
    before = look(vllm_text() + f"{OUTPUTS} 0\n")
    after = look(vllm_text(success=1, tokens=40, decode_s=1) + f"{OUTPUTS} {outputs}\n")
    if fits:
        assert get_engine("vllm").account(before, after, done(40)).rounds == 39
        return
    with pytest.raises(MeasurementRefused, match=OUTPUTS) as refused:
        get_engine("vllm").account(before, after, done(40))
    assert refused.value.kind == "identity"


def test_rounds_without_the_count_of_outputs_are_said_to_be_unproved() -> None:
    before = look(vllm_text(drafts=0, accepted=(0, 0)))
    after = look(vllm_text(success=1, tokens=40, drafts=20, accepted=(10, 2), decode_s=1))
    assert get_engine("vllm").account(before, after, done(40)).notes == ("rounds-unproved",)


def test_prompt_tokens_that_are_not_the_streams_are_somebody_elses() -> None:
    before, after = look(vllm_text()), look(vllm_text(success=1, tokens=40, decode_s=1))
    told = [InBand(prompt_tokens=4, completion_tokens=40, cached_tokens=0)]
    with pytest.raises(MeasurementRefused, match="vllm:prompt_tokens_total moved by 5") as refused:
        get_engine("vllm").account(before, after, told)
    assert refused.value.kind == "foreign-request"


@pytest.mark.parametrize(("looked", "refused"), [(0, False), (5, False), (6, True), (105, True)])
def test_a_foreign_request_that_left_before_its_first_token_is_seen(
    looked: int, refused: bool
) -> None:
    # Our prompt has 5 tokens; without prefix caching nothing is looked up.
    name = "vllm:prefix_cache_queries_total"
    before = look(vllm_text() + f"{name} 0\n")
    after = look(vllm_text(success=1, tokens=40, decode_s=1) + f"{name} {looked}\n")
    if not refused:
        assert get_engine("vllm").account(before, after, done(40)).tokens == 40
        return
    with pytest.raises(MeasurementRefused, match=name) as why:
        get_engine("vllm").account(before, after, done(40))
    assert why.value.kind == "foreign-request"


@pytest.mark.parametrize("place", ["x", "-1", "²", ""])
def test_a_position_that_is_none_is_refused_by_name(place: str) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    texts = [
        vllm_text(success=n, tokens=40 * n, drafts=20 * n, accepted=(10 * n,), decode_s=n).replace(
            'position="0"', f'position="{place}"'
        )
        for n in (0, 1)
    ]
    with pytest.raises(MeasurementRefused, match=name) as refused:
        get_engine("vllm").account(look(texts[0]), look(texts[1]), done(40))
    assert refused.value.kind == "identity"


@pytest.mark.parametrize("value", [-1, 2.5, 2**53 + 2])
def test_a_count_that_is_no_whole_number_is_refused_by_name(value: float) -> None:
    with pytest.raises(MeasurementRefused, match="vllm:generation_tokens_total") as refused:
        look(vllm_text(tokens=value))
    assert refused.value.kind == "bad-counter"


def test_metrics_that_end_in_the_middle_of_a_line_are_refused() -> None:
    with pytest.raises(MeasurementRefused, match="middle of a line") as refused:
        look(vllm_text(tokens=1234)[:-3])
    assert refused.value.kind == "bad-counter"


@pytest.mark.parametrize("coding", ["x-gzip2", "identity, rot13", "compress"])
def test_metrics_in_a_coding_nobody_asked_for_are_refused(coding: str) -> None:
    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=vllm_text(), headers={"Content-Encoding": coding})

    with answering(respond) as client, pytest.raises(MeasurementRefused) as refused:
        get_engine("vllm").scrape("http://server", client=client)
    assert refused.value.kind == "no-counters"
    assert coding.rpartition(" ")[2] in str(refused.value)


def test_metrics_in_a_coding_that_was_asked_for_are_read() -> None:
    def respond(_: httpx.Request) -> httpx.Response:
        packed = gzip.compress(vllm_text(tokens=7).encode())
        return httpx.Response(200, content=packed, headers={"Content-Encoding": "GZIP"})

    with answering(respond) as client:
        seen = get_engine("vllm").scrape("http://server", client=client)
    assert seen.values["vllm:generation_tokens_total"] == 7


def test_a_counter_that_falls_is_a_reset() -> None:
    before, after = look(vllm_text(success=9, tokens=90)), look(vllm_text(success=1, tokens=40))
    with pytest.raises(MeasurementRefused) as refused:
        get_engine("vllm").account(before, after, done(40))
    assert refused.value.kind == "reset"


def test_created_times_are_never_added_to_counts() -> None:
    sums, created = read_samples(
        vllm_text(drafts=7, accepted=(3, 1)), ["vllm:spec_decode_num_drafts_total"]
    )
    assert sums == {"vllm:spec_decode_num_drafts_total": 7.0}
    assert list(created.values()) == [1.79e9]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_refused(value: str) -> None:
    zero = f'vllm:generation_tokens_total{{engine="0",{NAME}}} '
    text = vllm_text().replace(f"{zero}0.0", f"{zero}{value}")
    with pytest.raises(MeasurementRefused) as refused:
        look(text)
    assert refused.value.kind == "bad-counter"


LLAMA = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {prompt}
llamacpp:prompt_tokens_cached_total 0
llamacpp:tokens_predicted_total {tokens}
llamacpp:n_decode_total {steps}
llamacpp:spec_decode_num_draft_tokens_total {drafted}
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
llamacpp:spec_decode_num_drafts_total {drafts}
llamacpp:requests_processing 0
llamacpp:requests_deferred 0
llamacpp:predicted_tokens_seconds 36.3
"""


def llama(prompt: int = 0, tokens: int = 0, steps: int = 0, drafted: int = 0, accepted: int = 0,
          drafts: int = 0) -> Snapshot:  # fmt: skip
    text = LLAMA.format(prompt=prompt, tokens=tokens, steps=steps, drafted=drafted,
                        accepted=accepted, drafts=drafts)  # fmt: skip
    return look(text, "llamacpp")


def timed(tokens: int, prompt: int, **draft: int) -> InBand:
    timings = {"predicted_n": tokens, "predicted_ms": 300.0, "prompt_n": prompt, "cache_n": 0}
    return InBand(prompt, tokens, 0, timings | draft)


def test_llamacpp_rounds_come_from_timings() -> None:
    # The figures of a real request: 12 tokens, 9 of 9 drafts accepted, 2 drafted steps.
    after = llama(prompt=16, tokens=12, steps=4, drafted=9, accepted=9, drafts=2)
    server = get_engine("llamacpp").account(
        llama(), after, [timed(12, 16, draft_n=9, draft_n_accepted=9)]
    )
    assert (server.rounds, server.drafts, server.decode_ms) == (2, 2, 300.0)


@pytest.mark.parametrize("after", [{"tokens": 13}, {"prompt": 17}, {"tokens": 24, "prompt": 32}])
def test_llamacpp_foreign_tokens_refuse(after: dict[str, int]) -> None:
    given = {"prompt": 16, "tokens": 12} | after
    with pytest.raises(MeasurementRefused) as refused:
        get_engine("llamacpp").account(llama(), llama(**given), [timed(12, 16)])
    assert refused.value.kind == "foreign-request"


@pytest.mark.parametrize(
    ("timings", "after", "kind"),
    [
        ({"predicted_ms": None}, {}, "no-timings"),
        ({"predicted_ms": -1.0}, {}, "no-timings"),
        ({"prompt_n": None}, {}, "no-timings"),
        ({"prompt_n": 15}, {"prompt": 15}, "identity"),
        ({"draft_n": 4, "draft_n_accepted": 5}, {"drafted": 4, "accepted": 5}, "identity"),
        ({"draft_n": 14, "draft_n_accepted": 14}, {"drafted": 14, "accepted": 14}, "identity"),
        ({}, {"steps": 3}, "identity"),
    ],
)
def test_llamacpp_timings_that_cannot_be_are_refused(
    timings: dict[str, float | None], after: dict[str, int], kind: str
) -> None:
    told = timed(12, 16)
    given = {
        name: value for name, value in {**told.timings, **timings}.items() if value is not None
    }
    moved = {"prompt": 16, "tokens": 12, "steps": 12} | after
    with pytest.raises(MeasurementRefused) as refused:
        get_engine("llamacpp").account(llama(), llama(**moved), [replace(told, timings=given)])
    assert refused.value.kind == kind


def test_llamacpp_without_metrics_says_how_to_get_them() -> None:
    with (
        answering(lambda _: httpx.Response(501, text="{}")) as client,
        pytest.raises(MeasurementRefused, match="--metrics") as refused,
    ):
        get_engine("llamacpp").scrape("http://server", client=client)
    assert refused.value.kind == "no-counters"


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "radiance"])
def test_each_dialect_is_known_by_its_name(engine: str) -> None:
    assert get_engine(engine).name == engine
    assert engine in engine_names()


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(UsageError, match="valid: llamacpp, radiance, vllm"):
        get_engine("triton")


def test_caches_are_asked_for_in_the_dialects_own_words() -> None:
    body = {"stream": True}
    vllm, llama_cpp = get_engine("vllm"), get_engine("llamacpp")
    assert vllm.dress(dict(body), cache="cold", salt="s")["cache_salt"] == "s"
    assert "cache_salt" not in vllm.dress(dict(body), cache="any", salt="s")
    assert llama_cpp.dress(dict(body), cache="cold", salt="s")["cache_prompt"] is False
    assert llama_cpp.dress(dict(body), cache="warm", salt="s")["cache_prompt"] is True
    assert "cache_salt" not in llama_cpp.dress(dict(body), cache="cold", salt="s")


@pytest.mark.parametrize(
    ("status", "body", "state", "reason"),
    [
        (200, "", "up", ""),
        (503, '{"error":{"code":503,"message":"Loading model"}}', "down", "loading"),
        (503, "", "down", "the server says 503"),
        (404, "", "unknown", "/health answered 404"),
    ],
)
def test_health_by_its_answer(status: int, body: str, state: str, reason: str) -> None:
    with answering(lambda _: httpx.Response(status, text=body)) as client:
        health = get_engine("vllm").health("http://server", client=client)
    assert (health, health.reason) == (state, reason)


def test_nobody_listening_is_down_and_silence_is_unknown() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert get_engine("vllm").health(url) == "down"
        sock.listen()
        health = get_engine("vllm").health(url, timeout=0.2)
    assert (health, health.reason) == ("unknown", "no answer within 0.2 s")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses_may_end_in_v1_or_a_slash(url: str) -> None:
    assert base_url(url) == "http://h:1"


@pytest.mark.parametrize(
    "url",
    ["http://h", "https://h:1/v1", "http://[::1]:8000", "http://127.0.0.1:65535/", "unix:/a?b#c@d"],
)
def test_a_servers_address_is_taken_as_it_is(url: str) -> None:
    assert check_url(url) == url


WRONG_ADDRESS = pytest.mark.parametrize(
    "url",
    [
        "", "h:1", "ftp://h", "http://", "http://[::1", "http://h:99999", "http://h:0", "http://h:x",
        "http://h?a=1", "http://h#a", "http://h/?", "unix:", "http://h o", "http://h\n",
        "http://h/\u00e9", "http://\u00e9",
        "http://h/.", "http://h/a/../b", "http://h/%zz", "http://h/[", "http://300.1.1.1",
        "unix:a\0b",
    ],
)  # fmt: skip


@WRONG_ADDRESS
def test_what_is_no_servers_address_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="valid: http://HOST:PORT") as wrong:
        check_url(url)
    assert len(str(wrong.value).splitlines()) == 1


@WRONG_ADDRESS
def test_an_endpoint_takes_what_a_server_address_may_be(url: str) -> None:
    with pytest.raises(UsageError):
        Endpoint(url)


@settings(max_examples=100, deadline=None)
@given(
    st.text("htps:/[]1.a@?#% \u00e9\0\n-_0", max_size=12).map(lambda end: f"http://{end}")
    | st.from_regex(r"https?://[a-z0-9.-]{1,9}(:[0-9]{1,6})?(/[!-~]{0,6})?", fullmatch=True)
)
def test_an_address_that_is_taken_can_be_asked(url: str) -> None:
    try:
        Endpoint(url)
    except UsageError:
        return
    address = parse_url(f"{base_url(url)}/v1/models")
    asked = httpx.URL(f"{base_url(url)}/v1/models")
    assert (address.host, address.path) == (asked.host, asked.raw_path.decode())
    assert Call(f"{base_url(url)}/v1/models").encode().startswith(f"GET {address.path} ".encode())


@pytest.mark.parametrize(
    "url",
    ["http://u:hush@h", "http://hush@h:1", "http://u:hush@[::1", "u:hush@h", "http://u:h#hush@h"],
)
def test_a_password_in_an_address_is_never_shown(url: str) -> None:
    with pytest.raises(UsageError, match="password") as wrong:
        check_url(url)
    assert "hush" not in str(wrong.value)


@pytest.mark.parametrize("answer", ['{"object": "list"}', '{"object": "list", "data": []}'])
def test_models_that_are_none_are_refused(answer: str) -> None:
    with (
        answering(answer) as client,
        pytest.raises(MeasurementRefused) as refused,
    ):
        get_engine("vllm").models("http://server", client=client)
    assert refused.value.kind == "models"


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\nx-slow: ", b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"],
    ids=["headers", "body"],
)
def test_an_answer_that_never_ends_is_unknown_and_not_waited_for(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(answer)
                # Every read of the client succeeds: only the whole answer is never there.
                while not done.wait(0.02):
                    connection.sendall(b"x")

        done = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            health = get_engine("vllm").health(url, timeout=0.3)
        finally:
            done.set()
            thread.join()
    assert health == "unknown"
    assert health.reason == "no answer within 0.3 s"


def test_a_counter_too_large_for_a_float_is_refused_by_name() -> None:
    with pytest.raises(MeasurementRefused) as refused:
        read_samples("n_total " + "9" * 400 + "\n", ("n_total",))
    assert refused.value.kind == "bad-counter"
