"""The registered prompts of the probe: 32 short ones, 24 of 32K tokens, 8 of 150K, by name.

The short ones travel with the package. Long ones are cut from a user's own texts with
`dsv41 dist-gate cuts`; their corpus's folder is named by DSV41_CORPUS, and each text is pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.corpus import Corpus, find_prompt

__all__ = ["DIST_PROMPTS", "DIST_TOKENS", "ProbePrompt", "parse_subset", "probe_prompts"]

DIST_PROMPTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "short": tuple(f"dist-short-{number:02d}" for number in range(1, 33)),
        "32k": tuple(f"dist-32k-{number:02d}" for number in range(1, 25)),
        "150k": tuple(f"dist-150k-{number:02d}" for number in range(1, 9)),
    }
)
"""Subset to the names of its prompts (WIN2, "Distributional gate")."""

DIST_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"32k": 32_000, "150k": 150_000})
"""Tokens of a cut prompt by subset; another number makes other prompts."""


@dataclass(frozen=True)
class ProbePrompt:
    """One prompt of a probe: its name, the subset it belongs to, and its text."""

    name: str
    subset: str
    text: str


def parse_subset(text: str) -> tuple[str, ...]:
    """Return the subsets that `short,32k` names, in the registered order.

    Raises:
        UsageError: an unknown one, or none.
    """
    asked = [part.strip() for part in text.split(",") if part.strip()]
    for name in asked:
        if name not in DIST_PROMPTS:
            raise UsageError(f"subset {name!r}: valid: {', '.join(DIST_PROMPTS)}")
    if not asked:
        raise UsageError(f"no subset; valid: {', '.join(DIST_PROMPTS)}")
    return tuple(name for name in DIST_PROMPTS if name in asked)


def probe_prompts(
    subsets: Sequence[str], *, each: int | None = None, among: Iterable[Corpus] | None = None
) -> tuple[ProbePrompt, ...]:
    """Return the registered prompts of `subsets`, of each subset the first `each` (None: all).

    Raises:
        UsageError: an unknown subset, or no corpus has a prompt.
        MeasurementRefused: kind `prompt-pin`: a text is not the pinned one.
    """
    looked = None if among is None else tuple(among)
    return tuple(
        ProbePrompt(name, subset, find_prompt(name, looked).text)
        for subset in parse_subset(",".join(subsets))
        for name in DIST_PROMPTS[subset][:each]
    )
