"""Fleet probes and a calibration push against a real llama.cpp: Gemma 270M, n-gram drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.engines import LlamaCpp
from pytest_dsv41.payload.calib import KIND, push, read_corpus
from pytest_dsv41.payload.step import Step
from pytest_dsv41.quality.fleet import fleet_probe
from tests.real_llamacpp import needs_llamacpp, serving

pytestmark = needs_llamacpp


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("llama") / "server.log"
    words = ("--metrics", "--slots", "-c", "4096", "-np", "1", "-t", "1", "--jinja")
    with serving(log, *words, "--spec-type", "ngram-cache") as where:
        yield where


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
