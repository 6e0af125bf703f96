"""Target `endpoints`: which addresses an arm may name."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_dsv41.errors import SpecError
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.targets import Arm, TargetContext, endpoints_target


def check(folder: Path, url: object) -> None:
    context = TargetContext(
        window_id="LANE-ends-W-20260101T000000Z",
        folder=folder,
        campaign=folder / "campaign",
        base=folder,
        seed=7,
        limits={},
        state={},
        variables={},
        log=CommandLog(folder / "cmd"),
        pause=time.sleep,
    )
    endpoints_target({"kind": "endpoints"}, context).check(
        [Arm("a", "control", settings={"url": url})]
    )


def test_a_servers_address_is_taken(tmp_path: Path) -> None:
    check(tmp_path, "http://127.0.0.1:8000/v1")


@pytest.mark.parametrize(
    "url",
    [
        "",
        8000,
        "http://[::1",
        "http://u:hush@h:1",
        "http://h?a=1",
        "http://h#a",
        "unix:",
        "unix:/s",
    ],
)
def test_another_address_is_refused_with_its_key(tmp_path: Path, url: object) -> None:
    with pytest.raises(SpecError, match=r"^arms\.a\.settings\.url: .*valid: http") as wrong:
        check(tmp_path, url)
    assert "hush" not in str(wrong.value)
