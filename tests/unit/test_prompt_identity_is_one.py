"""One prompt identity for all rooms: what is measured, decided and archived is compared by it."""

from __future__ import annotations

import hashlib

from pytest_dsv41 import archive, decision_v2, identity, measure

A, B = "a" * 64, "b" * 64


def test_every_room_has_the_same_function() -> None:
    assert {
        archive.prompt_identity,
        decision_v2.prompt_identity,
        measure.prompt_identity,
    } == {identity.prompt_identity}


def test_it_is_the_sha256_of_the_sorted_members_joined_by_a_newline() -> None:
    # RULES section 0: one is itself; no newline at the end; duplicates kept; any iterable.
    assert identity.prompt_identity([A]) == A
    joined = hashlib.sha256(f"{A}\n{A}\n{B}".encode()).hexdigest()
    assert identity.prompt_identity(iter([B, A, A])) == joined
