"""Protected experts: generated Grams with known shares derive the known answer, damaged ones none.

The law is FRANK-ARCHON's: at least 3 % of a layer's energy and at least 3 times the routing share,
an even count on each rank's half, ties by energy share, layer, expert.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_dsv41.cli import main
from pytest_dsv41.errors import UsageError
from pytest_dsv41.payload.experts import Derivation, Law, derive
from pytest_dsv41.payload.grams import Gram, read_grams
from tests.unit.gram_files import gram_bytes, spread, write_layer

NAME = "gram.r0.blk.1.ffn_down_exps.3.bin"


def chosen(found: Derivation) -> dict[tuple[int, int], bool]:
    """(layer, expert) to whether the law itself chose it."""
    return {(p.layer, p.expert): p.by_law for p in found.protected}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Four layers of sixteen experts, whose shares can be read off the numbers.

    Experts 0 to 7 are rank 0's, 8 to 15 rank 1's.
    """
    # Layer 0: expert 2 has exactly 3 % (96 of 3200) from 1 token of 200, expert 5 just under 3 %;
    # expert 7 is the most energetic, but routed for it. Rank 0's half is odd and gains 7.
    energies = spread(3200.0, {2: 96.0, 5: 95.0, 7: 409.0})
    routed = [12] * 16
    routed[2], routed[5], routed[7] = 1, 1, 40
    write_layer(tmp_path, 0, energies, routed)
    # Layer 1: expert 9 has exactly 3 times its routing share (24 of 75 energy, 8 of 75 tokens),
    # expert 10 a hair less (23 of 75). Rank 1's half is odd and gains 10.
    energies = spread(75.0, {9: 24.0, 10: 23.0})
    write_layer(tmp_path, 1, energies, [7] + [4] * 8 + [8, 8] + [4] * 5)
    # Layer 2 is empty.
    write_layer(tmp_path, 2, [0.0] * 16, [0] * 16)
    # Layer 3: two in rank 0 (even as it is), one in rank 1 whose next most energetic are 8 and 15
    # at the same energy: the tie goes to the lower number.
    energies = spread(1024.0, {0: 256.0, 1: 128.0, 12: 256.0, 8: 40.0, 15: 40.0})
    routed = [16] * 16
    for expert in (0, 1, 12):
        routed[expert] = 2
    write_layer(tmp_path, 3, energies, routed)
    return tmp_path


def test_known_shares_give_the_known_answer(recording: Path) -> None:
    grams, others = read_grams(recording, stem="ffn_down_exps")
    assert (len(grams), others) == (64, 0)
    found = derive(grams)
    assert chosen(found) == {
        (0, 2): True, (0, 7): False,
        (1, 9): True, (1, 10): False,
        (3, 0): True, (3, 1): True, (3, 8): False, (3, 12): True,
    }  # fmt: skip
    assert found.empty == (2,)
    assert found.experts == 16
    shares = {(p.layer, p.expert): p.energy_share for p in found.protected}
    assert shares[0, 2] == Fraction(3, 100)
    assert shares[1, 9] == Fraction(24, 75)
    # Most energetic first, a tie by layer and expert.
    assert [(p.layer, p.expert) for p in found.ranked()] == [
        (1, 9), (1, 10), (3, 0), (3, 12), (0, 7), (3, 1), (3, 8), (0, 2),
    ]  # fmt: skip


def test_a_hair_below_either_threshold_is_out(tmp_path: Path) -> None:
    routed = [1] + [30] * 15
    write_layer(tmp_path, 0, spread(3200.0, {0: 95.0}), routed)
    assert not derive(read_grams(tmp_path, stem="ffn_down_exps")[0]).protected
    # 3 times: 45 of 150 energy from 100 of 1,000 tokens is in; from 101 of 1,001 it is not.
    for tokens, inside in ((100, True), (101, False)):
        write_layer(tmp_path, 0, spread(150.0, {4: 45.0}), [60] * 4 + [tokens] + [60] * 11)
        assert ((0, 4) in chosen(derive(read_grams(tmp_path, stem="ffn_down_exps")[0]))) is inside


