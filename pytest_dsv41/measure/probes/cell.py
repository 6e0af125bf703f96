"""A probe as a cell: its prompts are made from the shape of the server that the item runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.cell import Cell, Request, Sampling
from pytest_dsv41.measure.probes.laws import MIN_RATE_TOKENS
from pytest_dsv41.measure.probes.prompts import CORPUS_CLASSES, Corpus

__all__ = ["PROBES", "Probe", "ProbeCell"]

Probe = Literal["prefill-cold", "prefill-warm", "prefill-hit", "capacity", "ladder", "depth-audit"]
PROBES: Final = (
    "prefill-cold", "prefill-warm", "prefill-hit", "capacity", "ladder", "depth-audit",
)  # fmt: skip
_GREEDY: Final = Sampling(temperature=0.0)


@dataclass(frozen=True)
class ProbeCell(Cell):
    """A cell whose prompts are made for the server: `depth` tokens, or its whole window (None).

    `prompts` only count the streams. The class of the corpus is part of the definition, so that a
    rate on one class is never compared with one on the other (law `corpus-class`).
    """

    sampling: Sampling = _GREEDY
    probe: Probe = "ladder"
    depth: int | None = None
    corpus: Corpus = "varied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe not in PROBES:
            raise ValueError(f"cell {self.name}: probe {self.probe!r}: valid: {', '.join(PROBES)}")
        if self.corpus not in CORPUS_CLASSES:
            valid = ", ".join(CORPUS_CLASSES)
            raise ValueError(f"cell {self.name}: corpus {self.corpus!r}: valid: {valid}")
        if self.depth is not None and self.depth < 64:
            raise ValueError(f"cell {self.name}: depth {self.depth}: at least 64 tokens")
        if self.depth is not None and self.probe == "capacity":
            raise ValueError(f"cell {self.name}: capacity is measured at the whole window")
        if self.probe in ("ladder", "depth-audit") and self.max_tokens < MIN_RATE_TOKENS:
            raise ValueError(
                f"cell {self.name}: law-rate-tokens: {self.max_tokens} tokens; a rate needs "
                f"{MIN_RATE_TOKENS}"
            )
        if self.api == "chat" and self.sampling.thinking is not False:
            raise ValueError(f"cell {self.name}: law-thinking: a chat forbids thinking")
        if self.sampling.temperature != 0:
            raise ValueError(f"cell {self.name}: a probe is greedy: temperature 0")
        if self.sampling.cache == "any":
            raise ValueError(f"cell {self.name}: law-salt: a probe proves what was cached")

    def definition(self) -> dict[str, Any]:
        """As `Cell.definition`, with the probe, its depth and the class of its corpus."""
        return {
            **super().definition(),
            "probe": self.probe,
            "depth": "window" if self.depth is None else self.depth,
            "corpus": self.corpus,
        }

    def text(self, prompt: str) -> str:
        """Raise: a probe's text is made for the server it runs on."""
        raise UsageError(f"cell {self.name}: {prompt} is made from the server's own shape")

    def depth_in(self, window: int) -> int:
        """Return the prompt's tokens in a window.

        Raises:
            UsageError: the window holds no such prompt and its answer.
        """
        depth = window - self.max_tokens if self.depth is None else self.depth
        if depth < 64 or depth + self.max_tokens > window:
            raise UsageError(
                f"cell {self.name}: {depth} prompt tokens and {self.max_tokens} of answer; the "
                f"server's window is {window}"
            )
        return depth

    def salted(self, requests: tuple[Request, ...], salt: str) -> tuple[Request, ...]:
        """Return the requests under salts of their own (law `salt`)."""
        return tuple(
            replace(request, salt=f"{salt}-m{member}", name=f"{self.name}-{member}")
            for member, request in enumerate(requests)
        )
