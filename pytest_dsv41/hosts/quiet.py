"""The quiet proof: nothing runs on a host that could serve or measure. Not seen is not quiet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from ..errors import Dsv41Error
from ..text import one_line
from .base import Host, Probe
from .scopes import live_scopes

__all__ = ["labelled_containers", "spark_quiet"]

_MISSING: Final = 127
_DEADLINE_S: Final = 15.0


def spark_quiet(
    host: Host,
    *,
    ports: Iterable[int] = (),
    label: str = "",
    scopes: Collection[str] = (),
) -> list[str]:
    """Why the host is not proved quiet, one line each; empty means proved.

    Quiet is: no process computes on a GPU (where nvidia-smi is installed), no container runs that
    carries `label` (where docker or podman is installed), every port of `ports` refuses a
    connection, and no scope of any window holds a process, but those named in `scopes`. Each of
    these that cannot be told is a line too (SAFETY: UNKNOWN never counts as quiet).
    """
    checks: list[Callable[[], list[str]]] = [lambda: _gpu(host)]
    checks += [lambda: labelled_containers(host, label)]
    checks += [lambda port=port: _port(host, port) for port in ports]  # type: ignore[misc]
    checks += [lambda: _scopes(host, scopes)]
    problems: list[str] = []
    for check in checks:
        try:
            problems += check()
        except (Dsv41Error, OSError) as error:
            problems.append(f"{host.name}: cannot tell: {one_line(str(error))}")
            break
    return problems


def _gpu(host: Host) -> list[str]:
    argv = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    seen = host.run(argv, name="quiet-gpu", deadline_s=_DEADLINE_S, check=False)
    if seen.returncode == _MISSING:
        return []
    if seen.returncode != 0:
        said = one_line(seen.stderr or seen.stdout)
        return [f"{host.name}: cannot tell what the GPU does: nvidia-smi: {said}"]
    return [
        f"{host.name}: on the GPU: pid {one_line(line)}"
        for line in seen.stdout.splitlines()
        if line
    ]


def labelled_containers(host: Host, label: str) -> list[str]:
    """The host's running containers that carry `label`, one line each; no label, no look.

    They live outside of every scope, so a fence does not end them (SAFETY). A client whose daemon
    does not answer is a line too.

    Raises:
        TransportError: the host does not answer.
    """
    if not label:
        return []
    return _containers(host, "docker", label) + _containers(host, "podman", label)


def _containers(host: Host, program: str, label: str) -> list[str]:
    argv = [program, "ps", "--filter", f"label={label}", "--format", "{{.Names}}"]
    seen = host.run(argv, name=f"quiet-{program}", deadline_s=_DEADLINE_S, check=False)
    if seen.returncode == _MISSING:
        return []
    if seen.returncode != 0:
        said = one_line(seen.stderr or seen.stdout)
        return [f"{host.name}: cannot tell which containers run: {program}: {said}"]
    return [
        f"{host.name}: container {one_line(line)} runs" for line in seen.stdout.splitlines() if line
    ]


def _port(host: Host, port: int) -> list[str]:
    state = host.port(port)
    return [] if state is Probe.DOWN else [f"{host.name}: port {port} is {state.value}, not closed"]


def _scopes(host: Host, allowed: Collection[str]) -> list[str]:
    return [
        f"{host.name}: {unit} holds a process"
        for unit in live_scopes(host)
        if unit not in allowed and unit.startswith("dsv41w-")
    ]
