"""The embedded stub: a simulated engine behind a real socket, for rehearsals, demos and tests.

    with serve(round_ms=8.0, draft_tokens=3) as stub:       # in a thread of this process
        client.post(stub.url + "/v1/completions", …)
        stub.truth()                                         # when each byte left

    with spawn(model="m", seed=7) as stub:                   # in a process of its own
        client.get(stub.url + "/health")

It proves sockets, streams, admission, counters and their handling; nothing about performance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_dsv41.stub.profile import Profile, load_profile, make_profile

if TYPE_CHECKING:
    from subprocess import Popen

    from pytest_dsv41.stub.server import Server

__all__ = ["Profile", "Serving", "Spawned", "load_profile", "serve", "spawn"]


class Serving:
    """A server in a thread: `url`, and the `server` itself."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url

    def truth(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the ground truth so far; with `kinds`, only the lines of these kinds."""
        lines = self.server.truth.lines()
        return [line for line in lines if line["kind"] in kinds] if kinds else lines

    def faults(self, *texts: str) -> None:
        """Let these faults hold for every request from now on; none ends them."""
        self.server.set_faults(texts)


class Spawned:
    """A server in a process of its own: `url`, `pid` and the `process`."""

    def __init__(self, process: Popen[bytes], url: str) -> None:
        self.process = process
        self.pid = process.pid
        self.url = url


@contextlib.contextmanager
def serve(profile: Profile | None = None, **settings: Any) -> Iterator[Serving]:
    """Serve in a thread until the block ends. `settings` stand over `profile`.

    UsageError when a setting is wrong or the port is taken. An error inside the stub itself is
    raised at the end of the block.
    """
    import threading

    from pytest_dsv41.stub.server import Server

    server = Server(make_profile(settings, base=profile))
    thread = threading.Thread(target=server.run, name="stub", daemon=True)
    thread.start()
    try:
        yield Serving(server)
    finally:
        server.stop()
        thread.join(10)
    if server.errors:
        raise server.errors[0]


@contextlib.contextmanager
def spawn(
    profile: Profile | None = None,
    *,
    arguments: Sequence[str] = (),
    timeout_s: float = 20.0,
    **settings: Any,
) -> Iterator[Spawned]:
    """Serve in a process until the block ends; then SIGTERM, and SIGKILL if that is not enough.

    `arguments` are further flags of the command line. UsageError when the server did not come up
    within `timeout_s`; it says what the server said.
    """
    import subprocess
    import sys

    profile = make_profile(settings, base=profile)
    argv = [sys.executable, "-m", "pytest_dsv41", "stub", *_flags(profile), *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield Spawned(process, _wait_for_url(process, timeout_s))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _flags(profile: Profile) -> list[str]:
    """Return the flags that give `profile`, where it differs from the default."""
    flags: list[str] = []
    for name, value in profile._asdict().items():
        if value == getattr(Profile(), name):
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif name in ("fault", "offer", "deny"):
            flags += [f"{flag}={text}" for text in value]
        elif isinstance(value, tuple):
            flags.append(f"{flag}=" + ",".join(map(str, value)))
        else:
            flags.append(f"{flag}={value}")
    return flags


def _wait_for_url(process: Popen[bytes], timeout_s: float) -> str:
    import json
    import select

    from pytest_dsv41.errors import UsageError

    assert process.stdout is not None
    assert process.stderr is not None
    if select.select((process.stdout,), (), (), timeout_s)[0]:
        line = process.stdout.readline()
        if line:
            return str(json.loads(line)["url"])
        said = process.stderr.read().decode(errors="replace").strip()
        raise UsageError(said or f"the stub ended with code {process.wait()}")
    raise UsageError(f"the stub did not come up within {timeout_s:g} s")
