"""A llama.cpp base file written again as a `radiance-kld-1` reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pytest_dsv41.errors import UsageError
from pytest_dsv41.quality.reference.kld import KldWriter
from pytest_dsv41.quality.reference.llamacpp import BaseFile
from pytest_dsv41.quality.reference.manifest import Manifest, fingerprint

__all__ = ["convert"]


def convert(
    base: BaseFile,
    folder: Path,
    text: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Record `base` into `folder`; each chunk becomes a document.

    `text` is the file that was given to `llama-perplexity -f`: its name and fingerprint go into
    the manifest. Tokens below a row's floor are recorded with the probability 0, as nothing is
    known of them; a next token among them has the floor's negative log-likelihood.

    Raises:
        UsageError: the folder holds something, the disk has no room, or `text` is no file.
        MeasurementRefused: the base file is damaged.
    """
    if text.exists() and not text.is_file():
        raise UsageError(f"{text}: not a regular file")
    with text.open("rb") as lines:
        corpus = fingerprint(lines)
    documents = []
    first = 0
    for document in base.documents:
        ids = base.tokens[first : first + document.tokens]
        documents.append((document.source or text.stem, ids, document.score_from))
        first += document.tokens
    writer = KldWriter(
        folder,
        model=base.model,
        corpus=str(text),
        corpus_fnv1a64=corpus,
        n_vocab=base.n_vocab,
        documents=documents,
    )
    every = np.arange(base.n_vocab)[None]
    with writer, base.reader() as reader:
        for row in range(base.rows):
            block = reader.read(row, 1)
            logp, mass = (values[0] for values in block.stored(every))
            logp = np.where(mass > 0, logp, -np.inf)
            writer.append(logp.astype(np.float32), nll=float(block.nll[0]))
            if progress is not None:
                progress(row + 1, base.rows)
        return writer.finish()
