"""Shipped cells have one name, `cells/…`, also where the package lies outside of pytest's root."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def collected(folder: Path, *words: str) -> list[str]:
    """The node ids of the window `demo` with `words`, collected in a foreign folder."""
    window = ["--window=demo", f"--rootdir={folder}", "--co", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *window, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_a_node_id_that_was_printed_selects_its_item(tmp_path: Path) -> None:
    names = collected(tmp_path)
    assert len(names) == 48
    assert names[0] == "cells/test_decode.py::test_decode[K1-decode-b1-r0]"
    assert "cells/test_prefill.py::test_prefill[I2-prefill-b1-r2]" in names
    assert collected(tmp_path, names[5], names[0]) == [names[0], names[5]]


@pytest.mark.parametrize(
    ("word", "count"), [("cells/test_prefill.py", 12), ("cells/test_decode.py::test_decode", 36)]
)
def test_a_module_or_function_selects_its_items(word: str, count: int, tmp_path: Path) -> None:
    assert len(collected(tmp_path, word)) == count


@pytest.mark.slow
def test_another_name_selects_nothing(tmp_path: Path) -> None:
    assert collected(tmp_path, "cells/test_nothing.py") == []
