"""A login without any rights is enough: scopes, placeholders and the quiet proof of an own user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.ssh import SshHost
from tests.lab.lab import Lab
from tests.unit.test_hosts_contract import (  # noqa: F401 - the contract, as an own user
    test_a_file_is_created_once_and_its_bytes_stay,
)
from tests.unit.test_hosts_scopes_contract import (  # noqa: F401 - the contract, as an own user
    test_a_chains_placeholder_goes_up_once_and_down_again,
    test_a_scope_ends_whole_and_alone,
    test_a_scope_of_any_window_is_not_quiet_unless_it_is_named,
    test_a_windows_own_dies_with_its_fence_and_the_chains_outlives_every_scope,
)

pytestmark = pytest.mark.slow

_ADD = """\
id serve >/dev/null 2>&1 || useradd --create-home --shell /bin/bash serve || exit 1
install -d -m 700 -o serve -g serve /home/serve/.ssh
install -m 600 -o serve -g serve /root/.ssh/authorized_keys /home/serve/.ssh/authorized_keys
loginctl enable-linger serve
"""


@pytest.fixture
def host(lab: Lab, tmp_path: Path) -> Iterator[SshHost]:
    log = CommandLog(tmp_path / "cmd")
    root = lab.ssh("alpha", CommandLog(tmp_path / "root-cmd"))
    root.run(["sh", "-s"], name="add", deadline_s=20.0, stdin=_ADD)
    root.close()
    address = lab.address("alpha")
    host = SshHost("alpha", address, log, user="serve", key=lab.key, known_hosts=lab.known_hosts)
    assert host.run(["id", "-un"], name="whoami", deadline_s=10.0).stdout == "serve\n"
    yield host
    host.close()


@pytest.fixture
def folder() -> str:
    return "/home/serve/deeper"
