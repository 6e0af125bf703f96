"""Random numbers that are the same on every Python, process and machine.

A draw is a pure function of a key: nothing is shared between requests, so that a seeded request
gives the same stream whatever ran before or beside it. (SplitMix64's mixing function.)
"""

from __future__ import annotations

import math

__all__ = ["gauss", "key_of", "mix", "uniform"]

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return 64 well-mixed bits of `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """Return one 64-bit key of several whole numbers; their order counts."""
    key = 0x5851F42D4C957F2D
    for part in parts:
        key = mix(key ^ (part & _MASK))
    return key


def uniform(key: int) -> float:
    """Return a number in [0, 1) drawn from `key`."""
    return (mix(key) >> 11) * 2.0**-53


def gauss(key: int) -> float:
    """Return a standard normal number drawn from `key` (Box-Muller)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(key)))
    return radius * math.cos(2.0 * math.pi * uniform(key ^ 0xA5A5A5A5A5A5A5A5))
