"""vLLM's bodies: the same fields, in the same order, with the same nulls as the real server's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from stub_wire import chat, complete, get, post

from pytest_dsv41.stub import Serving, serve


@pytest.fixture(scope="module")
def stub() -> Iterator[Serving]:
    with serve(
        model="m",
        round_ms=1,
        prefill_ms=1,
        reasoning_tokens=4,
        per_request_metrics=True,
        per_request_spec="summary",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Serving]:
    with serve(model="m", round_ms=1, prefill_ms=1) as running:
        yield running


def shape(value: Any) -> Any:
    """Replace every leaf by its type, None staying None: what must agree field by field."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else type(value)


ROLE = json.loads(
    '{"id":"chatcmpl-9f0c","object":"chat.completion.chunk","created":1790000000,"model":"m",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    '"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}'
)
CONTENT = json.loads(
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    '"delta":{"content":" a b c"},"logprobs":{"content":[{"token":" a","logprob":-0.1,'
    '"bytes":[32,97],"top_logprobs":[{"token":" a","logprob":-0.1,"bytes":[32,97]}]}]},'
    '"finish_reason":null,"token_ids":[264,293,272]}],"kv_transfer_params":null}'
)
FINISH = json.loads(
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    '"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null,'
    '"token_ids":null,"weight_versions":null}],"kv_transfer_params":null}'
)
USAGE = json.loads(
    '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":'
    '{"prompt_tokens":12,"total_tokens":21,"completion_tokens":9,"prompt_tokens_details":'
    '{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":4}},'
    '"system_fingerprint":"vllm-0.33.0-x","metrics":{"time_to_first_token_ms":41.2,'
    '"generation_time_ms":120.5,"queue_time_ms":0.08,"mean_itl_ms":15.06,'
    '"tokens_per_second":55.7,"speculative_decoding":{"mean_acceptance_length":2.667,'
    '"draft_acceptance_rate":0.5556,"acceptance_histogram":[0,1,2,0],"num_spec_steps":3,'
    '"num_accepted_draft_tokens":5,"num_draft_tokens":9,"num_spec_tokens":3}}}'
)
TEXT = json.loads(
    '{"id":"cmpl-9f0c","object":"text_completion","created":1790000000,"model":"m","choices":'
    '[{"index":0,"text":" a b","logprobs":{"text_offset":[0,2],"token_logprobs":[-0.1,-0.2],'
    '"tokens":[" a"," b"],"top_logprobs":[{" a":-0.1," x":-2.0},{" b":-0.2," y":-3.0}]},'
    '"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null,'
    '"weight_versions":null}],"kv_transfer_params":null}'
)


