"""How far running streams are, by what their bytes show before any of them is judged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytest_dsv41.measure.wire import Exchange
from pytest_dsv41.text import counted

__all__ = ["Progress", "decodes", "how_far"]

_ACCEPTED: Final = b'"draft_n_accepted":'


@dataclass(frozen=True)
class Progress:
    """How far a running group is.

    `rounds` are engine steps after each stream's first, by the server's own running count where it
    has one, else by the events (one an engine step in vLLM).
    """

    tokens: int
    rounds: int
    events: int
    elapsed_s: float
    tok_s: float
    finished: int
    streams: int

    @property
    def text(self) -> str:
        """It in a few words."""
        if not self.tokens:
            return f"waiting for the first token, {self.elapsed_s:.0f} s"
        done = f"{counted(self.tokens, 'token')}, {counted(self.rounds, 'round')}"
        return f"{done}, {self.tok_s:.1f} tokens/s"


def how_far(exchanges: Sequence[Exchange], started_ns: int) -> Progress:
    """Count what came of a group that began at `started_ns`."""
    elapsed = (time.monotonic_ns() - started_ns) / 1e9
    shown = [_so_far(exchange) for exchange in exchanges]
    tokens = sum(count for count, _ in shown)
    return Progress(
        tokens,
        sum(rounds for _, rounds in shown),
        sum(exchange.data_lines for exchange in exchanges),
        elapsed,
        tokens / elapsed if elapsed > 0 else 0.0,
        sum(1 for exchange in exchanges if exchange.finished),
        len(exchanges),
    )


def decodes(exchange: Exchange) -> bool:
    """Whether a stream has sent two tokens: at most one of three events is the role's."""
    exchange.digest()
    return exchange.status == 200 and exchange.data_lines >= 3


def _so_far(exchange: Exchange) -> tuple[int, int]:
    """(tokens, rounds) of one stream by the running counts in its last bytes, else by events."""
    tokens = _running_count(exchange, b'"predicted_n":')
    if tokens is not None:
        # llama.cpp: an event a token.
        return tokens, max(0, tokens - (_running_count(exchange, _ACCEPTED) or 0) - 1)
    tokens = _running_count(exchange, b'"completion_tokens":')
    if tokens is None:
        tokens = exchange.data_lines
    # vLLM: an event an engine step, beside the role's, the usage and [DONE].
    others = b'"role"' in exchange.pieces[0][1] if exchange.pieces else 0
    others += 2 if exchange.done_seen_ns else 0
    return tokens, max(0, min(tokens, exchange.data_lines - others) - 1)


def _running_count(exchange: Exchange, mark: bytes) -> int | None:
    for _, piece in reversed(exchange.pieces[-4:]):
        at = piece.rfind(mark)
        if at >= 0:
            digits = piece[at + len(mark) : at + len(mark) + 12].split(b",")[0].split(b"}")[0]
            if digits.strip().isdigit():
                return int(digits)
    return None
