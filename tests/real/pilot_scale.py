"""The registered cells of the A/A pilot made small enough for a model on a processor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_dsv41.measure import corpus, seeded
from pytest_dsv41.measure.corpus import PACKAGED, Corpus
from pytest_dsv41.quality.bridge import BRIDGE_CELLS

SCALED = ("short", "32k-0", "32k-1", "32k-2", "32k-3")
TENTH = 10


def scale(folder: Path, monkeypatch: pytest.MonkeyPatch, characters: int) -> None:
    """Put short texts under the registered names, and ask for a tenth of each answer.

    The texts have so many characters, lie in `folder`, and are pinned nowhere.
    """
    folder.mkdir()
    packaged = Corpus.load(PACKAGED)
    cuts = {}
    for number, name in enumerate(SCALED):
        text = packaged.prompt(f"dist-short-{number + 20}").text[:characters]
        (folder / f"{name}.txt").write_text(text, "utf-8")
        cuts[name] = {"tokens": None, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "cuts.json").write_text(json.dumps(cuts), "utf-8")
    monkeypatch.setenv("DSV41_CORPUS", str(folder))
    for cells in (seeded.SEEDED_CELLS, BRIDGE_CELLS):
        for name, cell in list(cells.items()):
            monkeypatch.setitem(cells, name, replace(cell, max_tokens=cell.max_tokens // TENTH))
    pins: dict[str, str] = {}
    for module in (corpus, seeded):
        monkeypatch.setattr(module, "PROMPT_SHA256", pins)
