"""Is what a server writes at depth still text: no loops, no token that fills all, in order?

A model whose attention state is corrupt at depth still streams at full speed. The audit reads what
came: how much of it stood before, what share its commonest token has, whether it is whole UTF-8,
and whether an index of the prompt's sections names them in order. FRANK-ARCHON "Gates".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pytest_dsv41.measure.probes.capacity import Check
from pytest_dsv41.measure.probes.laws import repetition

__all__ = ["AUDIT_TOKENS", "Audit", "AuditLimits", "audit_answer", "in_order"]

AUDIT_TOKENS: Final = 512
_MIN_TOKENS: Final = 32


@dataclass(frozen=True)
class AuditLimits:
    """What an answer must keep. Shares are fractions.

    An index of many sections repeats its own form, so half of it may stand before; a loop repeats
    nearly all. `found` is the least share of the expected titles that must be named.
    """

    repetition_max: float = 0.5
    one_token_max: float = 0.25
    found_min: float = 0.5


@dataclass(frozen=True)
class Audit:
    """What was seen in one answer, and the checks made of it."""

    tokens: int
    repetition: float
    one_token: float
    broken: int
    found: int
    expected: int
    ordered: bool
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """PASS or FAIL."""
        return "PASS" if all(check.passed for check in self.checks) else "FAIL"

    @property
    def reason(self) -> str:
        """The checks that do not hold, in one line."""
        return "; ".join(f"{c.name}: {c.told}" for c in self.checks if not c.passed)

    def to_json(self) -> dict[str, Any]:
        """Return it for a record; there is no text in it."""
        return {**asdict(self), "verdict": self.verdict}


def in_order(text: str, titles: Sequence[str]) -> list[int]:
    """Return which titles the text names, by place in `titles`, as it first names them."""
    at = [(text.find(title), place) for place, title in enumerate(titles)]
    return [place for position, place in sorted(at) if position >= 0]


def audit_answer(
    text: str,
    tokens: Sequence[int],
    titles: Sequence[str],
    limits: AuditLimits = AuditLimits(),
) -> Audit:
    """Audit one answer.

    Args:
        text: the answer.
        tokens: the answer's token ids, as the server's tokenizer makes them.
        titles: what an ordered index of the prompt names, in order.
        limits: what is kept.
    """
    stood = repetition(tokens)
    commonest = max(Counter(tokens).values(), default=0)
    share = commonest / len(tokens) if tokens else 1.0
    broken = text.count("�") + sum(char < " " and char not in "\t\n\r" for char in text)
    named = in_order(text, titles)
    ordered = named == sorted(named)
    enough = len(named) >= limits.found_min * len(titles)
    checks = (
        Check("length", len(tokens) >= _MIN_TOKENS, f"{len(tokens)} tokens"),
        Check(
            "repetition", stood <= limits.repetition_max,
            f"{100 * stood:.1f} % of the 8-token runs stood before, at most "
            f"{100 * limits.repetition_max:g} %",
        ),
        Check(
            "one-token share", share <= limits.one_token_max,
            f"the commonest token is {100 * share:.1f} % of the answer, at most "
            f"{100 * limits.one_token_max:g} %",
        ),
        Check("UTF-8", broken == 0, f"{broken} broken or control characters"),
        Check(
            "expected order", ordered and enough,
            f"{len(named)} of {len(titles)} sections named, "
            f"{'in order' if ordered else 'out of order'}",
        ),
    )  # fmt: skip
    return Audit(len(tokens), stood, share, broken, len(named), len(titles), ordered, checks)
