"""Recordings written as the formats say, by plain Python, to hold the package's own against."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

Documents = Sequence[tuple[str, list[int], int]]
"""(source, token ids, score_from)."""

CREATED = "2026-01-31T12:00:00Z"


def draw(seed: int, documents: Documents, n_vocab: int, spread: float = 3.0) -> np.ndarray:
    """Float32 log-probabilities of every row, from a seed."""
    rows = sum(len(ids) - 1 - start for _, ids, start in documents)
    logits = np.random.default_rng(seed).normal(0.0, spread, (rows, n_vocab))
    return log_softmax(logits, axis=1).astype(np.float32)


def following(documents: Documents) -> list[int]:
    return [ids[at + 1] for _, ids, start in documents for at in range(start, len(ids) - 1)]


def manifest(documents: Documents, n_vocab: int, **changed: Any) -> dict[str, Any]:
    docs, row0 = [], 0
    for source, ids, start in documents:
        docs.append({"source": source, "tokens": len(ids), "score_from": start, "row0": row0})
        row0 += len(ids) - 1 - start
    return {
        "format": "radiance-kld-1",
        "model": "small-bf16",
        "corpus": "/corpora/mixed.jsonl",
        "corpus_fnv1a64": "a9d62b33c18b3d9c",
        "created": CREATED,
        "n_vocab": n_vocab,
        "top": 16,
        "rows": row0,
        "docs": docs,
        **changed,
    }


def write_kld(folder: Path, documents: Documents, logp: np.ndarray, **changed: Any) -> Path:
    """A `radiance-kld-1` folder, every number by hand."""
    folder.mkdir()
    tokens = [token for _, ids, _ in documents for token in ids]
    (folder / "tokens.i32").write_bytes(struct.pack(f"<{len(tokens)}i", *tokens))
    with np.errstate(over="ignore"):
        (folder / "logp.f16").write_bytes(logp.astype("<f2").tobytes())
    top, rows = b"", b""
    for row, token in zip(logp.tolist(), following(documents), strict=True):
        best = sorted(range(len(row)), key=lambda at, row=row: (-row[at], at))[:16]
        top += b"".join(struct.pack("<if", at, row[at]) for at in best)
        entropy = -math.fsum(math.exp(value) * value for value in row if value > -700)
        rows += struct.pack("<ff", -row[token], entropy)
    (folder / "top.bin").write_bytes(top)
    (folder / "rows.f32").write_bytes(rows)
    text = json.dumps(manifest(documents, logp.shape[1], **changed), indent=1, ensure_ascii=False)
    (folder / "kld.json").write_text(text + "\n", encoding="utf-8")
    return folder


def write_base(path: Path, chunks: list[list[int]], logp: np.ndarray, *, pad: bool = True) -> Path:
    """A llama.cpp base file: 16 below the largest log-probability is the floor."""
    n_ctx, n_vocab = len(chunks[0]), logp.shape[1]
    data = b"_logits_" + struct.pack("<iii", n_ctx, n_vocab, len(chunks))
    data += b"".join(struct.pack(f"<{n_ctx}i", *chunk) for chunk in chunks)
    for row in logp.astype(np.float64):
        low = max(row.min(), row.max() - 16.0)
        scale = np.float32((row.max() - low) / 65535)
        data += struct.pack("<ff", scale, low)
        values = [0 if value <= low else round((value - low) / float(scale)) for value in row]
        data += struct.pack(f"<{n_vocab}H", *(min(value, 65535) for value in values))
        if pad and n_vocab % 2:
            data += b"\xff\xff"
    path.write_bytes(data)
    return path


def expected_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The formula of FORMATS on two recordings' float32 values, in double, row by row."""
    found = []
    for left, right in zip(stored(p), stored(q), strict=True):
        lq = log_softmax(right)
        mass = np.exp(left)
        total = math.fsum(mass)
        cross = math.fsum(mass * (left - lq))
        found.append(cross / total - math.log(total))
    return np.array(found)


def stored(logp: np.ndarray) -> np.ndarray:
    """What a folder keeps of float32 values: float16, and the 16 likeliest exactly."""
    kept = logp.astype(np.float16).astype(np.float64)
    for row, exact in zip(kept, logp, strict=True):
        best = np.argsort(-exact, kind="stable")[:16]
        row[best] = exact[best]
    return kept
