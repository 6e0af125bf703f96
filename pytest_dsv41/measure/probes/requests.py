"""What each probe sends: the same requests from a window's cell and from the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pytest_dsv41.measure.cell import Request, Sampling
from pytest_dsv41.measure.probes.prompts import Fitted, PromptMaker, filler, fit, marker

__all__ = ["PREFILL_TOKENS", "audit_request", "ladder_requests", "prefill_groups"]

PREFILL_TOKENS: Final = 8

_SECTIONS: Final = 12
_COLD: Final = Sampling(temperature=0.0, cache="cold")


def prefill_groups(
    maker: PromptMaker, probe: str, depth: int, *, salt: str
) -> list[tuple[Request, ...]]:
    """Return the groups of a prefill probe in their order; the last one is the measurement.

    `prefill-cold` sends one cold prompt. `prefill-warm` sends another of that length before it, so
    that the server's own caches are warm and the prompt's are not. `prefill-hit` sends the same
    prompt twice, and the second must come from the prefix cache. All is proved when measured.
    """
    prompt = maker.plain(depth)

    def one(made: Fitted, cache: Sampling, own: str) -> tuple[Request, ...]:
        return (maker.request(made, PREFILL_TOKENS, sampling=cache, salt=own),)

    measured = one(prompt, _COLD, f"{salt}-cold")
    if probe == "prefill-cold":
        return [measured]
    if probe == "prefill-warm":
        return [one(maker.plain(depth, seed=1), _COLD, f"{salt}-before"), measured]
    fill, warm = replace(_COLD, cache="fill"), replace(_COLD, cache="warm")
    return [one(prompt, fill, f"{salt}-hit"), one(prompt, warm, f"{salt}-hit")]


def ladder_requests(
    maker: PromptMaker, streams: int, depth: int, tokens: int, *, salt: str
) -> tuple[Request, ...]:
    """Return one rung's requests: greedy, cold, each stream on a text of its own."""
    return tuple(
        maker.request(
            maker.plain(depth, seed=member), tokens, sampling=_COLD, salt=f"{salt}-m{member}"
        )
        for member in range(streams)
    )


def audit_request(
    maker: PromptMaker, depth: int, tokens: int, *, salt: str
) -> tuple[Request, Sequence[str]]:
    """Return the request of a depth audit, and the titles that an ordered index has to name.

    A text is continued, so its index is begun for it; a chat is asked for the whole index.
    """
    titles = [f"{place + 1:02d}: {marker(place, 7)}" for place in range(_SECTIONS)]
    if maker.api == "completions":
        tail = f"\n\nIndex of all sections:\n\nSection {titles[0]}\nSection"
    else:
        tail = (
            "\n\nWrite an index of this text: each section with its title, in order, a line each."
        )

    def make(piece: str) -> str:
        size = len(piece) // _SECTIONS
        parts = [
            f"Section {title}\n\n{piece[place * size : (place + 1) * size]}"
            for place, title in enumerate(titles)
        ]
        return "\n\n".join(parts) + tail

    text, size = fit(make, filler(maker.corpus, depth), depth, maker.count)
    sampling = replace(_COLD, ignore_eos=False)
    stop = (f"Section {_SECTIONS + 1}",) if maker.api == "completions" else ()
    request = maker.request(
        Fitted(text, size), tokens, sampling=sampling, stop=(*stop, "\n\n") if stop else (),
        salt=salt,
    )  # fmt: skip
    return request, titles[1:] if maker.api == "completions" else titles