def test_chat_stream_has_the_fields_of_each_chunk_in_order(stub: Serving) -> None:
    reply = chat(stub.url, logprobs=True, top_logprobs=1, return_token_ids=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.data[-1] == "[DONE]"
    role, first, *rest = reply.chunk_objects
    role_shape = {**shape(ROLE), "prompt_token_ids": [int]}
    assert shape(role) == role_shape
    assert list(role) == list(ROLE)
    assert list(first["choices"][0]["delta"]) == ["reasoning"]
    contents = [c for c in rest if c["choices"] and list(c["choices"][0]["delta"]) == ["content"]]
    assert shape(contents[0]) == shape(CONTENT)
    assert list(contents[0]) == list(CONTENT)
    assert list(contents[0]["choices"][0]) == list(CONTENT["choices"][0])
    usage = rest[-1]
    assert shape(usage) == shape(USAGE)
    assert list(usage["usage"]) == list(USAGE["usage"])
    assert list(usage["metrics"]) == list(USAGE["metrics"])


def test_finish_chunk_has_its_fields(plain: Serving) -> None:
    *_, finish, _usage = chat(plain.url).chunk_objects
    assert shape(finish) == shape(FINISH)
    assert list(finish["choices"][0]) == list(FINISH["choices"][0])
    *_, own, _usage = chat(plain.url, "finish-own").chunk_objects
    assert own["choices"][0] == FINISH["choices"][0]


def test_fingerprint_sits_on_the_finish_chunk_without_usage(plain: Serving) -> None:
    reply = chat(plain.url, stream_options=None)
    *before, finish = reply.chunk_objects
    assert finish["system_fingerprint"] == "vllm-0.33.0-stub"
    assert all("system_fingerprint" not in chunk for chunk in before)


def test_completion_stream_has_the_fields_of_each_chunk(plain: Serving) -> None:
    reply = complete(plain.url, logprobs=1)
    *tokens, usage = reply.chunk_objects
    assert shape(tokens[0]) == {**shape(TEXT), "choices": [shape(tokens[0]["choices"][0])]}
    assert list(tokens[0]["choices"][0]) == list(TEXT["choices"][0])
    assert list(tokens[0]["choices"][0]["logprobs"]) == list(TEXT["choices"][0]["logprobs"])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12


def test_usage_adds_up_and_events_hold_one_round_each(plain: Serving) -> None:
    reply = chat(plain.url, max_tokens=40, return_token_ids=True)
    usage = reply.chunk_objects[-1]["usage"]
    counts = [len(c["token_ids"]) for c in reply.choices if c.get("token_ids")]
    assert sum(counts) == usage["completion_tokens"] == 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + 40
    assert counts[0] == 1
    assert set(counts) <= {1, 2, 3, 4}
    assert len(reply.choices[0]["delta"]) == 2
    assert reply.chunk_objects[0]["prompt_token_ids"] is not None


def test_continuous_usage_is_cumulative_from_the_role_chunk_on(plain: Serving) -> None:
    reply = chat(plain.url, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in reply.chunk_objects]
    assert counts[0] == 0
    assert counts[-1] == counts[-2] == 12
    assert counts == sorted(counts)


def test_forced_usage_needs_no_asking() -> None:
    with serve(round_ms=1, prefill_ms=1, force_include_usage=True) as forced:
        reply = chat(forced.url, stream_options=None)
    assert all("usage" in chunk for chunk in reply.chunk_objects)


def test_whole_answers_say_what_the_streams_say(plain: Serving) -> None:
    streamed = chat(plain.url).answer
    whole = post(
        plain.url,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": 12,
            "temperature": 0,
        },
    ).json()
    assert whole["choices"][0]["message"]["content"] == streamed
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["completion_tokens"] == 12
    text = complete(plain.url).answer
    body = {"prompt": "Say something.", "max_tokens": 12, "temperature": 0}
    whole = post(plain.url, "/v1/completions", body).json()
    assert whole["choices"][0]["text"] == text
    assert whole["choices"][0]["finish_reason"] == "length"


def test_chat_logprobs_add_up_and_name_the_sampled_token(plain: Serving) -> None:
    reply = chat(plain.url, logprobs=True, top_logprobs=20, temperature=1.0, seed=4, max_tokens=60)
    entries = [e for c in reply.choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert len(entries) == 60
    for entry in entries:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 20
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] <= 0
    assert "".join(e["token"] for e in entries) == reply.answer


def test_completion_logprobs_hold_up_to_n_plus_one_entries(plain: Serving) -> None:
    reply = complete(plain.url, logprobs=2, temperature=1.5, seed=1, max_tokens=80)
    tops = [t for c in reply.choices for t in c["logprobs"]["top_logprobs"]]
    names = [n for c in reply.choices for n in c["logprobs"]["tokens"]]
    sizes = {len(top) for top in tops}
    assert sizes == {2, 3}  # 3 when the sampled token is not among the best two
    for top, name in zip(tops, names, strict=True):
        assert next(iter(top)) == name
    offsets = [o for c in reply.choices for o in c["logprobs"]["text_offset"]]
    assert offsets[0] == 0
    assert offsets[1] == len(names[0])


