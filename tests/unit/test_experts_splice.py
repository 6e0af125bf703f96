"""Splicing a recipe: every byte outside the markers stays, and what would not serve is refused."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41 import durable
from pytest_dsv41.errors import SpecError
from pytest_dsv41.payload.recipe import Names, read_names, splice, spliced_text

W4 = "gptq table=w4nl group=64 scale=fp8_e4m3 transform=fwht128 calib=$CALIB"
RECIPE = f"""\
# a recipe
# PROTECTED-BEGIN
# PROTECTED-END
blk.*.ffn_*_exps.*.weight  {W4}   # all the others
output.weight  rtn codes=i8 group=128 clamp=sym
"""
LINES = "blk.3.ffn_*_exps.7.weight cast dtype=bf16\nblk.40.ffn_*_exps.0.weight cast dtype=bf16\n"
NAMES = Names(((3, 7), (40, 0)))


DERIVED = '{"schema": "dsv41-protected-experts-v1"'


def done(text: str, names: Names = NAMES, *, replace: bool = False) -> str:
    return spliced_text(text.encode(), names, replace=replace)[0].decode()


def test_the_names_stand_between_the_markers() -> None:
    assert done(RECIPE) == RECIPE.replace("# PROTECTED-END", f"{LINES}# PROTECTED-END")


text = st.text(st.sampled_from("aé#\t \r-=*."), max_size=12)


@given(
    head=st.lists(text.map(lambda t: f"# {t}"), max_size=4),
    tail=st.lists(text.map(lambda t: f"#{t}"), max_size=4),
    newline=st.sampled_from(["\n", "\r\n"]),
    old=st.lists(st.integers(0, 9), max_size=3, unique=True),
    new=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=5, unique=True),
    last=st.booleans(),
)
def test_every_other_byte_stays(
    head: list[str],
    tail: list[str],
    newline: str,
    old: list[int],
    new: list[tuple[int, int]],
    last: bool,
) -> None:
    """Any comments, line ends and an end without a line break; the block alone is another one."""
    before = newline.join([*head, "  # PROTECTED-BEGIN of the campaign", ""]).encode()
    held = "".join(f"blk.9.ffn_*_exps.{e}.weight cast dtype=bf16{newline}" for e in old).encode()
    after = newline.join(["# PROTECTED-END", *tail, f"blk.*_exps.* {W4}"]).encode()
    after += newline.encode() * last
    made, was = spliced_text(before + held + after, Names(tuple(sorted(new))), replace=True)
    assert was == len(old)
    assert made.startswith(before)
    assert made.endswith(after)
    block = made[len(before) : len(made) - len(after)].decode()
    assert block == "".join(
        f"blk.{layer}.ffn_*_exps.{expert}.weight cast dtype=bf16{newline}"
        for layer, expert in sorted(new)
    )
    # Put back, the recipe is what it was, to the byte.
    back, _ = spliced_text(made, Names(tuple((9, e) for e in sorted(old))), replace=True)
    assert back == before + b"".join(sorted(held.splitlines(True))) + after


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda t: t.replace("# PROTECTED-BEGIN\n", ""), "has no line '# PROTECTED-BEGIN'"),
        (lambda t: t.replace("# PROTECTED-END\n", ""), "has no line '# PROTECTED-END'"),
        (lambda t: t + "# PROTECTED-END\n", "stands twice, on lines 3 and 6"),
        (lambda t: "# PROTECTED-BEGIN\n" + t, "stands twice, on lines 1 and 3"),
        (
            lambda t: t.replace("BEGIN", "X").replace("END", "BEGIN").replace("X", "END"),
            "'# PROTECTED-END' stands before '# PROTECTED-BEGIN' on line 3",
        ),
        (lambda t: t.replace("# PROTECTED-END", "x\n# PROTECTED-END"), "recipe:3: the block is"),
        (lambda t: t + "lonely\n", "recipe:6: no rule"),
        (lambda t: t + "a rtn group\n", "recipe:6: option 'group'"),
        (lambda t: t + "a rtn k=1 k=2\n", "recipe:6: option 'k' twice"),
        (
            lambda t: f"blk.3.ffn_down_exps.* {W4}\n" + t,
            "blk.3.ffn_down_exps.7.weight is codes group=64 scale=fp8_e4m3 table=w4nl "
            "transform=fwht128 (line 1), which is decided before the block",
        ),
        (
            lambda t: t.replace(
                "blk.*.ffn_*_exps", "blk.*.ffn_down_exps.* rtn codes=fp8_e4m3\nblk.*.ffn_*_exps"
            ),
            "two encodings in layer 3's table of experts",
        ),
        (
            lambda t: t.replace("blk.*.ffn_*_exps.*", "blk.*.ffn_down_exps.*"),
            "blk.3.ffn_down_exps.0.weight is codes",
        ),
        (
            lambda t: t.replace(
                "blk.*.ffn_*_exps", "blk.3.ffn_*_exps.5.weight gptq codes=i4\nblk.*.ffn_*_exps"
            ),
            "blk.3.ffn_gate_up_exps.5.weight is codes codes=i4",
        ),
    ],
)
def test_what_would_not_serve_is_refused_by_name(damage: Any, told: str) -> None:
    with pytest.raises(SpecError) as refused:
        done(damage(RECIPE))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_filled_block_needs_replace() -> None:
    once = done(RECIPE)
    with pytest.raises(SpecError, match=r"block is filled \(2 lines\); --replace"):
        done(once)
    assert done(once, replace=True) == once
    assert done(once, Names(()), replace=True) == RECIPE


def test_a_whole_expert_kept_by_hand_stays_beside_the_table() -> None:
    kept = RECIPE.replace("# a recipe", "blk.3.ffn_*_exps.2.weight cast dtype=bf16")
    assert "exps.7.weight cast" in done(kept)
    half = kept.replace("ffn_*_exps.2", "ffn_down_exps.2")
    with pytest.raises(SpecError, match="two encodings"):
        done(half)


def test_how_codes_are_found_is_no_other_encoding() -> None:
    text = RECIPE.replace(
        "blk.*.ffn_*", f"blk.3.ffn_down_exps.* {W4.replace('gptq', 'rtn')}\nblk.*.ffn_*"
    )
    assert done(text)


@given(st.text("ab*?.", max_size=8), st.text("ab.", max_size=8))
def test_patterns_are_globs_over_the_whole_name(pattern: str, name: str) -> None:
    """Held against the standard library's globs, whose `*` crosses dots too."""
    from pytest_dsv41.payload.recipe import _glob

    assert bool(re.fullmatch(_glob(pattern), name)) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("blk.1.ffn_*_exps.2.weight\nblk.1.attn_q.weight\n", ":2: unknown name 'blk.1.attn_q"),
        ("blk.1.ffn_down_exps.2.weight\n", "half an expert cannot be kept"),
        ("blk.1.ffn_*_exps.2\n\nblk.1.ffn_*_exps.2.weight\n", ":3: blk.1.*stands already at .*:1"),
        ("blk.x.ffn_*_exps.2 # x\n", ":1: unknown name"),
        ('{"schema": "other"}', "schema: valid: 'dsv41-protected-experts-v1'"),
        ("{", "not JSON"),
        (
            '{"schema": "dsv41-protected-experts-v1", "layers": [0]}',
            "experts: valid: 1 to 1,000,000, as",
        ),
        (f'{DERIVED}, "layers": [1e999]}}', "layers: valid: a list of numbers"),
        (f'{DERIVED}, "layers": [true]}}', "layers: valid: a list of numbers"),
        (f'{DERIVED}, "layers": "12"}}', "layers: valid: a list of numbers"),
        (f'{DERIVED}, "layers": [0], "experts": Infinity}}', "experts: valid: 1 to 1,000,000"),
        (f'{DERIVED}, "layers": [0], "experts": 1000001}}', "experts: valid: 1 to 1,000,000"),
        (f'{DERIVED}, "layers": [0], "experts": 4, "protected": {{}}}}', "protected: valid: a li"),
        (f'{DERIVED}, "layers": [0], "experts": 4, "protected": [7]}}', r"protected\[0\]: has no"),
        ('{"a":' + "[" * 100_000, "not JSON: nested too deep"),
        ("", "names no expert"),
        ("# none of them\n", "names no expert"),
        (
            '{"schema": "dsv41-protected-experts-v1", "layers": [0, 1], "experts": 16, '
            '"protected": [{"name": "blk.1.ffn_*_exps.16.weight"}]}',
            "the recording has 16 experts in layers 0 to 1",
        ),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "names"
    path.write_text(text)
    with pytest.raises(SpecError, match=told):
        read_names(path)


