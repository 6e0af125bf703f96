"""The lab hosts, brought up once a session for the tests that ask for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import HOSTS, Lab, missing, sweep
from tests.lab.pair import Pair
from tests.lab.unit_host import UnitHost


@pytest.fixture(scope="session")
def lab_hosts() -> Iterator[Lab]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    sweep()
    lab = Lab(os.getpid())
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


@pytest.fixture
def lab(lab_hosts: Lab) -> Iterator[Lab]:
    """The lab, with this thread in its network; every fault is undone afterwards."""
    with lab_hosts.entered():
        try:
            yield lab_hosts
        finally:
            lab_hosts.mend()


@pytest.fixture(params=HOSTS)
def either(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(lab: Lab, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts that serve; whatever a test leaves on them is taken down."""
    pair = Pair(lab, tmp_path)
    pair.serve()
    try:
        yield pair
    finally:
        lab.mend()
        pair.clean()


@pytest.fixture
def unit(lab: Lab, tmp_path: Path) -> Iterator[UnitHost]:
    """A host whose unit serves; whatever a test leaves on it is taken away."""
    with UnitHost(lab, tmp_path) as unit:
        yield unit
