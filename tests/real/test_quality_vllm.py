"""The probe of a real vLLM beside transformers' own calculation on the same model, both float32.

Needs a Python with vLLM (and so with transformers), named by DSV41_VLLM_PYTHON:

    python3 -m venv vllm && vllm/bin/pip install vllm
    DSV41_VLLM_PYTHON=vllm/bin/python pytest -m slow tests/real/test_quality_vllm.py

Two models of two layers are made on the spot, the second is the first with its weights moved.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.compare import compare_probes
from pytest_dsv41.quality.greedy import (
    GreedyPrompt,
    compare_greedy,
    record_divergences,
    run_greedy,
)
from pytest_dsv41.quality.greedy_kl import compare_recorded
from pytest_dsv41.quality.kl import top20_kl
from pytest_dsv41.quality.probe import Conditions, Probe, run_probe
from pytest_dsv41.quality.prompts import probe_prompts
from tests.real_vllm import ENVIRONMENT, served

PYTHON = os.environ.get("DSV41_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="set DSV41_VLLM_PYTHON to a Python with: pip install vllm"
    ),
]
PROMPTS = probe_prompts(["short"], each=4)
MODELS = """
import sys
from pathlib import Path
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
torch.manual_seed(0)
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([text], vocab_size=512, special_tokens=["<s>", "</s>"])
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        bos_token_id=0, eos_token_id=1, initializer_range=0.25,
    )
)
for name in ("first", "second"):
    (folder / name).mkdir()
    bpe.save(str(folder / name / "bpe.json"))
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / name / "bpe.json"), bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / name)
    model.save_pretrained(folder / name)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
"""
LOGITS = """
import json, sys
import torch
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    for ids in json.load(sys.stdin):
        logits = model(torch.tensor([ids])).logits[0, -1]
        print(json.dumps(logits.tolist()))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    text = Path(__file__).resolve().parents[2] / "LICENSE"
    subprocess.run(
        [PYTHON, "-c", MODELS, str(folder), str(text)], check=True, env=ENVIRONMENT, timeout=300
    )
    return folder


@contextmanager
def serving(model: Path, *more: str) -> Iterator[Endpoint]:
    """A vLLM in float32 on a free port; `more` are further words of its command line."""
    with served(PYTHON, model, "--dtype", "float32", *more) as url:
        yield Endpoint(url, "vllm", "tiny")


class Seen:
    """What one model said: its probes, its greedy answers, and transformers' log-probabilities."""

    def __init__(self, folder: Path, before: Seen | None) -> None:
        self.before = before
        with serving(folder) as where:
            self.probe = run_probe(where, PROMPTS, deadline_s=300)
            cold = Conditions(cache="cold", concurrency=3)
            self.cold = run_probe(where, PROMPTS, deadline_s=300, conditions=cold)
            prompts = [GreedyPrompt(prompt.name, prompt.text) for prompt in PROMPTS]
            self.greedy = run_greedy(where, prompts, max_tokens=32, deadline_s=300)
            self.ids = [row.prompt_ids for row in self.greedy.rows]
            if before is not None:
                self.greedy = record_divergences(
                    where, before.greedy, self.greedy, probe_salt_prefix="w", deadline_s=300
                )
                self.same = compare_recorded(
                    where, self.greedy.divergences, "again", bound=0.005, deadline_s=300
                )
        prefixes = [list(ids[: len(ids) - 8 + i]) for ids in self.ids for i in range(8)]
        self.truth = logprobs(folder, prefixes)


def logprobs(folder: Path, prefixes: list[list[int]]) -> np.ndarray:
    """Log-probabilities over the vocabulary after each prefix, by transformers."""
    done = subprocess.run(
        [PYTHON, "-c", LOGITS, str(folder)],
        input=json.dumps(prefixes),
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
        timeout=300,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return log_softmax(np.asarray(rows, dtype=np.float64), axis=1)


@pytest.fixture(scope="module")
def first(models: Path) -> Seen:
    return Seen(models / "first", None)


@pytest.fixture(scope="module")
def second(models: Path, first: Seen) -> Seen:
    return Seen(models / "second", first)


def coarse(p: np.ndarray, q: np.ndarray) -> float:
    """KL over the shared of the 20 likeliest and OTHER, written down anew."""
    own, theirs = (set(np.argsort(-side)[:20].tolist()) for side in (p, q))
    shared = sorted(own & theirs)
    po, qo = 1 - np.exp(p[shared]).sum(), 1 - np.exp(q[shared]).sum()
    return float(np.sum(np.exp(p[shared]) * (p[shared] - q[shared])) + po * math.log(po / qo))


@pytest.mark.parametrize("which", ["probe", "cold"])
def test_the_probes_lists_are_transformers_own(first: Seen, which: str) -> None:
    found: Probe = getattr(first, which)
    assert found.notes == ()
    for position, truth in zip(found.positions, first.truth, strict=True):
        assert len(position.top) == 20
        for token, value in position.top:
            assert value == pytest.approx(truth[token], abs=1e-4)
        # The list is the likeliest twenty, up to what rounding may swap.
        assert position.top[-1][1] == pytest.approx(np.sort(truth)[-20], abs=1e-4)


def test_each_positions_kl_is_the_independent_one_to_a_ten_thousandth(
    first: Seen, second: Seen
) -> None:
    compared = compare_probes(first.probe, second.probe)
    ours = [position.kl for position in compared.positions]
    expected = [coarse(p, q) for p, q in zip(first.truth, second.truth, strict=True)]
    full = [
        float(np.sum(np.exp(p) * (p - q))) for p, q in zip(first.truth, second.truth, strict=True)
    ]
    print(f"mean KL {np.mean(ours):.5f}, full vocabulary {np.mean(full):.5f}, worst difference "
          f"{np.max(np.abs(np.subtract(ours, expected))):.2e}")  # fmt: skip
    assert max(full) > 0.01
    assert ours == pytest.approx(expected, abs=1e-4)
    assert all(a <= b + 1e-4 for a, b in zip(ours, full, strict=True))
    same = [int(np.argmax(p)) == int(np.argmax(q)) for p, q in
            zip(first.truth, second.truth, strict=True)]  # fmt: skip
    assert [position.top1_same for position in compared.positions] == same


def test_the_same_model_in_both_has_no_kl(first: Seen) -> None:
    for position, truth in zip(first.probe.positions, first.truth, strict=True):
        listed = [(int(i), float(truth[i])) for i in np.argsort(-truth)[:20]]
        assert top20_kl(position.top, listed).kl < 1e-4


def test_greedy_tokens_are_transformers_likeliest_and_partings_are_recorded(
    models: Path, first: Seen, second: Seen
) -> None:
    for seen, name in ((first, "first"), (second, "second")):
        prefixes = [
            list(row.prompt_ids + row.tokens[:at])
            for row in seen.greedy.rows
            for at in (0, 7, len(row.tokens) - 1)
        ]
        truth = logprobs(models / name, prefixes)
        rows = iter(truth)
        for row in seen.greedy.rows:
            for at in (0, 7, len(row.tokens) - 1):
                p = next(rows)
                assert p[row.tokens[at]] == pytest.approx(p.max(), abs=1e-4)
                top = row.tops[at]
                assert top is not None
                assert top[0][1] == pytest.approx(p.max(), abs=1e-4)
    parted = [o for o in compare_greedy(first.greedy, second.greedy) if o.at is not None]
    assert [(row.name, row.at) for row in second.greedy.divergences] == [
        (o.name, o.at) for o in parted
    ]
    # Asked once more with a fresh salt, the same server says the same.
    assert all(one.position.kl < 1e-4 for one in second.same)
