"""KL references: recordings of a model's own distribution, and a candidate scored against them.

`manifest` says what a recording holds; `kld` (`radiance-kld-1`) and `llamacpp` (base files) are the
two dense formats over `dense`; `score` streams the KL of one against another, `report` writes it,
`gate` judges it; `verify` reads a recording whole; `convert` turns a base file into a reference.
"""

from __future__ import annotations

from pathlib import Path

from pytest_dsv41.quality.reference.convert import convert
from pytest_dsv41.quality.reference.dense import Dense
from pytest_dsv41.quality.reference.gate import Limits, judge, left_shape, read_receipt
from pytest_dsv41.quality.reference.kld import KldRecording, KldWriter
from pytest_dsv41.quality.reference.llamacpp import BaseFile
from pytest_dsv41.quality.reference.manifest import Document, Manifest, fingerprint
from pytest_dsv41.quality.reference.report import build_report, read_report, write_report
from pytest_dsv41.quality.reference.score import Scores, score
from pytest_dsv41.quality.reference.verify import verify

__all__ = [
    "BaseFile",
    "Dense",
    "Document",
    "KldRecording",
    "KldWriter",
    "Limits",
    "Manifest",
    "Scores",
    "build_report",
    "convert",
    "fingerprint",
    "judge",
    "left_shape",
    "open_dense",
    "read_receipt",
    "read_report",
    "score",
    "verify",
    "write_report",
]


def open_dense(path: Path, *, model: str = "") -> Dense:
    """Open a dense recording: a `radiance-kld-1` folder, or a llama.cpp base file.

    `model` names what a base file does not say of itself.

    Raises:
        MeasurementRefused: it is damaged; see `KldRecording` and `BaseFile`.
    """
    return BaseFile(path, model=model) if path.is_file() else KldRecording(path)
