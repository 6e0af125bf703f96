"""Unit files, drop-ins and environment files, held against what systemd itself makes of them."""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.unit.systemd import read_unit
from pytest_dsv41.unit.unitfile import (
    environment_of,
    live,
    parse_environment_file,
    parse_unit_file,
    split_commands,
)
from tests.lab.lab import Lab
from tests.lab.units import Units

pytestmark = pytest.mark.slow


def drawn(strategy: st.SearchStrategy[str], count: int) -> list[str]:
    """Texts that hypothesis draws, all at once: systemd is asked about them in one go."""
    texts: list[str] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None)
    @given(strategy)
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    return texts


@pytest.fixture
def units(lab: Lab, tmp_path: Path) -> Iterator[Units]:
    units = Units(lab, CommandLog(tmp_path / "cmd", synced=False))
    try:
        yield units
    finally:
        units.clean()


# -- which drop-ins apply, and in which order ------------------------------------------------------

NAMES = (
    "plain.service",
    "a-b.service",
    "a-b-c.service",
    "a-b@x-y.service",
    "with--dashes.service",
    "trailing-@i.service",
    "-leading.service",
)
PLACES = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/run/systemd/generator.late",
)
DROPS = ("10-a.conf", "20-b.conf", "B.conf", "a.conf", "\u00e9.conf", ".hidden.conf", "no.txt")


def folders_of(unit: str) -> list[str]:
    """Every folder name that may, or may not, be one of a unit's: guessed, not computed."""
    stem = unit.removesuffix(".service")
    prefix, at, _ = stem.partition("@")
    parts = prefix.split("-")
    cut = ["-".join(parts[:n]) for n in range(1, len(parts))]
    guesses = {unit, "service", f"{prefix}.service", *(f"{c}-.service" for c in cut)}
    guesses |= {f"{c}.service" for c in cut}
    if at:
        guesses |= {f"{prefix}@.service", *(f"{c}-@.service" for c in cut)}
        guesses |= {f"{c}-@{stem.partition('@')[2]}.service" for c in cut}
    return sorted(f"{name}.d" for name in guesses if not name.startswith("."))


@pytest.mark.parametrize("seed", range(3))
def test_drop_ins_apply_in_the_order_that_systemd_has(seed: int, units: Units) -> None:
    draw = random.Random(seed)
    files: dict[str, bytes] = {}
    for unit in NAMES:
        fragment = f"{unit.partition('@')[0]}@.service" if "@" in unit else unit
        files[f"/etc/systemd/system/{fragment}"] = b"[Service]\nExecStart=/bin/true\n"
        for _ in range(draw.randint(0, 14)):
            folder, drop = draw.choice(folders_of(unit)), draw.choice(DROPS)
            files[f"{draw.choice(PLACES)}/{folder}/{drop}"] = b"[Service]\nNice=1\n"
    units.write_all(list(files.items()))
    units.reload()
    seen = 0
    for unit in NAMES:
        facts = read_unit(units.host, unit, process=False)
        said = [file.path for file in facts.drop_ins]
        assert said == list(facts.loaded.drop_ins), unit
        # systemctl cat reads the same files by itself: "# PATH" before each.
        cat = units.run("systemctl", "cat", "--", unit).splitlines()
        assert [line[2:] for line in cat if line.startswith("# /")][1:] == said, unit
        assert facts.fragment is not None
        assert facts.fragment.path == facts.loaded.fragment
        seen += len(said)
    assert seen > 10, "the draw tests nothing"


def test_drop_ins_of_an_alias_apply_too(units: Units) -> None:
    units.write("/etc/systemd/system/real-name.service", "[Service]\nExecStart=/bin/true\n")
    units.link("/etc/systemd/system/other-name.service", "/etc/systemd/system/real-name.service")
    units.write("/etc/systemd/system/other-name.service.d/1.conf", "[Service]\nNice=1\n")
    units.write("/run/systemd/system/real-.service.d/0.conf", "[Service]\nNice=1\n")
    units.reload()
    units.run("systemctl", "show", "other-name.service")
    facts = read_unit(units.host, "real-name", process=False)
    assert [file.path for file in facts.drop_ins] == list(facts.loaded.drop_ins)
    assert len(facts.drop_ins) == 2
    by_alias = read_unit(units.host, "other-name", process=False)
    assert (by_alias.unit, by_alias.drop_ins) == ("real-name.service", facts.drop_ins)
    assert by_alias.fragment == facts.fragment


# -- what files say --------------------------------------------------------------------------------

