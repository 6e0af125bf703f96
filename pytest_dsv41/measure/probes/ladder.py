"""Decode by depth and by concurrency: what each stream gets, and what all of them get together.

Three simultaneous streams may share the server fairly or by lottery, and no aggregate shows which:
so a rung has the rate of every stream, the aggregate by the wall clock (prefill included), that of
the decode phase, and the fairness. FRANK-ARCHON "The decode ladder".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure.group import GroupResult
from pytest_dsv41.measure.probes.laws import check_rates
from pytest_dsv41.measure.stream import StreamRecord

__all__ = ["LADDER_TOKENS", "Rung", "fairness", "jain", "rung_of", "stream_rate"]

LADDER_TOKENS: Final = 512
"""Tokens that each stream generates."""


@dataclass(frozen=True)
class Rung:
    """One rung. Rates are in tokens/s; None where the server does not tell its part."""

    depth: int
    tokens: tuple[int, ...]
    """What each stream generated."""
    corpus: str
    rates: tuple[float, ...]
    """Of each stream: tokens after its first event over its own decode time."""
    wall_tok_s: float
    """All tokens over the time from the first request written to the last token."""
    decode_tok_s: float
    """Tokens after the first events over the time from the first token to the last."""
    engine_tok_s: float | None
    """What a stream gets by the engine's own decode time, on average."""
    client_stream_tok_s: float
    """The same by the client's clock."""
    accepted_share: float | None
    """Accepted draft tokens over drafted ones."""

    @property
    def fairness(self) -> float:
        """The slowest stream's rate over the fastest's: 1 is fair."""
        return fairness(self.rates)

    @property
    def jain(self) -> float:
        """Jain's index of the rates: 1 is fair, 1/n is all for one."""
        return jain(self.rates)

    @property
    def disagreement(self) -> float | None:
        """The client's rate of a stream over the engine's, less 1; None without the engine's."""
        if self.engine_tok_s is None:
            return None
        return self.client_stream_tok_s / self.engine_tok_s - 1.0

    def to_json(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "streams": len(self.rates),
            "depth": self.depth,
            "tokens": list(self.tokens),
            "corpus": self.corpus,
            "rates": list(self.rates),
            "wall_tok_s": self.wall_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "fairness": self.fairness,
            "jain": self.jain,
            "engine_tok_s": self.engine_tok_s,
            "client_stream_tok_s": self.client_stream_tok_s,
            "accepted_share": self.accepted_share,
        }


def fairness(rates: Sequence[float]) -> float:
    """Return the least rate over the largest."""
    return min(rates) / max(rates)


def jain(rates: Sequence[float]) -> float:
    """Return Jain's fairness index, (Σ r)² / (n Σ r²)."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def stream_rate(stream: StreamRecord) -> float:
    """Return one stream's decode rate in tokens/s.

    Raises:
        MeasurementRefused: kind `no-decode_tok_s`: its first event's tokens or time are not known.
    """
    per_token = stream.ms_per_token
    if stream.first_merged or not per_token:
        raise MeasurementRefused(
            "no-decode_tok_s",
            "a stream's first token has no time or no count of its own: no rate",
        )
    return 1e3 / per_token


def rung_of(result: GroupResult, *, depth: int, corpus: str) -> Rung:
    """Return the rung that a measured group is.

    Raises:
        MeasurementRefused: kind `law-rate-tokens`, or a rate that could not be read.
    """
    check_rates(result.streams)
    rates = tuple(stream_rate(stream) for stream in result.streams)
    for name in ("client_tok_s", "decode_tok_s"):
        if name not in result.values:
            raise MeasurementRefused(f"no-{name}", result.missing.get(name, "not measured"))
    server = result.server
    later = sum(s.completion_tokens - (s.first_tokens or 0) for s in result.streams)
    span_ms = sum((s.last_token_ns - s.first_token_ns) / 1e6 for s in result.streams)
    engine = None
    if server.decode_ms:
        engine = (server.tokens - server.requests) * 1e3 / server.decode_ms
    share = None
    if server.draft_tokens:
        share = (server.accepted or 0) / server.draft_tokens
    return Rung(
        depth=depth,
        tokens=tuple(stream.completion_tokens for stream in result.streams),
        corpus=corpus,
        rates=rates,
        wall_tok_s=result.values["client_tok_s"].value,
        decode_tok_s=result.values["decode_tok_s"].value,
        engine_tok_s=engine,
        client_stream_tok_s=later * 1e3 / span_ms,
        accepted_share=share,
    )