def test_the_published_choice_of_a_half_comes_out() -> None:
    """Layer 47: 445 and 143 by the law, 399 and 122 as the next of their halves."""
    energy = {445: 640, 143: 45, 399: 20, 122: 18}
    grams = [
        Gram(47, e, int(e >= 256), 640, 0, 20 if e in (445, 143) else 50, energy.get(e, 0.5), "")
        for e in range(512)
    ]
    assert chosen(derive(grams)) == {
        (47, 122): False, (47, 143): True, (47, 399): False, (47, 445): True,
    }  # fmt: skip


def test_other_files_are_left_alone_and_a_layer_may_have_none(recording: Path) -> None:
    (recording / "gram.r0.blk.0.ffn_down_exps.bin").write_bytes(b"the layer's pooled one")
    (recording / "gram.r0.blk.0.ffn_gate_up_exps.bin").write_bytes(b"another weight")
    (recording / "log.txt").write_text("x")
    for path in recording.glob("gram.*.blk.1.*"):
        path.unlink()
    grams, others = read_grams(recording, stem="ffn_down_exps")
    assert (len(grams), others) == (48, 3)
    assert derive(grams).layers == (0, 2, 3)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (gram_bytes([1.0] * 4, rows=1, magic=b"RADGRAM1"), "not with RADGRAM2"),
        (gram_bytes([1.0] * 4, rows=1)[:-4], "92 bytes, but k = 4 makes 96"),
        (gram_bytes([1.0] * 4, rows=1) + b"x", "97 bytes, but k = 4 makes 96"),
        (gram_bytes([1.0] * 4, rows=1, k=0), "k = 0"),
        (gram_bytes([1.0] * 4, rows=1, k=2**32 - 1), "cut or damaged"),
        (gram_bytes([1.0] * 4, rows=1)[:31], "shorter than a RADGRAM2 header"),
        (b"", "shorter than a RADGRAM2 header"),
        (gram_bytes([1.0, math.nan, 1, 1], rows=1), "element 1 of the diagonal is nan"),
        (gram_bytes([1.0, 1, 1, math.inf], rows=1), "element 3 of the diagonal is inf"),
        (gram_bytes([math.inf, 1, 1, -math.inf], rows=1), "element 0 of the diagonal is inf"),
        (gram_bytes([1.0, 1, -1, 1], rows=1), "element 2 of the diagonal is -1"),
        (gram_bytes([1.0] * 4, rows=0), "energy 4 from 0 tokens"),
        (gram_bytes([1.0] * 4, rows=1, rank=1), "its header says rank 1, its name 0"),
        (gram_bytes([1.0] * 5, rows=1), "k 5, but gram.r0.blk.0.ffn_down_exps.0.bin has 4"),
        (gram_bytes([1.0] * 4, rows=1, domain=128), "domain 128, but"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_its_name(recording: Path, damage: bytes, told: str) -> None:
    (recording / NAME).write_bytes(damage)
    with pytest.raises(UsageError) as refused:
        read_grams(recording, stem="ffn_down_exps")
    assert NAME in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize("what", ["fifo", "device", "folder"])
def test_what_is_no_file_is_refused_by_its_name_and_holds_nothing_up(
    recording: Path, what: str
) -> None:
    path = recording / NAME
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(UsageError, match=f"{NAME}: no regular file"):
        read_grams(recording, stem="ffn_down_exps")


@pytest.mark.parametrize("share", ["1/0", "nan", "inf", "-1", "0", "1e9999999", "1e-9999999", "x"])
def test_a_share_that_is_none_is_one_line(
    recording: Path, capsys: pytest.CaptureFixture[str], share: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["experts", "derive", str(recording), f"--energy-share={share}"])
    assert ended.value.code == 4
    assert f"--energy-share: '{share}': valid: above 0, such as" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-5", "1000000000"])
def test_a_count_of_experts_that_is_none_is_one_line(
    recording: Path, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert main(["experts", "derive", str(recording), "--experts", count]) == 4
    assert f"--experts {count}: valid: 1 to 1,000,000" in capsys.readouterr().err


def test_a_derivation_is_never_written_over_something(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (mine, pipe):
        assert main(["experts", "derive", str(recording), "--out", str(path)]) == 4
        assert f"{path}: exists; a derivation is never overwritten" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert pipe.is_fifo()


def test_a_missing_and_a_doubled_expert_are_refused_by_name(recording: Path) -> None:
    whole = (recording / NAME).read_bytes()
    (recording / NAME).unlink()
    with pytest.raises(UsageError, match="layer 1: no Gram of expert 3; a layer has 16"):
        derive(read_grams(recording, stem="ffn_down_exps")[0])
    (recording / NAME).write_bytes(whole)
    (recording / NAME.replace(".3.", ".03.")).write_bytes(whole)
    with pytest.raises(UsageError) as refused:
        read_grams(recording, stem="ffn_down_exps")
    assert NAME in str(refused.value)
    assert NAME.replace(".3.", ".03.") in str(refused.value)


def test_the_last_expert_missing_everywhere_needs_the_count(recording: Path) -> None:
    for path in recording.glob("*.15.bin"):
        path.unlink()
    grams, _ = read_grams(recording, stem="ffn_down_exps")
    with pytest.raises(UsageError, match="no Gram of expert 15"):
        derive(grams, experts=16)
    with pytest.raises(UsageError, match="expert 14: a layer has 14 experts"):
        derive(grams, experts=14)


def test_an_odd_half_without_a_spare_expert_is_refused() -> None:
    grams = [Gram(0, 0, 0, 4, 0, 1, 9.0, ""), Gram(0, 1, 1, 4, 0, 99, 1.0, "")]
    with pytest.raises(UsageError, match="layer 0 rank 0: all 1 experts"):
        derive(grams)


def test_no_folder_and_no_grams_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_grams(tmp_path / "none", stem="ffn_down_exps")
    with pytest.raises(UsageError, match="no gram"):
        read_grams(tmp_path, stem="ffn_down_exps")


@given(
    table=st.integers(1, 4).flatmap(
        lambda half: st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=4 * half, max_size=4 * half
        )
    ),
    order=st.randoms(use_true_random=False),
)
def test_the_rule_for_any_layer(table: list[tuple[int, int]], order: object) -> None:
    """Against the law written out in whole numbers."""
    count = len(table)
    grams = [
        Gram(5, e, int(e >= count // 2), 4, 0, rows, float(energy), "")
        for e, (energy, rows) in enumerate(table)
    ]
    energy_sum = sum(energy for energy, _ in table)
    rows_sum = sum(rows for _, rows in table)
    order.shuffle(grams)  # type: ignore[attr-defined]
    expected: dict[tuple[int, int], bool] = {}
    for half in (range(count // 2), range(count // 2, count)):
        by_law = [
            e
            for e in half
            if energy_sum
            and 100 * table[e][0] >= 3 * energy_sum
            and table[e][0] * rows_sum >= 3 * table[e][1] * energy_sum
        ]
        expected |= {(5, e): True for e in by_law}
        if len(by_law) % 2:
            spare = [e for e in half if e not in by_law]
            expected[5, min(spare, key=lambda e: (-table[e][0], e))] = False
    found = derive(grams)
    assert chosen(found) == expected
    assert found.empty == (() if energy_sum else (5,))


def test_the_command_writes_what_splice_reads(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "names.json"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest_dsv41", "experts", *words],
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("derive", str(recording), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "8 protected experts, 3 of them to make a half even" in done.stdout
    assert "empty layers: 2" in done.stdout
    body = json.loads(out.read_text())
    assert [row["name"] for row in body["protected"]][:2] == [
        "blk.0.ffn_*_exps.2.weight",
        "blk.0.ffn_*_exps.7.weight",
    ]
    assert all(row["why"] for row in body["protected"])
    (recording / NAME).write_bytes(struct.pack("<8s", b"RADGRAM2"))
    done = run("derive", str(recording))
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert NAME in done.stderr
    assert run("derive", str(recording), "--energy-share", "0").returncode == 4


def test_laws_are_figures_not_code() -> None:
    grams = [Gram(0, e, int(e >= 2), 4, 0, 1, energy, "") for e, energy in enumerate((5, 3, 1, 1))]
    assert not derive(grams).protected
    looser = derive(grams, Law(Fraction(3, 10), Fraction(6, 5)))
    assert chosen(looser) == {(0, 0): True, (0, 1): True}
