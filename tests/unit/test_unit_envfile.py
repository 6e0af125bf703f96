"""A variant of an environment file: the changed values, and every other byte as it was."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.errors import UsageError
from pytest_dsv41.unit.envfile import variant
from pytest_dsv41.unit.unitfile import parse_environment_file

NAMES = st.sampled_from(["A", "KV", "KV_TYPE", "_X", "MODEL_FILE"])
VALUES = st.text(
    st.characters(codec="utf-8", exclude_characters="'\\", exclude_categories=("Cc", "Cs")),
    max_size=20,
)
OTHER = st.sampled_from(
    ["", "# a comment", "OTHER=1", "export PATH=/bin:$PATH", "B='two words'", 'C="a # b"', "; old"]
)


def changed(text: str, changes: dict[str, str], *, sourced: bool = True) -> str:
    done = variant(text.encode(), changes, header="h", where="serve.env", sourced=sourced)
    return done.decode()


@settings(max_examples=60, deadline=None)
@given(st.lists(OTHER), st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_every_other_line_stays(
    others: list[str], before: dict[str, str], changes: dict[str, str]
) -> None:
    lines = [*others, *(f"{name}='{value}'" for name, value in before.items())]
    text = "\n".join(lines) + "\n"
    after = changed(text, changes).split("\n")
    assert after[0] == "# h"
    kept = [line for line in text.split("\n") if line.partition("=")[0] not in changes]
    assert [line for line in after[1:] if line.partition("=")[0] not in changes] == kept
    assert {line.partition("=")[0] for line in after} >= changes.keys()


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=1))
def test_a_shell_reads_the_values_that_were_asked_for(changes: dict[str, str]) -> None:
    text = changed("# served\nKV=f16\nexport A=1\nOTHER=kept\n", changes)
    names = [*changes, "OTHER"]
    done = subprocess.run(
        ["sh", "-c", "set -a; . /dev/stdin; exec env -0"],
        input=text.encode(),
        capture_output=True,
        check=True,
    )
    read = dict(word.partition("=")[::2] for word in done.stdout.decode().split("\0") if word)
    assert {name: read[name] for name in names} == {**changes, "OTHER": "kept"}


def test_a_line_is_changed_in_its_place() -> None:
    # What is derived from a value further down follows it.
    text = 'KV=f16\nARGS="--kv $KV"\n'
    assert changed(text, {"KV": "q8_0"}) == '# h\nKV=q8_0\nARGS="--kv $KV"\n'
    assert changed("export KV=f16\n", {"KV": "q8_0"}) == "# h\nexport KV=q8_0\n"
    assert changed("KVX=1", {"KV": "q8_0"}) == "# h\nKVX=1\nKV=q8_0\n"
    assert changed("", {}) == "# h\n"


@pytest.mark.parametrize(
    ("text", "changes", "told"),
    [
        ("A=1\nB=2\nA=3\n", {"A": "4"}, "serve.env:3: A is assigned here and in line 1"),
        ("A=1 \\\n2\n", {"A": "4"}, "serve.env:1: A goes on over several lines"),
        ("A='1\n2'\n", {"A": "4"}, "serve.env:1: A goes on over several lines"),
        ("", {"A B": "1"}, "no environment name"),
        ("", {"A": "it's"}, "no single quote"),
        ("", {"A": "a\nb"}, "control character"),
    ],
)
def test_what_two_readers_could_take_for_different_things_is_refused(
    text: str, changes: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        changed(text, changes)


def test_a_value_over_several_lines_may_stay() -> None:
    text = "LONG='1\n2'\nKV=f16\n"
    assert changed(text, {"KV": "q8_0"}) == "# h\nLONG='1\n2'\nKV=q8_0\n"


# Each as it is read: what of it is an assignment of KV, and what only looks like one.
FILES = [
    "LONG='1\nKV=no\n2'\nKV=f16\n",
    'LONG="1\nKV=no\n\\"2"\nKV=f16\n',
    "LONG=1\\\nKV=no\nKV=f16\n",
    "OTHER=1 # the model's own\nKV=f16\n",
    "OTHER=it's\nKV=f16\n# don't\n",
    "; an old one's\nKV=f16\n",
    "KV=f16 # it's small\nOTHER=1\n",
    "KV=f16\r\nOTHER=1\r\n",
    "KV='f16'\nOTHER='\u00fcber \u2028 x'",
    "OTHER=a#'b\nKV=f16\n'\n",
    "OTHER=1",
    "LONG='1\nKV=no\n2'",
    "LONG='1\nKV=no\n",
    "LONG=1\\",
    "# a comment's backslash \\\nKV=f16\n",
]


@pytest.mark.parametrize("text", FILES)
def test_systemd_reads_the_change_and_everything_else_as_it_was(text: str) -> None:
    before = parse_environment_file(text.encode())
    try:
        after = parse_environment_file(changed(text, {"KV": "q8_0"}, sourced=False).encode())
    except UsageError:
        # Only what cannot be closed is refused.
        assert parse_environment_file(f"{text}\nKV=q8_0\n".encode()).get("KV") != "q8_0"
    else:
        assert after == before | {"KV": "q8_0"}


@pytest.mark.parametrize("text", FILES)
def test_a_shell_reads_the_change_and_everything_else_as_it_was(text: str) -> None:
    before = sourced(text)
    try:
        after = sourced(changed(text, {"KV": "q8_0"}))
    except UsageError:
        assert (sourced(f"{text}\nKV=q8_0\n") or {}).get("KV") != "q8_0"
    else:
        assert before is not None
        assert after == before | {"KV": "q8_0"}


def sourced(text: str) -> dict[str, str] | None:
    """What a shell that sources the text has of our names; None where it cannot read it."""
    done = subprocess.run(
        ["sh", "-c", "set -ae; . /dev/stdin; exec env -0"],
        input=text.encode(),
        capture_output=True,
        env={"PATH": "/usr/bin:/bin"},
        check=False,
    )
    if done.returncode:
        return None
    read = dict(word.partition("=")[::2] for word in done.stdout.decode().split("\0") if word)
    return {name: value for name, value in read.items() if name in ("KV", "LONG", "OTHER")}
