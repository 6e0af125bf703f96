"""KL references of a real vLLM beside transformers' whole distributions, both in float32.

Needs a Python with vLLM (and so with transformers), named by DSV41_VLLM_PYTHON:

    python3 -m venv vllm && vllm/bin/pip install vllm
    DSV41_VLLM_PYTHON=vllm/bin/python pytest -m slow tests/real/test_kl_vllm.py

Two models of two layers are made on the spot, the second is the first with its weights moved.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr
from test_quality_vllm import MODELS, PYTHON, serving

from pytest_dsv41.engines import get_engine
from pytest_dsv41.quality.reference import (
    KldRecording,
    KldWriter,
    Plan,
    TopkRecording,
    corpus_plan,
    plan_like,
    record_topk,
    score,
    score_topk,
    verify,
)
from tests.real_vllm import ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="set DSV41_VLLM_PYTHON to a Python with: pip install vllm"
    ),
]
LOGITS = """
import json, sys
import numpy, torch
from transformers import LlamaForCausalLM
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
rows = []
with torch.no_grad():
    for ids, start in json.load(sys.stdin):
        rows.append(model(torch.tensor([ids])).logits[0, start:-1].numpy())
numpy.save(sys.argv[2], numpy.concatenate(rows))
"""
N_VOCAB = 512


class Seen:
    """Two models: their whole distributions, dense recordings of these, and vLLM's lists."""

    def __init__(self, folder: Path) -> None:
        licence = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
        (folder / "text").write_text(licence)
        subprocess.run(
            [PYTHON, "-c", MODELS, str(folder), str(folder / "text")],
            check=True, env=ENVIRONMENT, timeout=300,
        )  # fmt: skip
        corpus = folder / "corpus.jsonl"
        parts = [licence[at : at + 400] for at in (1000, 3000, 5000)]
        corpus.write_text(
            "".join(
                json.dumps({"prompt": part, "source": f"part-{number}", "score_from": 4}) + "\n"
                for number, part in enumerate(parts)
            )
        )
        self.logp: dict[str, np.ndarray] = {}
        self.dense: dict[str, KldRecording] = {}
        self.lists: dict[str, TopkRecording] = {}
        plan: Plan | None = None
        for name in ("first", "second"):
            with serving(folder / name) as where:
                if plan is None:
                    plan = corpus_plan(
                        corpus,
                        lambda text, where=where: get_engine("vllm").tokenize(  # type: ignore[misc]
                            where.url, where.model, text
                        ),
                    )
                else:
                    plan = plan_like(self.dense["first"])
                record_topk(where, plan, folder / f"{name}-lists", deadline_s=600)
            given = json.dumps([[ids.tolist(), start] for _, ids, start in plan.documents])
            out = folder / f"{name}.npy"
            subprocess.run(
                [PYTHON, "-c", LOGITS, str(folder / name), str(out)],
                input=given, text=True, check=True, env=ENVIRONMENT, timeout=300,
            )  # fmt: skip
            self.logp[name] = log_softmax(np.load(out).astype(np.float64), axis=1)
            with KldWriter(
                folder / f"{name}-dense",
                model=name,
                corpus=plan.corpus,
                corpus_fnv1a64=plan.corpus_fnv1a64,
                n_vocab=N_VOCAB,
                documents=plan.documents,
            ) as writer:
                for row in self.logp[name].astype(np.float32):
                    writer.append(row)
                writer.finish()
            self.dense[name] = KldRecording(folder / f"{name}-dense")
            self.lists[name] = TopkRecording(folder / f"{name}-lists")

    @property
    def true(self) -> np.ndarray:
        """KL(first || second) of every row over the whole vocabulary."""
        found: np.ndarray = rel_entr(np.exp(self.logp["first"]), np.exp(self.logp["second"])).sum(
            axis=1
        )
        return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("kl-vllm"))


def test_the_dense_score_is_the_kl_of_the_whole_distributions(seen: Seen) -> None:
    assert verify(seen.dense["first"]) == verify(seen.dense["second"]) == []
    found = score(seen.dense["first"], seen.dense["second"])
    print(f"mean KL {seen.true.mean():.5f}, ours {found.kl.mean():.5f}, {len(found.kl)} rows")
    assert seen.true.mean() > 1e-3
    np.testing.assert_allclose(found.kl, seen.true, atol=1e-4, rtol=2e-3)
    agreed = seen.logp["first"].argmax(axis=1) == seen.logp["second"].argmax(axis=1)
    assert found.top1.tolist() == agreed.tolist()


def test_vllms_lists_are_the_heads_of_transformers_distributions(seen: Seen) -> None:
    for name, lists in seen.lists.items():
        assert verify(lists) == []
        top = lists.stored_top(0, lists.rows)
        truth = np.take_along_axis(seen.logp[name], top["id"].astype(np.intp), axis=1)
        np.testing.assert_allclose(top["logp"], truth, atol=1e-4)
        # The 20th is as likely as the true 20th, whichever of a near tie it is.
        twentieth = np.sort(seen.logp[name], axis=1)[:, -20]
        np.testing.assert_allclose(top["logp"][:, -1], twentieth, atol=1e-4)


def test_a_dense_reference_scores_the_server_never_above_the_whole_kl(seen: Seen) -> None:
    same = score_topk(seen.dense["first"], seen.lists["first"])
    assert same.scores.kl.max() < 1e-4
    other = score_topk(seen.dense["first"], seen.lists["second"])
    assert (other.scores.kl <= seen.true + 1e-4).all()
    assert other.scores.kl.mean() > 10 * same.scores.kl.mean()
    trusted = other.common_mass >= 0.99
    print(f"{trusted.mean():.3f} of the positions can be trusted; "
          f"{other.scores.kl.mean() / seen.true.mean():.3f} of the KL is seen")  # fmt: skip
    if trusted.any():
        np.testing.assert_allclose(
            other.scores.kl[trusted], seen.true[trusted], rtol=0.05, atol=2e-4
        )