WORD = st.text(
    alphabet=st.sampled_from(
        [*"abcXYZ019_.,:/=+-@#;", "\u00e9", "\u20ac", " ", "\t", "'", '"', "\\"]
    ),
    max_size=12,
)
ESCAPED = st.sampled_from(
    ["\\n", "\\t", "\\s", "\\x41", "\\101", "\\u20ac", "\\U0001f600", "\\\\", "\\'", '\\"', "\\q",
     "'a b'", '"c  d"', "x'y z'", '""', "%%", "%n", "%N", "%p", "%i", ";", "\\;", "a;b"]
)  # fmt: skip
VALUE = st.lists(st.one_of(WORD, ESCAPED), max_size=5).map(" ".join)
COMMAND = VALUE.map(lambda value: f"/bin/echo {value}")
LINE = st.one_of(
    VALUE.map(lambda v: f"Environment=A={v}"),
    VALUE.map(lambda v: f"Environment={v}"),
    st.builds(lambda v, w: f'Environment="B={v}" C={w}', WORD, WORD),
    COMMAND.map(lambda v: f"ExecStart={v}"),
    COMMAND.map(lambda v: f"  ExecStartPre = {v}"),
    st.sampled_from(
        ["Environment=", "ExecStart=", "# a comment", "; another", "", "   ", "no assignment", "=x",
         "Environment=D=1 \\\n  E=2", "Environment=F=1 \\\n# between\n  G=2", "[Unit]", "[Service]",
         "[X-Own]", "[Unknown]", "Environment=H=1\\\\", "Environment=I=1\rEnvironment=J=2"]
    ),
)  # fmt: skip
TEXT = st.lists(LINE, min_size=1, max_size=8).map(
    lambda lines: "[Service]\nType=oneshot\nExecStart=/bin/true\n" + "\n".join(lines) + "\n"
)


def test_environment_and_commands_are_those_that_systemd_reads(units: Units) -> None:
    texts = drawn(TEXT, 120)
    names = [f"gen-{n}.service" for n in range(len(texts))]
    files = [
        (f"/run/systemd/system/{name}", text.encode())
        for name, text in zip(names, texts, strict=True)
    ]
    units.write_all(files)
    units.reload()
    keys = ("LoadState", "Environment", "ExecStartEx", "ExecStartPreEx")
    read = 0
    for name, text, loaded in zip(names, texts, units.loaded(names, *keys), strict=True):
        if loaded["LoadState"] != "loaded":
            continue
        held = live([parse_unit_file(name, text.encode())])
        written = {n: one_of(v, name) for n, (v, _) in environment_of(held).items()}
        assert written == dict(word.split("=", 1) for word in loaded["Environment"]), text
        for key in ("ExecStart", "ExecStartPre"):
            found = [c for a in held.get(f"Service.{key}", ()) for c in split_commands(a.value)]
            words = [[one_of(word, name) for word in command.argv] for command in found]
            assert words == [command[1] for command in loaded[f"{key}Ex"]], text
        read += 1
    assert read > len(texts) // 2


def one_of(word: str, unit: str) -> str:
    """Specifiers filled in, as far as these units use them."""
    stem = unit.removesuffix(".service")
    known = {"n": unit, "N": stem, "p": stem, "i": "", "%": "%"}
    return re.sub("%(.)", lambda found: known[found[1]], word)


ENV_PIECE = st.sampled_from(
    ["A", "B", "C_1", "1BAD", "=", "=", "=", " ", "\t", "\n", "\n", "'", '"', "\\", "\\\n", "#",
     ";", "value", "two words", "$x", "`", "\u00e9", "\r\n", "export "]
)  # fmt: skip
ENV_FILE = st.lists(ENV_PIECE, max_size=24).map(lambda parts: "".join(parts) + "\nEND=1\n")


def test_environment_files_say_what_a_process_gets(units: Units) -> None:
    texts = drawn(ENV_FILE, 80)
    files: list[tuple[str, bytes]] = []
    names = [f"env-{n}.service" for n in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        files.append((f"/run/envs/{name}", text.encode()))
        unit = (
            f"[Service]\nType=oneshot\nEnvironmentFile=/run/envs/{name}\n"
            f"ExecStart=/bin/cp /proc/self/environ /run/envs/{name}.got\n"
        )
        files.append((f"/run/systemd/system/{name}", unit.encode()))
    units.write_all(files)
    units.reload()
    version = read_unit(units.host, names[0], process=False).manager.version
    units.start(*names, check=False)
    show = 'for u; do f=/run/envs/$u.got; [ -e "$f" ] && echo "$u $(base64 -w 0 "$f")"; done; :'
    said = [line.split() for line in units.run("sh", "-c", show, "sh", *names).splitlines()]
    results = {name: base64.b64decode(data) for name, data in said}
    told = 0
    for name, text in zip(names, texts, strict=True):
        got = results.get(name)
        mine = parse_environment_file(text.encode(), version=version)
        if got is None:
            continue
        pairs = dict(word.split("=", 1) for word in got.decode().split("\0") if word)
        own = {
            k: v for k, v in pairs.items() if k in {"A", "B", "C_1", "END", "AB", "BA"} | set(mine)
        }
        assert mine == own, repr(text)
        told += 1
    assert told > len(texts) // 2
    units.run("rm", "-rf", "/run/envs")
