"""The stub beside a real llama.cpp server, field by field.

Runs where LLAMA_SERVER names the binary and LLAMA_MODEL a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from stub_wire import Reply, get, post

from pytest_dsv41.stub import serve
from tests.real_llamacpp import NGRAM, needs_llamacpp, serving

pytestmark = needs_llamacpp
JSON = {"content-type": "application/json"}
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"


@pytest.fixture(scope="module", params=[(), NGRAM], ids=["plain", "drafts"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The real server's URL and the stub's, both with or without speculation."""
    log = tmp_path_factory.mktemp("llama") / "log"
    words = ("--metrics", "--slots", "-c", "2048", "-np", "1", "-t", "1")
    with serving(log, *words, *request.param) as url:
        model = get(url, "/v1/models").json()["data"][0]["id"]
        with serve(
            engine="llamacpp",
            model=model,
            round_ms=1,
            prefill_ms=1,
            max_running=1,
            max_model_len=2048,
            draft_tokens=4 if request.param else 0,
        ) as stub:
            yield url, stub.url


# What a prompt, a setting or a drafter decides, not the format.
FREE = ("bytes", "tokens", "generation_settings", "draft_n", "draft_n_accepted", "logprobs")
FREE += ("completion_probabilities",)


def shape(value: Any) -> Any:
    """Leaves by their types, objects by their keys in order, lists by their first item."""
    if isinstance(value, dict):
        return [(k, shape(v)) for k, v in value.items() if k not in FREE]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else type(value).__name__


def ask(url: str, path: str, **fields: Any) -> Reply:
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    if path == CHAT:
        body.setdefault("messages", [{"role": "user", "content": "hi there"}])
    else:
        body.setdefault("prompt", "hi there, what is light?")
    return post(url, path, body, "", **JSON)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    "fields", [{}, {"stream_options": {"include_usage": True}}, {"timings_per_token": True}]
)
def test_streams(pair: tuple[str, str], path: str, fields: dict[str, Any]) -> None:
    theirs, mine = (ask(url, path, stream=True, **fields) for url in pair)
    assert theirs.headers["content-type"] == mine.headers["content-type"]
    for place in (0, 1, -2, -1):
        assert shape(mine.chunk_objects[place]) == shape(theirs.chunk_objects[place])
    assert (mine.data[-1] == "[DONE]") == (theirs.data[-1] == "[DONE]")
    assert len(mine.chunk_objects) == len(theirs.chunk_objects)


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_whole_answers(pair: tuple[str, str], path: str) -> None:
    theirs, mine = (ask(url, path) for url in pair)
    assert theirs.headers["content-type"] == mine.headers["content-type"]
    assert shape(mine.json()) == shape(theirs.json())


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_probabilities(pair: tuple[str, str], path: str) -> None:
    fields = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"n_probs": 2}
    theirs, mine = (ask(url, path, stream=True, **fields).chunk_objects for url in pair)
    for chunks in (theirs, mine):
        # The role chunk has none; the first token's was made without drafts.
        first = next(c for c in chunks if "role" not in str(c))
        if path == NATIVE:
            entry = first["completion_probabilities"][0]
        else:
            entry = first["choices"][0]["logprobs"]["content"][0]
        assert list(entry) == ["id", "token", "bytes", "logprob", "top_logprobs"]
        assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("path", "fields"), [("/nowhere", {}), ("/metrics", {}), (TEXT, {"prompt": "a " * 9000})]
)
def test_errors(pair: tuple[str, str], path: str, fields: dict[str, Any]) -> None:
    theirs, mine = (ask(url, path, **fields) for url in pair)
    assert mine.status == theirs.status
    assert shape(mine.json()) == shape(theirs.json())
    for key in ("type", "code"):
        assert mine.json()["error"][key] == theirs.json()["error"][key]


def test_small_answers(pair: tuple[str, str]) -> None:
    for path, body in (
        ("/tokenize", {"content": "hi"}),
        ("/detokenize", {"tokens": [300]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        theirs, mine = (post(url, path, body, "", **JSON).json() for url in pair)
        assert list(mine) == list(theirs)
    for path in ("/health", "/slots"):
        theirs, mine = (get(url, path).json() for url in pair)
        if path == "/slots":
            theirs, mine = ({**slots[0], "params": 0} for slots in (theirs, mine))
        assert shape(mine) == shape(theirs)


def test_metrics(pair: tuple[str, str]) -> None:
    theirs, mine = (get(url, "/metrics") for url in pair)
    assert mine.headers["content-type"] == theirs.headers["content-type"]
    families = [
        [line for line in r.text.splitlines() if line.startswith("# TYPE") and "_pos_" not in line]
        for r in (theirs, mine)
    ]
    assert families[0] == families[1]


def test_steps_are_rounds(pair: tuple[str, str]) -> None:
    """Both count one decode call for the prompt and one a round."""
    for url in pair:
        before = _decodes(url)
        timings = ask(url, TEXT, max_tokens=40, cache_prompt=False).json()["timings"]
        rounds = timings["predicted_n"] - timings.get("draft_n_accepted", 0) - 1
        assert _decodes(url) - before - rounds in (0, 1, 2)


def _decodes(url: str) -> int:
    lines = get(url, "/metrics").text.splitlines()
    return int(next(x for x in lines if x.startswith("llamacpp:n_decode_total ")).split(" ")[1])
