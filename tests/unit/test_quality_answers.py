"""What a server answers is read or refused by name, whatever it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.engines import get_engine
from pytest_dsv41.engines.next_token import NextToken
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.asking import AskedServer
from pytest_dsv41.quality.kl import checked_vector

IDS = [5, 6, 7]
TOP = [(11, -0.5), (12, -1.5), (13, -2.5)]
VLLM: dict[str, Any] = {
    "model": "m",
    "choices": [
        {
            "prompt_token_ids": IDS,
            "token_ids": [11],
            "finish_reason": "length",
            "logprobs": {
                "tokens": ["token_id:11"],
                "token_logprobs": [-0.5],
                "top_logprobs": [{f"token_id:{t}": lp for t, lp in TOP}],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
}
LLAMA: dict[str, Any] = {
    "model": "m",
    "prompt": "abc",
    "tokens": [11],
    "stop_type": "limit",
    "completion_probabilities": [
        {"id": 11, "top_logprobs": [{"id": t, "logprob": lp} for t, lp in TOP]}
    ],
    "timings": {"cache_n": 2, "prompt_n": 1, "predicted_n": 1, "predicted_ms": 0.5},
}


def client(body: bytes | dict[str, Any], status: int = 200) -> httpx.Client:
    """A client whose server always says `body`, and "abc" for any token ids."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"content": "abc"})
        return httpx.Response(status, content=raw)

    return httpx.Client(transport=httpx.MockTransport(answer), trust_env=False, verify=False)


def ask(
    engine: str, body: bytes | dict[str, Any], *, top_n: int = 3, status: int = 200
) -> NextToken:
    with client(body, status) as http:
        return get_engine(engine).next_token(
            "http://x", "m", IDS, top_n, cache="cold", salt=None, client=http
        )


def greedy(engine: str, body: bytes | dict[str, Any]) -> object:
    with client(body) as http:
        return get_engine(engine).greedy(
            "http://x", "m", IDS, 1, 3, cache="cold", salt=None, client=http
        )


GOOD = {"vllm": VLLM, "llamacpp": LLAMA}


@pytest.mark.parametrize("engine", GOOD)
def test_a_good_answer_is_read(engine: str) -> None:
    found = ask(engine, GOOD[engine])
    assert list(found.top) == TOP
    assert found.echoed
    assert (found.in_band.prompt_tokens, found.in_band.cached_tokens) == (3, 2)


def kind(call: Callable[[], object]) -> str:
    with pytest.raises((MeasurementRefused, MeasurementFailed)) as refused:
        call()
    assert "\n" not in str(refused.value)
    return refused.value.kind


def changed(engine: str, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    body = copy.deepcopy(GOOD[engine])
    change(body)
    return body


@pytest.mark.parametrize(
    ("engine", "change", "expected"),
    [
        ("vllm", lambda b: b["choices"][0].update(prompt_token_ids=[5, 6, 8]), "other-prompt"),
        ("vllm", lambda b: b["usage"].update(prompt_tokens=4), "other-prompt"),
        ("vllm", lambda b: b["choices"].append({}), "no-logprobs"),
        ("vllm", lambda b: b["choices"][0].update(logprobs=None), "no-logprobs"),
        ("vllm", lambda b: b["choices"][0]["logprobs"]["top_logprobs"].append({}), "no-logprobs"),
        ("vllm", lambda b: b["usage"].update(prompt_tokens="3"), "bad-answer"),
        (
            "vllm",
            lambda b: b["usage"].update(prompt_tokens_details={"cached_tokens": 4}),
            "bad-answer",
        ),
        (
            "vllm",
            lambda b: b["choices"][0]["logprobs"].update(
                top_logprobs=[{"token_id:11": -0.5, "token_id:12": -1.5, f"token_id:{2**31}": -9.0}]
            ),
            "bad-answer",
        ),
        ("llamacpp", lambda b: b.update(prompt="abd"), "other-prompt"),
        ("llamacpp", lambda b: b["timings"].update(prompt_n=2), "other-prompt"),
        ("llamacpp", lambda b: b.pop("completion_probabilities"), "no-logprobs"),
        (
            "llamacpp",
            lambda b: b["completion_probabilities"][0]["top_logprobs"][1].update(id="12"),
            "bad-answer",
        ),
        (
            "llamacpp",
            lambda b: b["completion_probabilities"][0]["top_logprobs"][1].update(logprob="-1"),
            "bad-answer",
        ),
        (
            "llamacpp",
            lambda b: b["completion_probabilities"][0]["top_logprobs"][1].update(id=2**31),
            "bad-answer",
        ),
    ],
)
def test_an_answer_that_is_none_is_refused_by_name(
    engine: str, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    assert kind(lambda: ask(engine, changed(engine, change))) == expected


def test_names_of_tokens_instead_of_ids_are_refused() -> None:
    texts = {" a": -0.5, " b": -1.5, " c": -2.5}
    body = changed("vllm", lambda b: b["choices"][0].update(logprobs={"top_logprobs": [texts]}))
    assert kind(lambda: ask("vllm", body)) == "bad-answer"


def test_one_token_twice_in_an_object_is_not_swallowed_by_the_parser() -> None:
    raw = json.dumps(VLLM).replace("token_id:12", "token_id:11").encode()
    assert len(json.loads(raw)["choices"][0]["logprobs"]["top_logprobs"][0]) == 2
    assert kind(lambda: ask("vllm", raw, top_n=2)) == "duplicate-id"


class Site:
    """A server of the OpenAI form whose every part can be changed between two questions."""

    def __init__(self) -> None:
        self.body = copy.deepcopy(VLLM)
        self.models, self.version, self.created = ["m"], "1", 1000
        transport = httpx.MockTransport(self._answer)
        self.client = httpx.Client(transport=transport, trust_env=False, verify=False)
        self.asked = AskedServer(Endpoint("http://x"), self.client)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.models]})
        if path == "/version":
            return httpx.Response(200, json={"version": self.version})
        if path == "/metrics":
            return httpx.Response(404)
        return httpx.Response(200, json=self.body)

    def ask(self, cache: str = "warm") -> NextToken:
        return self.asked.next_token(IDS, 3, cache=cache, salt="s", client=self.client)

    def chosen(self, token: int, logp: float | None) -> None:
        told = self.body["choices"][0]["logprobs"]
        told["tokens"], told["token_logprobs"] = [f"token_id:{token}"], [logp]


