"""Windows on two real systemd hosts: down and back, whatever breaks on the way."""

from __future__ import annotations

import pytest

from tests.lab.pair import Pair

pytestmark = pytest.mark.slow


def test_a_window_of_three_starts_on_two_hosts(pair: Pair) -> None:
    ended = pair.run(window=pair.write_window("pair", deciding=True))
    assert ended.returncode == 0, ended.output
    summary = ended.summary
    assert summary["status"] == "CANDIDATE"
    assert summary["restore"] == summary["restore"] | {"status": "RESTORED", "answers_identical": 6}
    assert summary["watch"]["status"] == "PASS"
    # Both hosts proved their cap in each start's own log.
    for start in ("C1", "X", "C2"):
        logs = sorted((ended.folder / "cmd").glob(f"*-{start}-start.log"))
        said = "".join(path.read_text() for path in logs)
        assert "alpha clock cap 2300 MHz\n" in said
        assert "beta clock cap 2300 MHz\n" in said
    rows = (pair.campaign / "control-archive.jsonl").read_text().splitlines()
    assert rows
    assert all('"clock_cap_mhz":2300' in row for row in rows)
    pair.assert_serving_and_nothing_left()
