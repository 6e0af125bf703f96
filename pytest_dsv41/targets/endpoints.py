"""Target `endpoints`: arms are servers that already run; nothing is started, stopped or held."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx

from ..durable import dump_json
from ..engines import check_url, unix_path
from ..errors import SpecError, StartFailed, UsageError
from ..hosts import Host, Placeholder, Probe
from ..measure import Endpoint
from .base import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext, known_engine
from .tables import Table, read_table

__all__ = ["EndpointsTarget", "endpoints_target"]


class _Table(Table):
    kind: Literal["endpoints"] = "endpoints"
    engine: str = "vllm"
    model: str = ""


def endpoints_target(table: Mapping[str, Any], context: TargetContext) -> EndpointsTarget:
    """Build the target of `kind = "endpoints"`; each arm gives `settings = {url = "http://…"}`.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type.
    """
    return EndpointsTarget(read_table(_Table, table), context)


class EndpointsTarget:
    """Servers given by their URL. A start is a health check and a look at the model's name."""

    holds = False
    ephemeral = True
    chains = False

    def __init__(self, table: _Table, context: TargetContext) -> None:
        self._table = table
        self._context = context
        self._engine = known_engine(table.engine)
        self._urls: dict[str, str] = {}

    def check(self, arms: Sequence[Arm]) -> None:
        """Every arm needs `settings.url`, an http or https address."""
        for arm in arms:
            url = str(arm.settings.get("url", ""))
            try:
                check_url(url)
            except UsageError as error:
                raise SpecError(f"arms.{arm.name}.settings.url: {error}") from None
            if unix_path(url):
                raise SpecError(
                    f"arms.{arm.name}.settings.url: {url!r} is no address; "
                    "valid: http://HOST:PORT or https://HOST:PORT"
                )

    def prepare(self) -> dict[str, Any]:
        """Nothing is chosen."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Engine and model."""
        return {"kind": "endpoints", "engine": self._table.engine, "model": self._table.model}

    def hosts(self) -> tuple[Host, ...]:
        """The machines are not known."""
        return ()

    def identities(self) -> dict[str, str]:
        """The machines are not known."""
        return {}

    def hold_sites(self) -> tuple[HoldSite, ...]:
        """No production is touched."""
        return ()

    def hold_opened(self) -> None:
        """There is no HOLD."""

    def placeholders_up(self, owner: str) -> None:
        """There is no chain."""

    def placeholders(self, owner: str) -> dict[str, Placeholder]:  # noqa: ARG002
        """There is no chain."""
        return {}

    def placeholders_down(self, owner: str) -> list[str]:  # noqa: ARG002
        """There is no chain."""
        return []

    def probe(self) -> ProbeResult:
        """There is no production to look at."""
        return ProbeResult(Probe.DOWN, "target endpoints serves no production of its own")

    def production(self) -> Endpoint:
        """There is none."""
        raise StartFailed("target endpoints has no production")

    def commit(self) -> str:
        """The sha1 of the description."""
        digest = hashlib.sha1(dump_json(self.describe()).encode(), usedforsecurity=False)
        return digest.hexdigest()

    def capture(self) -> dict[str, Any]:
        """Nothing to bring back."""
        return {}

    def stop_production(self) -> None:
        """Nothing is stopped."""

    def start_production(self) -> None:
        """Nothing is started."""

    def end_production(self) -> None:
        """Nothing is ended."""

    def start_arm(self, start: str, arm: Arm) -> Started:
        """Check that the arm's server is healthy and read its model's name."""
        url = str(arm.settings["url"])
        health = self._engine.health(url, timeout=5.0)
        if health != "up":
            raise StartFailed(f"{start}: {url} is {health}; a healthy server must run there")
        self._urls[start] = url
        model = self._table.model
        if not model:
            try:
                models = self._engine.models(url)
            except (OSError, httpx.HTTPError) as error:
                raise StartFailed(f"{start}: {url} does not name its models: {error}") from error
            if not models:
                raise StartFailed(f"{start}: {url} serves no model")
            model = models[0]
        return Started(
            Endpoint(url=url, engine=self._table.engine, model=model), ClockCap(1, "none")
        )

    def check_arm(self, start: str) -> str | None:
        """The reason why the server cannot serve, or None; a busy server is not a dead one."""
        if self._engine.health(self._urls[start], timeout=5.0) == "down":
            return f"{self._urls[start]} does not answer any more"
        return None

    def stop_arm(self, start: str) -> None:
        """Nothing is stopped."""

    def stop_all(self) -> None:
        """Nothing is stopped."""

    def live_experiments(self) -> list[str]:
        """The servers are not this window's."""
        return []

    def quiet_problems(self) -> list[str]:
        """The machines are not this window's to judge."""
        return []

    def leftovers(self) -> list[str]:
        """Nothing was started."""
        return []
