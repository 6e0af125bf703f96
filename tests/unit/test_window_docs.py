"""The page on the window file: its examples load, and it names every key with its default."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from pytest_dsv41.window import spec as module
from pytest_dsv41.window.spec import Limits, example_names, load_spec

PAGE = Path(__file__).parents[2] / "docs" / "window-file.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_example_on_the_page_loads(tmp_path: Path, number: int) -> None:
    (tmp_path / "target.toml").write_text('[target]\nkind = "local"\n')
    (tmp_path / "window.toml").write_text(BLOCKS[number], encoding="utf-8")
    assert load_spec(tmp_path / "window.toml", environ={}).decision_cells == ("decode-b1",)


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) >= 3


def section(title: str) -> str:
    start = TEXT.index(f"\n## `{title}`\n")
    end = TEXT.find("\n## ", start + 1)
    return TEXT[start : end if end > 0 else None]


def documented(title: str) -> dict[str, list[str]]:
    rows = (line.strip("| ").split(" | ") for line in section(title).splitlines())
    return {row[0].strip("`"): row[1:] for row in rows if re.fullmatch(r"`[a-z_]+`", row[0])}


TABLES: list[tuple[str, type[BaseModel]]] = [
    ("[window]", module._Window),
    ("[arms.NAME]", module._Arm),
    ("[[cells]]", module._Cell),
    ("[limits]", module._Limits),
    ("[variables.NAME]", module._Variable),
]


@pytest.mark.parametrize(("title", "model"), TABLES)
def test_the_page_names_every_key_of_a_table(title: str, model: type[BaseModel]) -> None:
    keys = set(documented(title)) - {"adjacent", "bracket", "none"}
    assert keys == set(model.model_fields)


def test_the_page_gives_the_limits_their_defaults() -> None:
    defaults = Limits().model_dump()
    for key, row in documented("[limits]").items():
        expected = "from the plan" if defaults[key] is None else f"`{defaults[key]:g}`"
        assert row[0] == expected


def required(title: str) -> Iterable[str]:
    return (key for key, row in documented(title).items() if "required" in row)


@pytest.mark.parametrize(("title", "model"), TABLES)
def test_the_page_says_which_keys_are_required(title: str, model: type[BaseModel]) -> None:
    fields = model.model_fields.items()
    assert set(required(title)) == {name for name, field in fields if field.is_required()}


def test_the_page_names_every_metric_and_kind() -> None:
    for word in (*module.METRICS, "candidate", "report", "admission", "adjacent", "bracket"):
        assert f"`{word}`" in TEXT
    assert "demo" in example_names()