def test_tokens_as_ids(plain: Serving) -> None:
    reply = complete(plain.url, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    ids = [i for c in reply.choices for i in c["token_ids"]]
    names = [n for c in reply.choices for n in c["logprobs"]["tokens"]]
    assert names == [f"token_id:{i}" for i in ids]


def test_spec_figures_of_a_request_agree_with_its_events(stub: Serving) -> None:
    reply = chat(stub.url, max_tokens=50, return_token_ids=True)
    counts = [len(c["token_ids"]) for c in reply.choices if c.get("token_ids")]
    spec = reply.chunk_objects[-1]["metrics"]["speculative_decoding"]
    rounds = len(counts) - 1
    accepted = 50 - rounds - 1
    assert spec["num_spec_steps"] == rounds
    assert spec["num_accepted_draft_tokens"] == accepted
    assert spec["num_draft_tokens"] == 3 * rounds
    assert spec["acceptance_histogram"] == [counts[1:].count(n + 1) for n in range(4)]
    assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)
    assert spec["draft_acceptance_rate"] == pytest.approx(accepted / (3 * rounds))


def test_figures_of_a_whole_answer_hold_their_nulls(stub: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 9, "ignore_eos": True}
    figures = post(stub.url, "/v1/completions", body).json()["metrics"]
    assert list(figures) == list(USAGE["metrics"])
    assert figures["speculative_decoding"]["per_step_accepted"] is None


def test_detailed_spec_figures_list_every_step() -> None:
    with serve(round_ms=1, prefill_ms=1, per_request_spec="detailed") as detailed:
        spec = chat(detailed.url).chunk_objects[-1]["metrics"]["speculative_decoding"]
    assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    assert spec["per_step_drafted"] == [3] * spec["num_spec_steps"]


def test_cache_hits_are_whole_blocks_of_the_same_salt() -> None:
    words = " ".join(["river stone light"] * 20)  # 60 tokens
    with serve(round_ms=1, prefill_ms=1) as fresh:

        def cached(salt: str) -> int:
            usage = complete(fresh.url, prompt=words, cache_salt=salt).chunk_objects[-1]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        count = post(fresh.url, "/tokenize", {"prompt": words}).json()["count"]
        assert [cached("a"), cached("a"), cached("b"), cached("b")] == [
            0,
            (count - 1) // 16 * 16,
            0,
            (count - 1) // 16 * 16,
        ]
        assert post(fresh.url, "/reset_prefix_cache", {}).json() == {"success": True}
        assert cached("a") == 0


def test_small_endpoints(plain: Serving) -> None:
    health = get(plain.url, "/health")
    assert (health.status, health.body) == (200, b"")
    assert get(plain.url, "/version").json() == {"version": "0.33.0"}
    models = get(plain.url, "/v1/models").json()
    model = models["data"][0]
    assert models["object"] == "list"
    assert list(model) == [
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
        "permission",
    ]
    assert (model["id"], model["owned_by"], model["parent"]) == ("m", "vllm", None)
    assert get(plain.url, "/load").json() == {"server_load": 0}
    for path in ("/start_profile", "/stop_profile"):
        done = post(plain.url, path, {})
        assert (done.status, done.body) == (200, b"")
    info = get(plain.url, "/server_info?config_format=json").json()
    assert list(info) == ["vllm_config", "vllm_env", "system_env"]
    assert info["vllm_config"]["model"] == "m"


