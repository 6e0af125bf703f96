"""The identity of the prompts behind a value: what may be paired, pooled and compared at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

__all__ = ["prompt_identity"]

_SHA256 = re.compile(r"[0-9a-f]{64}")


def prompt_identity(hashes: Iterable[str]) -> str:
    """Return the identity of the prompts of one request group (RULES section 0).

    Args:
        hashes: the sha256 of each member's prompt, 64 lower-case hex digits.

    Returns:
        One hash itself; of several the sha256 of the sorted hashes joined by a newline, with none
        at the end and duplicates kept.

    Raises:
        ValueError: no hash, or one of another form.
    """
    if isinstance(hashes, str):
        raise ValueError("prompt_identity takes a list of hashes, got one text")
    members = list(hashes)
    if not members:
        raise ValueError("prompt_identity needs at least one hash")
    for member in members:
        if not isinstance(member, str) or not _SHA256.fullmatch(member):
            raise ValueError(
                f"prompt identity {member!r} is not a sha256 in 64 lower-case hex digits"
            )
    if len(members) == 1:
        return members[0]
    return hashlib.sha256("\n".join(sorted(members)).encode("ascii")).hexdigest()
