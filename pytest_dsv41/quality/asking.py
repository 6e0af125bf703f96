"""One server over one run: asked for next tokens, each answer checked, the same one throughout.

A server may be restarted or replaced between two positions, and a proxy may send the next request
to another one. What is asked again at the end, and what every answer says of its model, shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import httpx

from pytest_dsv41.engines import Greedy, NextToken, Snapshot, get_engine
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure.group import Endpoint
from pytest_dsv41.quality.kl import checked_vector
from pytest_dsv41.text import one_line

__all__ = ["AskedServer"]

_ROUNDING = 1e-3
"""Nats by which a log-probability may differ from itself in another place of one answer."""
_LAST_S = 60.0


class AskedServer:
    """The server at an endpoint, as it was before the first question.

    `model` is the name that requests carry, `version` what the server says of itself, empty where
    it does not tell. Safe to share between threads, each with a client of its own.

    Raises:
        UsageError: the endpoint's dialect is not known.
        MeasurementRefused: kind `models`.
    """

    def __init__(self, endpoint: Endpoint, client: httpx.Client) -> None:
        self.engine = get_engine(endpoint.engine)
        self._url = endpoint.url
        models = self.engine.models(self._url, client=client)
        self._models = sorted(models)
        self.model = endpoint.model or models[0]
        self.version = self.engine.version(self._url, client=client)
        self._before = self._counters(client)
        self._lock = threading.Lock()
        self._answered: str | None = None

    def next_token(
        self,
        ids: Sequence[int],
        top_n: int,
        *,
        cache: str,
        salt: str,
        client: httpx.Client,
        timeout: float = 600.0,
    ) -> NextToken:
        """Return the answer to `ids`, its list checked, in order and cut to `top_n` entries.

        `cache` and `salt` as in `Engine.dress`.

        Raises:
            MeasurementFailed: kinds of `Engine.next_token`.
            MeasurementRefused: its kinds and those of `checked_vector`; `warm-cache` (tokens came
                from a cache where none may), `other-server` (another model answered), `bad-answer`
                (the list contradicts what is said of the token that was chosen).
        """
        found = self.engine.next_token(
            self._url,
            self.model,
            ids,
            top_n,
            cache=cache,
            salt=salt,
            timeout=timeout,
            client=client,
        )
        vector = checked_vector(found.top, top_n=top_n)
        _refuse_contradiction(found)
        self.check(found, cache)
        return replace(found, top=vector)

    def check(self, found: NextToken | Greedy, cache: str) -> None:
        """Refuse an answer of another model than the first, or one that came from a cache.

        Raises:
            MeasurementRefused: kinds `other-server`, `warm-cache`.
        """
        cached = found.in_band.cached_tokens
        if cache != "warm" and cached:
            raise MeasurementRefused("warm-cache", f"{cached} tokens came from a cache")
        if found.model is None:
            return
        with self._lock:
            first = self._answered = self._answered or found.model
        if found.model != first:
            raise MeasurementRefused(
                "other-server",
                f"the model {one_line(found.model, 80)} answered, and {one_line(first, 80)} before",
            )

    def prove_same(self, client: httpx.Client) -> None:
        """Refuse where the server is another one now, or was started anew.

        Raises:
            MeasurementRefused: kinds `other-server`, `reset`, `missing-family`, `models`.
        """
        # Whoever else is served may keep it busy, and a long run hangs on this one answer.
        models = sorted(self.engine.models(self._url, timeout=_LAST_S, client=client))
        version = self.engine.version(self._url, client=client)
        for what, was, now in (
            ("models", ", ".join(self._models), ", ".join(models)),
            ("version", self.version, version),
        ):
            if was != now and was and now:
                raise MeasurementRefused(
                    "other-server",
                    f"its {what} changed from {one_line(was, 80)} to {one_line(now, 80)} meanwhile",
                )
        after = self._counters(client)
        if self._before is not None and after is not None:
            self.engine.same_server(self._before, after)

    def _counters(self, client: httpx.Client) -> Snapshot | None:
        """What the server counts, where it counts: a run that needs counters asks for them."""
        try:
            return self.engine.scrape(self._url, client=client)
        except MeasurementRefused:
            return None


def _refuse_contradiction(found: NextToken) -> None:
    if found.chosen is None:
        return
    token, value = found.chosen
    listed = dict(found.top).get(token)
    if listed is not None:
        if not abs(listed - value) <= _ROUNDING:
            raise MeasurementRefused(
                "bad-answer", f"token {token} was chosen at {value:g} and is listed at {listed:g}"
            )
    elif not value <= min(logp for _, logp in found.top) + _ROUNDING:
        raise MeasurementRefused(
            "bad-answer",
            f"token {token} was chosen at {value:g} and is not in the list, which holds less "
            "likely ones",
        )
