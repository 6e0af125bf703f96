"""`dsv41-topk-1`: lists of the likeliest tokens on disk, scored, and what they cannot see."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_files import CREATED, Documents, draw, following, manifest, write_base, write_kld
from scipy.special import log_softmax, rel_entr

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.reference import (
    TopkRecording,
    TopkWriter,
    corpus_plan,
    fingerprint,
    open_recording,
    plan_like,
    score_topk,
    verify,
)

DOCS: Documents = [("wiki", [3, 1, 4, 1, 5, 9], 2), ("code", [2, 6, 5, 3], 0)]
ROWS, TOP_N = 6, 5
FACTS = {
    "engine": "vllm",
    "version": "0.33.0",
    "conditions": {"cache": "cached", "concurrency": 1},
}


def best(row: np.ndarray, top_n: int = TOP_N) -> list[tuple[int, float]]:
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))[:top_n]
    return [(at, values[at]) for at in order]


def drawn(seed: int, spread: float = 3.0) -> np.ndarray:
    """Rows of 40 tokens; in every other one the next token is among the likeliest."""
    logp = draw(seed, DOCS, 40, spread).astype(np.float64)
    for row, token in enumerate(following(DOCS)):
        if row % 2 == 0:
            logp[row, token] = logp[row].max() - 0.1
    return log_softmax(logp, axis=1).astype(np.float32)


def write_by_hand(folder: Path, logp: np.ndarray, **changed: Any) -> Path:
    folder.mkdir()
    tokens = [token for _, ids, _ in DOCS for token in ids]
    (folder / "tokens.i32").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    top, rows, seen, masses = b"", b"", 0, []
    for row, token in zip(logp, following(DOCS), strict=True):
        entries = best(row)
        top += b"".join(struct.pack("<if", *entry) for entry in entries)
        masses.append(sum(math.exp(value) for _, value in entries))
        known = dict(entries).get(token)
        seen += known is not None
        rows += struct.pack("<ff", math.nan if known is None else -known, masses[-1])
    (folder / "top.bin").write_bytes(top)
    (folder / "rows.f32").write_bytes(rows)
    fields = manifest(DOCS, 0)
    said = {
        **{key: fields[key] for key in ("model", "corpus", "corpus_fnv1a64", "created")},
        "format": "dsv41-topk-1",
        **FACTS,
        "top_n": TOP_N,
        "cannot_see": [
            "the distribution below the 5 likeliest tokens, "
            f"{100 * (1 - np.mean(masses)):.2f} % of the mass on average: a KL from it is a lower "
            "bound",
            f"the next token's likelihood in {6 - seen} of 6 positions, where it is not among the "
            "5: perplexities leave these out",
        ],
        "rows": 6,
        "docs": fields["docs"],
        **changed,
    }
    said = {"format": said.pop("format"), **said}
    (folder / "topk.json").write_text(json.dumps(said, indent=1) + "\n")
    return folder


def writer(folder: Path, top_n: int = TOP_N, **facts: Any) -> TopkWriter:
    return TopkWriter(
        folder,
        model="small-bf16",
        corpus="/corpora/mixed.jsonl",
        corpus_fnv1a64="a9d62b33c18b3d9c",
        top_n=top_n,
        documents=DOCS,
        facts={**FACTS, **facts},
        created=CREATED,
    )


def record(folder: Path, logp: np.ndarray, top_n: int = TOP_N, **facts: Any) -> TopkRecording:
    with writer(folder, top_n, **facts) as own:
        for row in logp:
            own.append(tuple(best(row, top_n)))
        own.finish()
    return TopkRecording(folder)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_recording_is_written_as_the_format_says_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("topk")
    logp = drawn(seed)
    by_hand = write_by_hand(tmp_path / "hand", logp)
    record(tmp_path / "own", logp)
    for name in ("topk.json", "tokens.i32", "top.bin"):
        assert (tmp_path / "own" / name).read_bytes() == (by_hand / name).read_bytes(), name
    # A mass is a sum: its last bit depends on the order. NaN marks what was not seen.
    np.testing.assert_allclose(
        np.fromfile(tmp_path / "own" / "rows.f32", "<f4"),
        np.fromfile(by_hand / "rows.f32", "<f4"),
        rtol=3e-7,
    )
    assert verify(open_recording(by_hand)) == []


def test_the_kl_is_that_of_the_shared_tokens_and_the_rest(tmp_path: Path) -> None:
    """By the formula of RULES section 4, term by term, and never above the whole KL."""
    p = drawn(1)
    q = log_softmax(p + np.random.default_rng(2).normal(0, 0.5, p.shape), axis=1)
    q = q.astype(np.float32)
    found = score_topk(record(tmp_path / "p", p), record(tmp_path / "q", q))
    whole = rel_entr(np.exp(p.astype(float)), np.exp(q.astype(float))).sum(axis=1)
    for row in range(ROWS):
        left, right = dict(best(p[row])), dict(best(q[row]))
        shared = left.keys() & right.keys()
        ps, qs = (sum(math.exp(one[token]) for token in shared) for one in (left, right))
        kl = sum(math.exp(left[token]) * (left[token] - right[token]) for token in shared)
        kl += (1 - ps) * math.log((1 - ps) / (1 - qs))
        assert found.scores.kl[row] == pytest.approx(max(0.0, kl), rel=1e-5, abs=1e-9)
        assert found.scores.kl[row] <= whole[row] + 1e-6
        assert found.common_mass[row] == pytest.approx(min(ps, qs), rel=1e-6)
    assert found.scores.top1.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    at = (np.arange(ROWS), following(DOCS))
    seen = np.array([token in dict(best(row)) for row, token in zip(p, at[1], strict=True)])
    assert 0 < seen.sum() < ROWS
    assert np.isnan(found.scores.reference_nll).tolist() == (~seen).tolist()
    assert np.array_equal(found.scores.reference_nll[seen], -p[at][seen])


def test_a_dense_reference_gives_its_likeliest_sixteen(tmp_path: Path) -> None:
    p = draw(1, DOCS, 40)
    q = log_softmax(p + np.random.default_rng(2).normal(0, 0.5, p.shape), axis=1)
    q = q.astype(np.float32)
    dense = open_recording(write_kld(tmp_path / "dense", DOCS, p))
    against_dense = score_topk(dense, record(tmp_path / "q", q, 20))  # type: ignore[arg-type]
    lists = score_topk(record(tmp_path / "p", p, 16), record(tmp_path / "q16", q, 16))
    assert against_dense.top_n == 16
    assert np.array_equal(against_dense.scores.kl, lists.scores.kl)
    # A dense recording knows every next token.
    assert np.isfinite(against_dense.scores.reference_nll).all()


def test_what_was_recorded_in_another_way_is_refused(tmp_path: Path) -> None:
    p = draw(1, DOCS, 40)
    one = record(tmp_path / "p", p)
    other = record(tmp_path / "q", p, conditions={"cache": "cold", "concurrency": 1})
    with pytest.raises(
        MeasurementRefused, match=r"q was recorded with cache cold, .*p with cache cached"
    ) as caught:
        score_topk(one, other)
    assert caught.value.kind == "conditions"


# -- damaged --------------------------------------------------------------------------------------


def change(**fields: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        value = {**json.loads((folder / "topk.json").read_text()), **fields}
        (folder / "topk.json").write_text(json.dumps(value))

    return act


def put(name: str, offset: int, data: bytes) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[offset : offset + len(data)] = data
        (folder / name).write_bytes(raw)

    return act


DAMAGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "unfinished": (lambda f: (f / "topk.json").unlink(), "unfinished", "has no kld.json"),
    "top_n": (change(top_n=0), "manifest", "top_n: 0; an integer of at least 1"),
    "another-top_n": (change(top_n=6), "size", "top.bin: 240 bytes, too short: 6 rows of 6"),
    "conditions": (change(conditions=None), "manifest", "conditions: is missing or no table"),
    "rows": (change(rows=5), "rows", "rows: 5; its documents add up to 6"),
    "short": (lambda f: (f / "rows.f32").write_bytes(b""), "size", "rows.f32: 0 bytes, too short"),
    "token": (put("tokens.i32", 8, struct.pack("<i", -7)), "tokens", "token 2 is -7"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, kind, message = DAMAGED[name]
    folder = write_by_hand(tmp_path / "ref", draw(1, DOCS, 40))
    damage(folder)
    with pytest.raises(MeasurementRefused, match=message) as caught:
        open_recording(folder)
    assert caught.value.kind == kind


LISTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "nan": (put("top.bin", 8 * 5 + 4, struct.pack("<f", np.nan)), "nan", "row 1 .*nan"),
    "twice": (
        lambda f: put("top.bin", 8, (f / "top.bin").read_bytes()[:4])(f), "duplicate-id", "row 0",
    ),
    "empty": (put("top.bin", 80, struct.pack("<if", -1, -np.inf) * 5), "empty", "row 2"),
    "zeros": (
        put("top.bin", 120, b"".join(struct.pack("<if", at, 0.0) for at in range(5))),
        "all-zero", "row 3",
    ),
    "mass": (put("top.bin", 4, struct.pack("<f", -0.0001) ), "mass", "row 0 .*add up to"),
    "nll": (put("rows.f32", 8, struct.pack("<f", np.inf)), "nll", "row 1 .*likelihood is inf"),
    "nll below 0": (put("rows.f32", 16, struct.pack("<f", -1.0)), "nll", "row 2 .*is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_damaged_list_is_refused_by_name_and_found_by_a_full_read(
    tmp_path: Path, name: str
) -> None:
    damage, kind, message = LISTS[name]
    whole = record(tmp_path / "whole", draw(2, DOCS, 40))
    folder = write_by_hand(tmp_path / "ref", draw(1, DOCS, 40))
    damage(folder)
    with pytest.raises(MeasurementRefused, match=message) as caught:
        score_topk(whole, TopkRecording(folder))
    assert caught.value.kind == kind
    (line,) = verify(open_recording(folder))
    assert line.startswith("row ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put("rows.f32", 4, struct.pack("<f", 0.2)), "rows.f32: a mass of 0.2"),
        (put("rows.f32", 0, struct.pack("<f", 77.0)), "rows.f32: a negative log-likelihood of 77"),
        (
            lambda f: put(
                "top.bin", 0, (f / "top.bin").read_bytes()[8:16] + (f / "top.bin").read_bytes()[:8]
            )(f),
            "top.bin: not the likeliest first",
        ),
    ],
)
def test_a_full_read_finds(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = write_by_hand(tmp_path / "ref", draw(1, DOCS, 40))
    damage(folder)
    (line,) = verify(open_recording(folder))
    assert message in line


def test_a_short_list_is_filled_up_with_nothing(tmp_path: Path) -> None:
    with writer(tmp_path / "ref") as own:
        for _ in range(ROWS):
            own.append(((7, math.log(0.75)), (1, math.log(0.25))))
        own.finish()
    recording = TopkRecording(tmp_path / "ref")
    assert recording.stored_top(0, 1)["id"].tolist() == [[7, 1, -1, -1, -1]]
    assert verify(recording) == []
    assert (score_topk(recording, recording).scores.kl == 0).all()


# -- the command, and the report ------------------------------------------------------------------


def test_the_report_says_what_the_lists_cannot_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p = drawn(1, 6.0)
    q = drawn(1, 5.9)
    record(tmp_path / "p", p)
    record(tmp_path / "q", q)
    out = tmp_path / "r.json"
    words = ["kl", "score", str(tmp_path / "p"), str(tmp_path / "q"), "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "cannot see the distribution below the 5 likeliest tokens" in shown
    said = json.loads(out.read_text())
    found = score_topk(TopkRecording(tmp_path / "p"), TopkRecording(tmp_path / "q"))
    assert said["topk"]["top_n"] == 5
    assert said["topk"]["trusted_share"] == np.mean(found.common_mass >= 0.99)
    known = np.isfinite(found.scores.reference_nll) & np.isfinite(found.scores.candidate_nll)
    assert said["topk"]["next_token_seen"] == known.sum()
    rows = np.fromfile(f"{out}.rows", "<f4").reshape(-1, 4)
    assert np.array_equal(rows[:, 0], found.scores.kl)
    assert (np.isnan(rows[:, 1]) | np.isnan(rows[:, 2])).tolist() == (~known).tolist()
    ppl = said["all"]["ppl"]
    assert ppl["reference"] == pytest.approx(
        math.exp(found.scores.reference_nll[known].astype(float).mean()), rel=1e-6
    )
    spec = tmp_path / "gate.toml"
    spec.write_text("mean_kl_max = 10\ntop1_min = 0\ntrusted_share_min = 1\n")
    expected = 0 if said["topk"]["trusted_share"] == 1 else 2
    assert main(["kl", "gate", str(out), "--spec", str(spec)]) == expected
    assert main(["kl", "verify", str(tmp_path / "p")]) == 0
    assert "whole: 6 rows of the 5 likeliest tokens" in capsys.readouterr().out


def test_a_next_token_that_no_list_holds_gives_no_perplexity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "pq":
        with writer(tmp_path / name) as own:
            for _ in range(ROWS):
                own.append(((30, math.log(0.75)), (31, math.log(0.25))))
            own.finish()
    out = tmp_path / "r.json"
    words = ["kl", "score", str(tmp_path / "p"), str(tmp_path / "q"), "--out", str(out)]
    assert main(words) == 0
    assert "perplexities not seen" in capsys.readouterr().out
    ppl = json.loads(out.read_text())["all"]["ppl"]
    assert ppl == {"candidate": None, "reference": None, "ratio": None}
    assert main(["kl", "gate", str(out)]) == 0
    (tmp_path / "gate.toml").write_text("ppl_ratio_max = 2\n")
    assert main(["kl", "gate", str(out), "--spec", str(tmp_path / "gate.toml")]) == 2
    assert "not seen" in capsys.readouterr().out


def test_lists_and_base_files_are_not_set_against_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "p", draw(1, DOCS, 40))
    chunk = [[1, 2, 3, 4, 5, 6]]
    base = write_base(tmp_path / "a.base", chunk, draw(1, [("", chunk[0], 3)], 40))
    words = ["kl", "score", str(tmp_path / "p"), str(base), "--out", str(tmp_path / "r.json")]
    assert main(words) == 4
    assert "a base file keeps no lists" in capsys.readouterr().err
    with pytest.raises(UsageError, match="keeps no lists"):
        plan_like(open_recording(base))


# -- the corpus -----------------------------------------------------------------------------------


def tokens_of(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_a_corpus_line_is_a_document_and_the_fingerprint_is_of_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [
        b'{"prompt": "abcd", "source": "wiki", "score_from": 2}\n', b"\n", b'{"prompt": "xyz"}',
    ]  # fmt: skip
    path.write_bytes(b"".join(lines))
    plan = corpus_plan(path, tokens_of)
    assert [(source, ids.tolist(), start) for source, ids, start in plan.documents] == [
        ("wiki", [97, 98, 99, 100], 2),
        ("", [120, 121, 122], 0),
    ]
    assert plan.rows == 1 + 2
    assert plan.corpus_fnv1a64 == fingerprint([b"".join(line.strip(b"\n") for line in lines)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "corpus.jsonl:2: is not JSON"),
        ('["prompt"]', "corpus.jsonl:2: has no text 'prompt'"),
        ('{"source": "a"}', "corpus.jsonl:2: has no text 'prompt'"),
        ('{"prompt": "abc", "source": 3}', "corpus.jsonl:2: source: 3 is no text"),
        ('{"prompt": "abc", "score_from": -1}', "corpus.jsonl:2: score_from: -1; an integer"),
        ('{"prompt": "abc", "score_from": true}', "corpus.jsonl:2: score_from: True"),
        (
            '{"prompt": "ab\\ud800"}',
            r"corpus.jsonl:2: prompt: character 3 is \\ud800, half of a surrogate pair",
        ),
        (
            '{"prompt": "abc", "source": "\\udfff"}',
            r"corpus.jsonl:2: source: character 1 is \\udfff, half of",
        ),
        ('{"prompt": "abc", "score_from": 2}', "corpus.jsonl:2: 3 tokens leave nothing to score"),
    ],
)
def test_a_wrong_corpus_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        corpus_plan(path, tokens_of)
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no documents"):
        corpus_plan(path, tokens_of)