def test_the_file_keeps_its_permissions_and_its_link(tmp_path: Path) -> None:
    real = tmp_path / "real.recipe"
    real.write_text(RECIPE)
    real.chmod(0o664)
    link = tmp_path / "link.recipe"
    link.symlink_to(real.name)
    result = splice(link, NAMES)
    assert link.is_symlink()
    assert real.read_text() == done(RECIPE)
    assert real.stat().st_mode & 0o777 == 0o664
    assert result.sha256 == hashlib.sha256(real.read_bytes()).hexdigest()
    assert (result.names, result.before) == (2, 0)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_of_another_user_it_stays_the_other_users(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can write for another user: sudo pytest " + __file__)
    path = tmp_path / "r"
    path.write_text(RECIPE)
    path.chmod(0o640)
    os.chown(path, 65534, 65534)
    splice(path, NAMES)
    about = path.stat()
    assert (about.st_uid, about.st_gid, about.st_mode & 0o777) == (65534, 65534, 0o640)


@pytest.mark.parametrize("what", ["fifo", "device", "folder", "loop"])
def test_what_is_no_file_holds_nothing_up(tmp_path: Path, what: str) -> None:
    path = tmp_path / "odd"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path = Path("/dev/zero")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name)
    told = "loop of symbolic|Too many levels" if what == "loop" else "not a regular file"
    with pytest.raises(SpecError, match=told):
        read_names(path)
    with pytest.raises(SpecError, match=told):
        splice(path, NAMES)