@pytest.mark.parametrize(
    ("token", "logp"),
    [
        (11, -0.5), (12, -1.5005), (14, -2.5), (14, -9.0), (14, -9999.0), (11, None),
    ],
)  # fmt: skip
def test_the_token_that_was_chosen_fits_the_list_beside_it(token: int, logp: float | None) -> None:
    site = Site()
    site.chosen(token, logp)
    assert site.ask().top == tuple(TOP)


@pytest.mark.parametrize(
    ("token", "logp", "says"),
    [
        (11, -0.7, "token 11 was chosen at -0.7 and is listed at -0.5"),
        (14, -2.0, "token 14 was chosen at -2 and is not in the list"),
        (14, float("nan"), "not in the list"),
        (11, float("inf"), "is listed at -0.5"),
    ],
)
def test_a_list_without_a_likelier_token_that_was_chosen_is_no_list_of_the_likeliest(
    token: int, logp: float, says: str
) -> None:
    site = Site()
    site.chosen(token, logp)
    # Written by Python's own JSON, which has words for NaN and infinity; httpx's has none.
    raw = json.dumps(site.body).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=raw))
    with (
        httpx.Client(transport=transport, trust_env=False, verify=False) as odd,
        pytest.raises(MeasurementRefused, match=says) as refused,
    ):
        site.asked.next_token(IDS, 3, cache="warm", salt="s", client=odd)
    assert refused.value.kind == "bad-answer"


def test_a_server_that_another_one_takes_the_place_of_is_found_out() -> None:
    for change, says in (
        (lambda site: site.models.append("n"), "its models changed from m to m, n"),
        (lambda site: setattr(site, "version", "2"), "its version changed from 1 to 2"),
    ):
        site = Site()
        site.ask()
        site.asked.prove_same(site.client)
        change(site)
        with pytest.raises(MeasurementRefused, match=says) as refused:
            site.asked.prove_same(site.client)
        assert refused.value.kind == "other-server"
    site = Site()
    site.models.append("n")
    again = AskedServer(Endpoint("http://x"), site.client)
    site.models.reverse()
    again.prove_same(site.client)
    site = Site()
    site.ask()
    site.body["model"] = "n\x1b[31m"
    with pytest.raises(MeasurementRefused, match=r"n\\x1b\[31m answered, and m before") as refused:
        site.ask()
    assert refused.value.kind == "other-server"


def test_what_may_not_come_from_a_cache_does_not() -> None:
    site = Site()
    for cache in ("cold", "fill"):
        assert kind(lambda cache=cache: site.ask(cache)) == "warm-cache"
    assert site.ask("warm").in_band.cached_tokens == 2


@pytest.mark.parametrize("engine", GOOD)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1e999"])
def test_what_is_no_object_is_refused(engine: str, raw: bytes) -> None:
    assert kind(lambda: ask(engine, raw)) == "bad-answer"


@pytest.mark.parametrize("engine", GOOD)
def test_an_error_of_the_server_is_a_failure_with_what_it_said(engine: str) -> None:
    assert kind(lambda: ask(engine, b"no\x1b[31m\nmodel", status=400)) == "status"
    assert kind(lambda: ask(engine, GOOD[engine], top_n=4)) == "fewer"


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**20, 10**400)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, inner in items:
        found += _places(inner, (*path, name))
    return found


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_anything_at_any_place_is_read_or_refused(engine: str, data: st.DataObject) -> None:
    body = copy.deepcopy(GOOD[engine])
    path = data.draw(st.sampled_from(_places(body)))
    holder: Any = body
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = data.draw(ANYTHING)
    for call in (ask, greedy):
        try:
            found = call(engine, body)
        except (MeasurementRefused, MeasurementFailed):
            continue
        if isinstance(found, NextToken):
            try:
                checked_vector(found.top)
            except MeasurementRefused:
                continue
