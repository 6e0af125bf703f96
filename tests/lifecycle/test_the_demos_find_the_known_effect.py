"""The shipped demos, whole: a true effect that is known beforehand comes out as the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import assert_ended_well, run

SEEDS = (1, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "status", "needed"),
    [
        ("demo", 0, "CANDIDATE", len(SEEDS)),
        # The rule's own false calls are about 2 % a window: one of the three may be one.
        ("demo-null", 10, "INCONCLUSIVE", len(SEEDS) - 1),
        ("demo-loss", 11, "NOT A CANDIDATE", len(SEEDS)),
    ],
)
def test_a_demo_ends_with_its_verdict(
    name: str, code: int, status: str, needed: int, tmp_path: Path
) -> None:
    found = []
    for seed in SEEDS:
        ended = run(tmp_path / str(seed), f"--window-seed={seed}", window=name)
        assert_ended_well(ended)
        assert f"seed {seed}" in ended.output
        assert ended.summary["exit_code"] == ended.returncode
        assert (ended.summary["promotion"] is not None) is (ended.returncode == 0)
        found.append((ended.returncode, ended.summary["status"]))
    assert found.count((code, status)) >= needed, found
