"""The reader of TOML files: values as tomllib gives them, and the line of every key."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.errors import SpecError
from pytest_dsv41.window.source import MAX_BYTES, KeyPath, choices, dotted, read_toml

TEXT = """\
a.b."c d" = 1
[x.y] # comment ]
z = [ [1,2], # more ]
 {q = 1, r.s = "]}"}, \"\"\"m
l\"\"\"\"\" , 3]
[[arr]]
k = "#" # c
[[arr.sub]]
e = 1
[[arr.sub]]
e = '''x
''''
[arr.t]
u = true
[[arr]]
'lit.key' = -1.5e3
"""

LINES: dict[KeyPath, int] = {
    ("a",): 1,
    ("a", "b", "c d"): 1,
    ("x", "y"): 2,
    ("x", "y", "z", 0, 1): 3,
    ("x", "y", "z", 1, "r", "s"): 4,
    ("x", "y", "z", 2): 4,
    ("x", "y", "z", 3): 5,
    ("arr", 0): 6,
    ("arr", 0, "k"): 7,
    ("arr", 0, "sub", 0, "e"): 9,
    ("arr", 0, "sub", 1, "e"): 11,
    ("arr", 0, "t", "u"): 14,
    ("arr", 1): 15,
    ("arr", 1, "lit.key"): 16,
}


def paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    found: list[KeyPath] = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += paths(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            found += paths(inner, (*path, position))
    return found


def write(folder: Path, raw: bytes) -> Path:
    file = folder / "x.toml"
    file.write_bytes(raw)
    return file


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_every_key_has_its_line(tmp_path: Path, newline: str, bom: str) -> None:
    file = write(tmp_path, (bom + TEXT.replace("\n", newline)).encode())
    values, source = read_toml(file, "x.toml")
    assert values == tomllib.loads(TEXT)
    assert set(paths(values)) == set(source.lines)
    assert {path: source.line(path) for path in LINES} == LINES


def test_a_key_that_is_missing_has_the_line_of_the_table_around_it(tmp_path: Path) -> None:
    _, source = read_toml(write(tmp_path, TEXT.encode()), "x.toml")
    assert source.line(("arr", 0, "sub", 1, "nothing")) == 10
    assert source.line(("nothing",)) == 1
    assert str(source.error(("arr", 1, "lit.key"), "bad")) == "x.toml:16: arr[1].'lit.key': bad"


keys = st.text(st.sampled_from("ab-_1.\"'\\ #[]=é"), max_size=4)
leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.sampled_from("ab\"'\\#[]{},=\n\té"), max_size=8),
)
documents = st.dictionaries(
    keys,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_size=4,
)


def quoted(text: str, style: int) -> str:
    plain = text.isprintable() and "'" not in text
    if style == 1 and plain:
        return f"'{text}'"
    if style == 2 and "'''" not in text and not text.endswith("'") and "\r" not in text:
        return f"'''\n{text}'''"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    if style == 3:
        return f'"""\n{escaped}"""'
    return '"' + escaped.replace("\n", "\\n") + '"'


def rendered(value: Any, draw: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return quoted(value, draw(st.integers(0, 3)))
    if isinstance(value, list):
        gap = draw(st.sampled_from(["", " ", "\n", " # ]\n"]))
        return f"[{gap}" + f",{gap}".join(rendered(inner, draw) + gap for inner in value) + "]"
    pairs = (f"{quoted(key, draw(st.integers(0, 1)))} = {rendered(inner, draw)}"
             for key, inner in value.items())  # fmt: skip
    return "{" + ", ".join(pairs) + "}"


@settings(max_examples=150, deadline=None)
@given(document=documents, data=st.data())
def test_any_document_gives_each_key_path_the_line_on_which_it_begins(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], data: st.DataObject
) -> None:
    text = ""
    lines: dict[str, int] = {}
    for key, value in document.items():
        text += data.draw(st.sampled_from(["", "\n", "# c\n\n"]))
        lines[key] = text.count("\n") + 1
        text += f"{quoted(key, data.draw(st.integers(0, 1)))} = {rendered(value, data.draw)}\n"
    file = write(tmp_path_factory.mktemp("toml", numbered=True), text.encode())
    values, source = read_toml(file, "x.toml")
    assert values == document
    assert set(source.lines) == set(paths(document))
    assert {key: source.line((key,)) for key in document} == lines


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"a = 1\nb = \xff\n", "x.toml:2: not UTF-8 text (byte 10)"),
        (b"a = 1\nb = \n", "x.toml:2: invalid TOML: Invalid value"),
        (b"a = 1\na = 2\n", "x.toml:2: invalid TOML: a key is given twice"),
        (
            b"[a.b]\n[a.b]\n",
            "x.toml:2: invalid TOML: the table a.b is declared twice",
        ),
        (b"a = [1,\n", "x.toml:1: invalid TOML: "),
        (b"a = 1\n[t]\nb = nan\n", "x.toml:3: t.b: nan is not a finite number"),
        (b"a = [1, inf]\n", "x.toml:1: a[1]: inf is not a finite number"),
        (b"a = 9223372036854775808\n", "x.toml:1: a: the integer does not fit in 64 bits"),
        (b"a = 1979-05-27\n", "x.toml:1: a: dates and times are not used here; write a string"),
        (b"a = " + b"9" * 5000, "x.toml:1: invalid TOML: "),
        (b"a = " + b"[" * 40 + b"]" * 40, "x.toml:1: a[0][0]: nested too deeply; at most 32"),
        (b"a = " + b"[" * 100_000 + b"]" * 100_000, "x.toml:1: "),
        (b"#" * (MAX_BYTES + 1), f"x.toml: larger than {MAX_BYTES} bytes"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_what_is_refused_is_told_in_one_line(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_toml(write(tmp_path, raw), "x.toml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_only_a_readable_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in [
        ("fifo", "x: not a regular file"),
        (".", "x: not a regular file"),
        ("none", "x: no such file"),
        ("a\0b", "x: a name with a null character"),
    ]:
        with pytest.raises(SpecError) as caught:
            read_toml(tmp_path / name, "x")
        assert str(caught.value) == message


def test_key_paths_are_shown_as_a_file_writes_them() -> None:
    assert dotted(("cells", 0, "primary")) == "cells[0].primary"
    assert dotted(("arms", "a b", "args", 2)) == "arms.'a b'.args[2]"


def test_valid_names_are_listed_and_a_near_one_is_named_first() -> None:
    assert choices("cold", ["hot", "colt"]) == "; did you mean 'colt'?; valid: hot, colt"
    assert choices("x", []) == "; valid: none"
    many = [f"n{number}" for number in range(50)]
    assert choices("x", many).endswith("n38, n39 and 10 more")
