"""llama.cpp's bodies, timings, slots and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from stub_wire import Reply, connect, get, linger_reset, post, request_bytes, samples, sse, total

from pytest_dsv41.stub import Serving, serve

TIMINGS = [
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
]
MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def stub() -> Iterator[Serving]:
    with serve(engine="llamacpp", model="g", round_ms=1, prefill_ms=1, max_running=2) as running:
        yield running


def chat(stub: Serving, fault: str = "", **fields: Any) -> Reply:
    body = {"messages": MESSAGES, "max_tokens": 12, "stream": True, "temperature": 0, **fields}
    return post(stub.url, "/v1/chat/completions", body, fault)


def text(stub: Serving, fault: str = "", **fields: Any) -> Reply:
    body = {"prompt": "Say it.", "max_tokens": 12, "stream": True, "temperature": 0, **fields}
    return post(stub.url, "/v1/completions", body, fault)


def native(stub: Serving, fault: str = "", **fields: Any) -> Reply:
    body = {"prompt": "Say it.", "n_predict": 12, "stream": True, "temperature": 0, **fields}
    return post(stub.url, "/completion", body, fault)


def test_health_models_props(stub: Serving) -> None:
    assert get(stub.url, "/health").json() == {"status": "ok"}
    assert get(stub.url, "/v1/models").json()["data"][0]["id"] == "g"
    props = get(stub.url, "/props").json()
    assert props["total_slots"] == 2
    assert {"model_path", "build_info", "default_generation_settings", "is_sleeping"} <= set(props)
    missing = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
    for reply in (get(stub.url, "/version"), post(stub.url, "/metrics", {})):
        assert (reply.status, reply.json()) == (404, missing)


def test_tokenize_takes_content_and_answers_tokens_only(stub: Serving) -> None:
    answer = post(stub.url, "/tokenize", {"content": "light is quick"}).json()
    assert list(answer) == ["tokens"]
    back = post(stub.url, "/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"content": "light is quick"}
    assert post(stub.url, "/tokenize", {"prompt": "light"}).json() == {"tokens": []}
    longer = post(stub.url, "/tokenize", {"content": "light"}, "tokenize-count=2").json()
    assert len(longer["tokens"]) == 3


def test_apply_template_is_what_the_chat_is_made_of(stub: Serving) -> None:
    prompt = post(stub.url, "/apply-template", {"messages": MESSAGES}).json()["prompt"]
    count = len(post(stub.url, "/tokenize", {"content": prompt}).json()["tokens"])
    usage = chat(stub, stream_options={"include_usage": True}).chunk_objects[-1]["usage"]
    assert usage["prompt_tokens"] == count


def test_chat_role_comes_together_with_the_first_token(stub: Serving) -> None:
    reply = chat(stub)
    first = [json.loads(event["data"]) for event in sse(reply.chunks[0])]
    assert [list(c["choices"][0]["delta"]) for c in first] == [["role", "content"], ["content"]]
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert list(first[0]) == [
        "choices",
        "created",
        "id",
        "model",
        "system_fingerprint",
        "object",
    ]
    assert reply.choices[-1] == {"finish_reason": "length", "index": 0, "delta": {}}
    assert reply.data[-1] == "[DONE]"


def test_one_event_a_token_and_a_rounds_events_in_one_write(stub: Serving) -> None:
    reply = chat(stub, max_tokens=40)
    tokens = [c for c in reply.choices if c["delta"].get("content")]
    assert len(tokens) == 40
    per_write = [sum('"content":" ' in e["data"] for e in sse(part)) for part in reply.chunks]
    assert max(per_write) > 1
    assert len([n for n in per_write if n]) < 40


def test_timings_stand_on_the_last_event_only(stub: Serving) -> None:
    reply = chat(stub)
    assert [("timings" in chunk) for chunk in reply.chunk_objects].count(True) == 1
    timings = reply.chunk_objects[-1]["timings"]
    assert list(timings)[:9] == TIMINGS
    assert list(timings)[9:] == ["draft_n", "draft_n_accepted"]
    assert timings["predicted_n"] == 12
    reply = chat(stub, stream_options={"include_usage": True})
    assert reply.chunk_objects[-1]["choices"] == []
    assert "timings" in reply.chunk_objects[-1]
    assert "timings" not in reply.chunk_objects[-2]
    each = chat(stub, timings_per_token=True)
    with_content = [c for c in each.chunk_objects if c["choices"][0]["delta"].get("content")]
    counted = [chunk["timings"]["predicted_n"] for chunk in with_content]
    assert counted == list(range(1, 13))


def test_no_draft_no_draft_figures() -> None:
    with serve(engine="llamacpp", draft_tokens=0, round_ms=1, prefill_ms=1) as plain:
        timings = chat(plain).chunk_objects[-1]["timings"]
        assert list(timings) == TIMINGS
        assert not any("per_pos" in name for name in samples(plain.url))


def test_rounds_from_timings_are_the_engines_steps(stub: Serving) -> None:
    before = samples(stub.url)
    timings = chat(stub, max_tokens=50).chunk_objects[-1]["timings"]
    after = samples(stub.url)

    def moved(name: str) -> float:
        return total(after, f"llamacpp:{name}") - total(before, f"llamacpp:{name}")

    rounds = timings["predicted_n"] - timings["draft_n_accepted"] - 1
    assert moved("n_decode_total") == rounds + 1  # and the prompt's
    assert moved("tokens_predicted_total") == 50
    assert moved("prompt_tokens_total") == timings["prompt_n"]
    assert moved("spec_decode_num_draft_tokens_total") == timings["draft_n"] == 3 * rounds
    assert moved("spec_decode_num_accepted_tokens_total") == timings["draft_n_accepted"]
    assert moved("spec_decode_num_drafts_total") == rounds
    per_position = after["llamacpp:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(per_position.values()) == timings["draft_n_accepted"]


def test_predicted_counters_move_at_the_end_only(stub: Serving) -> None:
    sock = connect(stub.url)
    body = {"prompt": "a", "n_predict": 1, "stream": True}
    sock.sendall(request_bytes("POST", "/completion", body, "endless"))
    read = b""
    while read.count(b"data: ") < 20:
        read += sock.recv(65536)
    scrape = samples(stub.url)
    assert total(scrape, "llamacpp:tokens_predicted_total") == 0
    assert total(scrape, "llamacpp:n_decode_total") > 5
    assert total(scrape, "llamacpp:requests_processing") == 1
    linger_reset(sock)
    for _ in range(20_000):
        scrape = samples(stub.url)
        if total(scrape, "llamacpp:requests_processing") == 0:
            break
    assert total(scrape, "llamacpp:tokens_predicted_total") >= 20


def test_metrics_have_no_labels_and_six_digits(stub: Serving) -> None:
    reply = get(stub.url, "/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4"
    assert "{" not in reply.text
    stub.server.ledger._values["prompt_tokens_total"] = 1234567  # type: ignore[union-attr]
    assert "llamacpp:prompt_tokens_total 1.23457e+06\n" in get(stub.url, "/metrics").text


def test_completions_logprobs_are_not_the_legacy_dict(stub: Serving) -> None:
    reply = text(stub, logprobs=3)
    entry = reply.choices[0]["logprobs"]["content"][0]
    assert list(entry) == ["id", "token", "bytes", "logprob", "top_logprobs"]
    assert [len(entry["top_logprobs"]), list(entry["top_logprobs"][0])] == [
        3,
        ["id", "token", "bytes", "logprob"],
    ]
    # Only a step without drafts has them: here the first token's.
    assert all(choice["logprobs"] is None for choice in reply.choices[1:])
    probs = native(stub, n_probs=2, post_sampling_probs=True).chunk_objects[0]
    entry = probs["completion_probabilities"][0]
    assert list(entry) == ["id", "token", "bytes", "prob", "top_probs"]
    assert 0 < entry["prob"] <= 1


def test_without_speculation_every_token_has_its_probabilities() -> None:
    with serve(engine="llamacpp", draft_tokens=0, round_ms=1, prefill_ms=1) as plain:
        reply = text(plain, logprobs=2)
        whole = text(plain, logprobs=2, stream=False).json()
    *tokens, _finish = reply.choices
    assert all(len(c["logprobs"]["content"]) == 1 for c in tokens)
    assert len(whole["choices"][0]["logprobs"]["content"]) == len(tokens) == 12


def test_native_completion_and_its_end(stub: Serving) -> None:
    reply = native(stub)
    assert reply.data[-1] != "[DONE]"
    first, *_, last = reply.chunk_objects
    assert list(first) == [
        "index",
        "content",
        "tokens",
        "stop",
        "id_slot",
        "tokens_predicted",
        "tokens_evaluated",
    ]
    assert (first["stop"], last["stop"], last["stop_type"]) == (False, True, "limit")
    assert (first["id_slot"], last["id_slot"]) == (-1, 0)
    assert {"truncated", "tokens_cached", "timings", "generation_settings"} <= set(last)
    whole = native(stub, stream=False, return_tokens=True).json()
    assert whole["content"] == "".join(c["content"] for c in reply.chunk_objects)
    assert len(whole["tokens"]) == 12


def test_streams_and_whole_answers_agree(stub: Serving) -> None:
    whole = text(stub, stream=False).json()
    assert whole["choices"][0]["text"] == text(stub).answer
    assert "timings" in whole
    message = chat(stub, stream=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": chat(stub).answer}


def test_prompts_are_reused_token_by_token_unless_told_not_to(stub: Serving) -> None:
    def cached(**fields: Any) -> int:
        return int(text(stub, **fields).chunk_objects[-1]["timings"]["cache_n"])

    prompt = "river stone light green amber quiet"
    assert cached(prompt=prompt) == 0
    assert cached(prompt=prompt) == 5
    assert cached(prompt=prompt, cache_prompt=False) == 0
    assert cached(prompt=prompt + " winter", cache_salt="other") == 6
    erased = post(stub.url, "/slots/0?action=erase", {}).json()
    assert erased["id_slot"] == 0
    assert erased["n_erased"] > 0
    assert cached(prompt=prompt) == 0


def test_slots_tell_who_works(stub: Serving) -> None:
    idle = get(stub.url, "/slots").json()
    assert [slot["is_processing"] for slot in idle] == [False, False]
    sock = connect(stub.url)
    body = {"prompt": "a", "n_predict": 1, "stream": True}
    sock.sendall(request_bytes("POST", "/completion", body, "endless"))
    while b"data: " not in sock.recv(65536):
        pass
    busy, _ = get(stub.url, "/slots").json()
    assert busy["is_processing"]
    assert busy["next_token"][0]["n_decoded"] >= 1
    assert {"id_task", "n_ctx", "speculative", "params"} <= set(busy)
    waiting = [connect(stub.url) for _ in range(2)]
    for other in waiting:
        other.sendall(request_bytes("POST", "/completion", body, "endless"))
    for _ in range(20_000):
        scrape = samples(stub.url)
        if total(scrape, "llamacpp:requests_deferred") == 1:
            break
    assert total(scrape, "llamacpp:requests_processing") == 2
    for other in [sock, *waiting]:
        linger_reset(other)


def test_errors_have_llamacpps_shape_and_end_the_stream(stub: Serving) -> None:
    refused = text(stub, prompt=[10**9])
    assert refused.status == 400
    assert list(refused.json()["error"]) == ["code", "message", "type"]
    long = text(stub, prompt="river " * 300_000).json()["error"]
    assert list(long) == ["code", "message", "type", "n_prompt_tokens", "n_ctx"]
    assert long["type"] == "exceed_context_size_error"
    failed = chat(stub, "error=mid:2")
    assert failed.status == 200
    assert failed.chunk_objects[-1] == {
        "error": {"code": 500, "message": "the stub was told to fail", "type": "server_error"}
    }
    assert "[DONE]" not in failed.data


def test_reasoning_has_its_own_name(stub: Serving) -> None:
    reply = chat(stub, "reasoning=4")
    names = [next(iter(c["delta"])) for c in reply.choices[1:-1]]
    assert names == ["reasoning_content"] * 4 + ["content"] * 8


def test_prompt_progress_comes_with_a_role(stub: Serving) -> None:
    first = chat(stub, return_progress=True).chunk_objects[0]
    assert list(first["prompt_progress"]) == ["total", "cache", "processed", "time_ms"]
    assert first["choices"][0]["delta"]["role"] == "assistant"


def test_what_the_real_server_takes_silently_is_taken(stub: Serving) -> None:
    assert text(stub, model="whatever", logprobs=50).status == 200
    assert native(stub, n_probs=300_000, id_slot=99).status == 200
    assert len(native(stub, n_predict=0).chunk_objects) == 2


def test_the_same_faults_play_here(stub: Serving) -> None:
    assert b"\r\n\r\n" in chat(stub, "crlf").body
    assert len(chat(stub, "burst").chunks) == 1
    assert "[DONE]" not in chat(stub, "no-done").data
    assert [i for i, c in enumerate(chat(stub, "role-late").choices) if "role" in c["delta"]] == [1]
    assert text(stub, "finish-early=3").chunk_objects[-1]["usage"]["completion_tokens"] == 3
    assert not chat(stub, "chunk-cut=2").complete
    post(stub.url, "/stub/restart", {})
    assert total(samples(stub.url), "llamacpp:tokens_predicted_total") == 0
