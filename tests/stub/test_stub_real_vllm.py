"""The stub beside a real vLLM, field by field. Runs where DSV41_VLLM_PYTHON names a Python with it.

A model of two layers is made on the spot; its words mean nothing, its wire format is the real one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from stub_wire import Reply, get, post

from pytest_dsv41.stub import serve
from tests.real_vllm import NGRAM, serving

PYTHON = os.environ.get("DSV41_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DSV41_VLLM_PYTHON names no Python with vLLM"),
]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(PYTHON, tmp_path_factory.mktemp("vllm"), *NGRAM) as url:
        yield url


@pytest.fixture(scope="module")
def ours(real: str) -> Iterator[str]:
    version = get(real, "/version").json()["version"].split("+")[0]
    with serve(
        model="tiny", version=version, round_ms=1, prefill_ms=1, max_model_len=1024, draft_tokens=4
    ) as stub:
        yield stub.url


def shape(value: Any) -> Any:
    """Leaves by their types, objects by their keys in order, lists by their first item."""
    if isinstance(value, dict):
        # A special token has no bytes, and a dict of logprobs is keyed by texts.
        free = ("bytes", "top_logprobs")
        return [(key, None if key in free else shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else type(value).__name__


def ask(url: str, path: str, **fields: Any) -> Reply:
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    if "chat" in path:
        body.setdefault("messages", [{"role": "user", "content": "hi there"}])
    else:
        body.setdefault("prompt", "hi there")
    return post(url, path, body, "", **JSON)


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": USAGE},
        {"stream_options": CONTINUOUS},
        {"stream_options": USAGE, "return_token_ids": True},
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_streams(real: str, ours: str, path: str, fields: dict[str, Any], logprobs: bool) -> None:
    if logprobs:
        fields = {**fields, "logprobs": True if path == CHAT else 2}
        if path == CHAT:
            fields["top_logprobs"] = 2
    theirs = ask(real, path, stream=True, **fields)
    mine = ask(ours, path, stream=True, **fields)
    assert theirs.headers["content-type"] == mine.headers["content-type"]
    for place in (0, 1, -2, -1):
        assert shape(mine.chunk_objects[place]) == shape(theirs.chunk_objects[place])
    assert mine.data[-1] == theirs.data[-1] == "[DONE]"
    assert len(theirs.chunks) == len(theirs.data)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}])
def test_whole_answers(real: str, ours: str, path: str, fields: dict[str, Any]) -> None:
    theirs, mine = ask(real, path, **fields), ask(ours, path, **fields)
    assert shape(mine.json()) == shape(theirs.json())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"model": "other"}),
        (TEXT, {"logprobs": 21}),
        (CHAT, {"logprobs": True, "top_logprobs": 21}),
        (TEXT, {"max_tokens": 5000}),
        (TEXT, {"max_tokens": 0}),
        (CHAT, {"messages": []}),
        (TEXT, {"temperature": "hot"}),
        (TEXT, {"temperature": -1}),
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": [10**9]}),
        ("/nowhere", {}),
        ("/version", {}),
    ],
)
def test_errors(real: str, ours: str, path: str, fields: dict[str, Any]) -> None:
    theirs, mine = ask(real, path, **fields), ask(ours, path, **fields)
    assert mine.status == theirs.status
    for body in (theirs, mine):
        if "error" in body.json():
            body.chunks = [re.sub(rb'"message":"(\\.|[^"\\])*"', b'"message":""', body.body)]
    assert mine.json() == theirs.json()


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load"])
def test_small_answers(real: str, ours: str, path: str) -> None:
    assert shape(get(ours, path).json()) == shape(get(real, path).json())


def test_tokenize_and_back(real: str, ours: str) -> None:
    body = {"model": "tiny", "prompt": "hello"}
    theirs, mine = (post(url, "/tokenize", body, "", **JSON).json() for url in (real, ours))
    assert shape(mine) == shape(theirs)
    body = {"model": "tiny", "tokens": [5, 6]}
    theirs, mine = (post(url, "/detokenize", body, "", **JSON).json() for url in (real, ours))
    assert shape(mine) == shape(theirs)


def test_metrics(real: str, ours: str) -> None:
    theirs, mine = get(real, "/metrics"), get(ours, "/metrics")
    assert mine.headers["content-type"] == theirs.headers["content-type"]

    def families(text: str) -> list[str]:
        return [line[7:] for line in text.splitlines() if line.startswith("# TYPE vllm:")]

    def series(text: str) -> list[str]:
        """Names with every label but the values of the configuration and the buckets' counts."""
        return [
            line.rpartition(" ")[0]
            for line in text.splitlines()
            if line.startswith("vllm:") and "cache_config_info" not in line
        ]

    assert families(mine.text) == families(theirs.text)
    assert series(mine.text) == series(theirs.text)