def test_tokenize_and_back(plain: Serving) -> None:
    body = {"prompt": "Light, étoile 中文!", "return_token_strs": True}
    answer = post(plain.url, "/tokenize", body).json()
    assert list(answer) == ["count", "max_model_len", "tokens", "token_strs"]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    back = post(plain.url, "/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "Light, étoile 中文!"}
    plain_answer = post(plain.url, "/tokenize", {"prompt": "x"}).json()
    assert plain_answer["token_strs"] is None
    messages = [{"role": "user", "content": "Say something."}]
    count = post(plain.url, "/tokenize", {"messages": messages}).json()["count"]
    assert chat(plain.url).chunk_objects[-1]["usage"]["prompt_tokens"] == count


def test_prompt_as_token_ids_is_the_prompt_as_text(plain: Serving) -> None:
    tokens = post(plain.url, "/tokenize", {"prompt": "Say something."}).json()["tokens"]
    assert complete(plain.url, prompt=tokens).answer == complete(plain.url).answer


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "BadRequestError", "logprobs"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "NotFoundError", "model"),
        ("completions", {"prompt": "a", "max_tokens": 10**7}, 400, "BadRequestError", "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ("completions", {"prompt": "a", "stop": ["x"]}, 400, "BadRequestError", None),
        ("completions", {"prompt": "a", "echo": True}, 400, "BadRequestError", None),
        ("completions", {"prompt": "a", "n": 2}, 400, "BadRequestError", None),
        ("completions", {"prompt": ""}, 400, "BadRequestError", "prompt"),
        ("completions", {"prompt": [10**9]}, 400, "BadRequestError", None),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "BadRequestError", "temperature"),
        (
            "completions",
            {"prompt": "a", "temperature": "x"},
            400,
            "Bad Request",
            "body.temperature",
        ),
        ("completions", {"prompt": "a", "seed": 1.5}, 400, "Bad Request", "body.seed"),
        ("chat/completions", {"messages": []}, 400, "BadRequestError", None),
        ("chat/completions", [1], 400, "Bad Request", "body"),
    ],
)
def test_errors_before_a_stream_are_objects_with_a_number(
    plain: Serving, path: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    reply = post(plain.url, f"/v1/{path}", body)
    error = reply.json()["error"]
    assert reply.status == status
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)


def test_unknown_routes_are_the_web_frameworks(plain: Serving) -> None:
    missing = get(plain.url, "/nowhere")
    assert (missing.status, missing.json()) == (404, {"detail": "Not Found"})
    wrong = post(plain.url, "/version", {})
    assert (wrong.status, wrong.json()) == (405, {"detail": "Method Not Allowed"})


def test_an_older_version_has_its_own_fields() -> None:
    with serve(version="0.32.0", round_ms=1, prefill_ms=1) as older:
        *_, finish, usage = chat(older.url).chunk_objects
        text = complete(older.url).chunk_objects[0]
    assert "weight_versions" not in finish["choices"][0]
    assert "kv_transfer_params" not in finish
    assert "weight_versions" not in text["choices"][0]
    assert usage["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "created_cache_tokens": 0,
    }


def test_switched_off_endpoints_are_not_there() -> None:
    with serve(dev_mode=False, profiler=False) as closed:
        assert post(closed.url, "/reset_prefix_cache", {}).status == 404
        assert get(closed.url, "/server_info").status == 404
        assert post(closed.url, "/start_profile", {}).status == 404


def test_request_id_comes_from_the_header(plain: Serving) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    reply = post(plain.url, "/v1/completions", body, **{"x-request-id": "abc"})
    assert reply.json()["id"] == "cmpl-abc"


def test_answers_end_by_themselves_without_a_limit(plain: Serving) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    body = {"messages": messages, "temperature": 0}
    whole = post(plain.url, "/v1/chat/completions", body).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert 64 < whole["usage"]["completion_tokens"] <= 192


def test_eos_tokens_end_answers_unless_ignored() -> None:
    with serve(round_ms=1, prefill_ms=1, eos_tokens=5) as short:
        ended = complete(short.url, max_tokens=30)
        assert ended.choices[-1]["finish_reason"] == "stop"
        assert ended.chunk_objects[-1]["usage"]["completion_tokens"] == 6
        whole = complete(short.url, max_tokens=30, ignore_eos=True)
        assert whole.choices[-1]["finish_reason"] == "length"
        assert whole.chunk_objects[-1]["usage"]["completion_tokens"] == 30