def test_names_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "names"
    path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(" cast dtype=bf16", "").encode())
    assert read_names(path) == NAMES
    with pytest.raises(SpecError, match=":1: begins with a byte order mark"):
        spliced_text(b"\xef\xbb\xbf" + RECIPE.encode(), NAMES)


@pytest.mark.parametrize("pattern", ["*" * 40 + "z", "*?" * 20 + "z", "*e" * 20 + "z"])
def test_a_pattern_of_many_stars_takes_no_longer(pattern: str) -> None:
    """Trying every place of every star would not come back in this universe's time."""
    assert LINES in done(RECIPE.replace("# PROTECTED-BEGIN", f"{pattern} rtn\n# PROTECTED-BEGIN"))


def test_more_experts_than_any_model_has_are_refused() -> None:
    with pytest.raises(SpecError, match="2 layers of 1,000,001 experts: at most 1,000,000"):
        done(RECIPE, Names(((0, 5), (1, 999_999))))


def test_a_kill_leaves_the_old_recipe_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends before each of the calls that reach the disk."""
    recipe = tmp_path / "r"
    calls = ("open", "write", "fsync", "rename", "unlink")
    seen = set()
    for limit in range(12):
        recipe.write_text(RECIPE)
        left = [limit]

        class Killed(BaseException):
            pass

        def counted(real: Any, left: list[int] = left, killed: type = Killed) -> Any:
            def call(*args: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise killed
                return real(*args, **more)

            return call

        with monkeypatch.context() as patched:
            for name in calls:
                if hasattr(os, name):
                    patched.setattr(durable.os, name, counted(getattr(os, name)))
            patched.setattr(Path, "rename", counted(Path.rename))
            with contextlib.suppress(Killed):
                splice(recipe, NAMES)
        now = recipe.read_text()
        assert now in (RECIPE, done(RECIPE))
        seen.add(now)
    assert seen == {RECIPE, done(RECIPE)}
