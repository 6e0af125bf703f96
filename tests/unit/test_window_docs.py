"""The page on the window file and its JSON schema say what the reader does."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from pytest_dsv41.measure.cell import Sampling
from pytest_dsv41.window import spec as module
from pytest_dsv41.window.spec import Limits, example_names, load_spec

PAGE = Path(__file__).parents[2] / "docs" / "window-file.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_example_on_the_page_loads(tmp_path: Path, number: int) -> None:
    (tmp_path / "target.toml").write_text('[target]\nkind = "local"\n')
    (tmp_path / "window.toml").write_text(BLOCKS[number], encoding="utf-8")
    (cell,) = load_spec(tmp_path / "window.toml", environ={}).decision_cells
    assert cell in ("decode-b1", "seeded-demo-b1")


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) >= 3


def section(title: str) -> str:
    start = TEXT.index(f"\n## `{title}`\n")
    end = TEXT.find("\n## ", start + 1)
    return TEXT[start : end if end > 0 else None]


def documented(title: str) -> dict[str, list[str]]:
    rows = (line.strip("| ").split(" | ") for line in section(title).splitlines())
    return {row[0].strip("`"): row[1:] for row in rows if re.fullmatch(r"`[a-z0-9_]+`", row[0])}


QUALITY = '[[cells]]` with `role = "quality"'
THROUGHPUT = '[[gates]]` with `kind = "throughput"'
KL_GATE = '[[gates]]` with `kind = "kl"'
TABLES: list[tuple[str, type[BaseModel]]] = [
    ("[window]", module._Window),
    ("[arms.NAME]", module._Arm),
    ("[[cells]]", module._Cell),
    (QUALITY, module._Quality),
    (THROUGHPUT, module._ThroughputGate),
    (KL_GATE, module._KlGate),
    ("[pilot]", module._Pilot),
    ("[[claims]]", module._Claim),
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
    for field in dataclasses.fields(Sampling):
        assert f"`{field.name}`" in section("[[cells]]")
    for word in (*module.METRICS, "candidate", "report", "admission", "adjacent", "bracket"):
        assert f"`{word}`" in TEXT
    assert "demo" in example_names()


# -- the JSON schema for editors -------------------------------------------------------------------

FOLDER = Path(module.__file__).parent
SCHEMA: dict[str, Any] = json.loads((FOLDER / "schemas" / "window-v1.json").read_text())


def tables() -> dict[str, dict[str, Any]]:
    inside = SCHEMA["properties"]
    return {
        "[window]": inside["window"],
        "[arms.NAME]": inside["arms"]["additionalProperties"],
        "[[cells]]": inside["cells"]["items"]["else"],
        QUALITY: inside["cells"]["items"]["then"],
        THROUGHPUT: inside["gates"]["items"]["else"],
        KL_GATE: inside["gates"]["items"]["then"],
        "[pilot]": inside["pilot"],
        "[[claims]]": inside["claims"]["items"],
        "[limits]": inside["limits"],
        "[variables.NAME]": inside["variables"]["additionalProperties"],
    }


@pytest.mark.parametrize(("title", "model"), TABLES)
def test_the_schema_has_the_keys_of_the_reader(title: str, model: type[BaseModel]) -> None:
    table = tables()[title]
    assert table["additionalProperties"] is False
    assert set(table["properties"]) == set(model.model_fields)
    fields = model.model_fields.items()
    needed = {name for name, field in fields if field.is_required()}
    assert set(table.get("required", ())) == needed
    for name, entry in table["properties"].items():
        if "default" in entry:
            assert entry["default"] == model.model_fields[name].get_default()


def test_the_schema_has_the_tables_of_the_reader() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == set(module._TOP)
    sampling = tables()["[[cells]]"]["properties"]["sampling"]["properties"]
    assert list(sampling) == [field.name for field in dataclasses.fields(Sampling)]


SHIPPED = [*sorted((FOLDER / "examples").glob("*.toml")), FOLDER / "templates" / "window.toml"]


@pytest.mark.parametrize("text", [*BLOCKS, *(path.read_text() for path in SHIPPED)])
def test_what_the_reader_accepts_fits_the_schema(text: str) -> None:
    jsonschema.validate({"target": "target.toml", **tomllib.loads(text)}, SCHEMA)


@pytest.mark.parametrize(
    ("old", "new"),
    [('role = "control"', 'role = "x"'), ("[limits]", "[limit]"), ("decision = true", "decison=1")],
)
def test_what_the_reader_refuses_does_not_fit_the_schema(old: str, new: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(BLOCKS[0].replace(old, new)), SCHEMA)
