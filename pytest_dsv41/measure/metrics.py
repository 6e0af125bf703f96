"""The metrics and their formulas (RULES section 0): unit, orientation, where the figure comes from.

Each formula takes what the streams showed (client) and what the server counted (server) and
returns a number or the reason why there is none. Nothing here reads a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dsv41.engines import Server
from pytest_dsv41.measure.stream import StreamRecord

__all__ = ["METRICS", "Metric", "Missing", "Value", "values_of"]


@dataclass(frozen=True)
class Missing:
    """Why a metric has no value here, in one line."""

    reason: str


Formula = Callable[[Sequence[StreamRecord], Server], float | Missing]


@dataclass(frozen=True)
class Metric:
    """One metric: its name, unit, which way is better, and its formula."""

    name: str
    unit: str
    lower_is_better: bool
    source: str
    """`server` or `client`: whose clock and counts the figure rests on."""
    needs_speculation: bool
    doc: str
    formula: Formula | None = None
    """None: cells record it themselves."""


@dataclass(frozen=True)
class Value:
    """A measured figure with everything it was made of."""

    value: float
    unit: str
    lower_is_better: bool
    source: str
    parts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the value for `values.jsonl`."""
        return {
            "value": self.value,
            "unit": self.unit,
            "lower_is_better": self.lower_is_better,
            "source": self.source,
            "parts": dict(self.parts),
        }


def _rounds(_streams: Sequence[StreamRecord], server: Server) -> float | Missing:
    if server.rounds is None:
        return Missing("the server does not tell how many drafts it accepted")
    if server.rounds <= 0:
        return Missing(f"{server.rounds} rounds: too few tokens")
    return float(server.rounds)


def _ms_per_round(streams: Sequence[StreamRecord], server: Server) -> float | Missing:
    rounds = _rounds(streams, server)
    if isinstance(rounds, Missing):
        return rounds
    if server.decode_ms is None:
        return Missing("the server does not tell its decode time")
    return server.decode_ms / rounds


def _accepted(streams: Sequence[StreamRecord], server: Server) -> float | Missing:
    rounds = _rounds(streams, server)
    if isinstance(rounds, Missing):
        return rounds
    if not server.speculates or server.accepted is None:
        return Missing("the server does not speculate")
    return server.accepted / rounds


def _ttft(streams: Sequence[StreamRecord], _server: Server) -> float | Missing:
    times: list[float] = []
    for stream in streams:
        if stream.first_merged:
            return Missing("ttft-merged: the first token lay unread beside later ones")
        times.append(stream.ttft_ms)
    return sum(times) / len(times)


def _decode_tok_s(streams: Sequence[StreamRecord], _server: Server) -> float | Missing:
    tokens = 0
    for stream in streams:
        if stream.first_tokens is None:
            return Missing("nothing tells how many tokens the first event held")
        if stream.first_merged:
            return Missing("ttft-merged: the first token lay unread beside later ones")
        tokens += stream.completion_tokens - stream.first_tokens
    span = max(s.last_token_ns for s in streams) - min(s.first_token_ns for s in streams)
    if span <= 0 or tokens <= 0:
        return Missing("all tokens came at one time")
    return tokens * 1e9 / span


def _client_tok_s(streams: Sequence[StreamRecord], _server: Server) -> float | Missing:
    span = max(s.last_token_ns for s in streams) - min(s.start_ns for s in streams)
    if span <= 0:
        return Missing("no time passed between request and last token")
    return sum(s.completion_tokens for s in streams) * 1e9 / span


def _prefill_tok_s(streams: Sequence[StreamRecord], server: Server) -> float | Missing:
    if any(stream.prompt_tokens is None for stream in streams):
        return Missing("the server does not tell the prompt's tokens")
    if server.cached_tokens is None:
        return Missing("the server does not tell which prompt tokens were cached")
    if any(stream.first_merged for stream in streams):
        return Missing("ttft-merged: the first token lay unread beside later ones")
    fresh = sum(stream.prompt_tokens or 0 for stream in streams) - server.cached_tokens
    span = max(s.first_token_ns for s in streams) - min(s.start_ns for s in streams)
    if span <= 0 or fresh <= 0:
        return Missing(f"{fresh} prompt tokens were not cached")
    return fresh * 1e9 / span


METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric(
            "ms_per_round", "ms", True, "server", False,
            "server decode time over rounds, pooled over the group", _ms_per_round,
        ),
        Metric(
            "accepted_per_round", "tokens/round", False, "server", True,
            "draft tokens accepted over rounds, pooled over the group", _accepted,
        ),
        Metric(
            "ttft_ms", "ms", True, "client", False,
            "request written to first token of any channel; a group's mean", _ttft,
        ),
        Metric(
            "decode_tok_s", "tokens/s", False, "client", False,
            "tokens after the first event over the time from first to last token", _decode_tok_s,
        ),
        Metric(
            "client_tok_s", "tokens/s", False, "client", False,
            "completion tokens over the time from request written to last token", _client_tok_s,
        ),
        Metric(
            "prefill_tok_s", "tokens/s", False, "client", False,
            "prompt tokens that were not cached over the time to the first token", _prefill_tok_s,
        ),
        Metric(
            "rounds", "rounds", True, "server", False,
            "engine steps that yielded an own token after the first", _rounds,
        ),
        Metric(
            "fairness", "ratio", False, "client", False,
            "the slowest stream's decode rate over the fastest's, where a probe records it",
        ),
    )
}  # fmt: skip
"""Every known metric by name."""


_TIMES: Final[dict[str, tuple[Callable[[StreamRecord], str], ...]]] = {
    "ttft_ms": (lambda stream: stream.first_source,),
    "prefill_tok_s": (lambda stream: stream.first_source,),
    "decode_tok_s": (lambda stream: stream.first_source, lambda stream: stream.last_source),
    "client_tok_s": (lambda stream: stream.last_source,),
}
"""Whose stamps a value rests on, which its record says: the kernel's, or the read's own."""


def values_of(
    streams: Sequence[StreamRecord], server: Server
) -> tuple[dict[str, Value], dict[str, str]]:
    """Return (values by metric, reasons of the metrics that have none)."""
    parts: dict[str, Any] = {
        "server_decode_ms": server.decode_ms,
        "rounds": server.rounds,
        "drafts": server.drafts,
        "accepted": server.accepted,
        "tokens": server.tokens,
        "cached_tokens": server.cached_tokens,
    }
    values: dict[str, Value] = {}
    missing: dict[str, str] = {}
    for metric in METRICS.values():
        if metric.formula is None:
            continue
        figure = metric.formula(streams, server)
        if isinstance(figure, Missing):
            missing[metric.name] = figure.reason
            continue
        own = dict(parts)
        if metric.name == "ttft_ms":
            times = [stream.ttft_ms for stream in streams]
            own |= {"members_ms": times, "largest_ms": max(times)}
        sources = _TIMES.get(metric.name, ())
        if sources:
            own["stamps"] = sorted({of(stream) for of in sources for stream in streams})
        values[metric.name] = Value(figure, metric.unit, metric.lower_is_better, metric.source, own)
    return values, missing
