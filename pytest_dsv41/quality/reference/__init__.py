"""KL references: recordings of a model's own distribution, and a candidate scored against them.

`manifest` says what a `recording` holds; `kld` (`radiance-kld-1`) and `llamacpp` (base files) are
the two dense formats over `dense`; `topk` (`dsv41-topk-1`) keeps the likeliest tokens alone, and
`record` makes one from a server. `score` streams the KL of one against another, `report` writes it,
`gate` judges it; `verify` reads a recording whole; `convert` turns a base file into a reference.
"""

from __future__ import annotations

from pathlib import Path

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.convert import convert
from pytest_dsv41.quality.reference.dense import Dense
from pytest_dsv41.quality.reference.gate import Limits, judge, left_shape, read_receipt
from pytest_dsv41.quality.reference.kld import KldRecording, KldWriter
from pytest_dsv41.quality.reference.llamacpp import BaseFile
from pytest_dsv41.quality.reference.manifest import Document, Manifest, fingerprint
from pytest_dsv41.quality.reference.record import Plan, corpus_plan, plan_like, record_topk
from pytest_dsv41.quality.reference.recording import Recording
from pytest_dsv41.quality.reference.report import (
    build_report,
    read_report,
    rows_path,
    write_report,
)
from pytest_dsv41.quality.reference.score import Scores, score
from pytest_dsv41.quality.reference.topk import TopkRecording, TopkScores, TopkWriter, score_topk
from pytest_dsv41.quality.reference.verify import verify

__all__ = [
    "BaseFile",
    "Dense",
    "Document",
    "KldRecording",
    "KldWriter",
    "Limits",
    "Manifest",
    "Plan",
    "Recording",
    "Scores",
    "TopkRecording",
    "TopkScores",
    "TopkWriter",
    "build_report",
    "convert",
    "corpus_plan",
    "fingerprint",
    "judge",
    "left_shape",
    "open_recording",
    "plan_like",
    "read_receipt",
    "read_report",
    "record_topk",
    "rows_path",
    "score",
    "score_topk",
    "verify",
    "write_report",
]


def open_recording(path: Path, *, model: str = "") -> KldRecording | BaseFile | TopkRecording:
    """Open a recording by what it is: a folder of one of the two formats, or a base file.

    `model` names what a base file does not say of itself.

    Raises:
        MeasurementRefused: it is damaged; see the classes. Kind `unfinished`: a folder without
            either manifest.
    """
    if path.is_file():
        return BaseFile(path, model=model)
    if (path / "topk.json").exists():
        return TopkRecording(path)
    if path.is_dir() and not (path / "kld.json").exists():
        raise MeasurementRefused(
            "unfinished",
            f"{path}: has no kld.json and no topk.json: no recording, or one that did not end",
        )
    return KldRecording(path)
