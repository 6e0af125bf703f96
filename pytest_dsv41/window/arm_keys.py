"""What is known of an arm's server as one flat set of keys, and how two arms differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..durable import dump_json

if TYPE_CHECKING:
    from .spec import Arm

__all__ = ["arm_keys", "differing", "flag_keys", "left_keys", "same_key"]

_FLAG = re.compile(r"--?[A-Za-z]")


def arm_keys(arm: Arm, argv: Sequence[str] = ()) -> dict[str, str]:
    """Return key to value: flags by their name, `env NAME`, `setting NAME`, the rest by place.

    A flag without a value is `on`; one that stands twice has both values. Values of the
    environment are as the plan has them: hashed, for they may be secrets. `argv` is the command
    line that a start of the arm was proved to have: its flags go over those that the arm states.
    """
    keys = flag_keys(arm.args)
    for name, value in arm.settings.items():
        if name == "flags" and isinstance(value, Mapping):
            # What target systemd-unit holds the server's command line against.
            stated = {flag: given for flag, given in value.items() if given is not False}
            keys |= {flag: "on" if given is True else str(given) for flag, given in stated.items()}
        else:
            keys[f"setting {name}"] = _text(value)
    keys |= flag_keys(argv)
    keys |= {f"env {name}": value for name, value in arm.env.items()}
    if arm.speculation is not None:
        keys["speculation"] = "on" if arm.speculation else "off"
    return keys


def flag_keys(args: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line, as `arm_keys` does."""
    found: dict[str, list[str]] = {}
    flag = ""
    for place, word in enumerate(args):
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            found.setdefault(flag, [])
            if equals:
                found[flag].append(value)
                flag = ""
        elif flag:
            found[flag].append(word)
        else:
            found[f"argument {place}"] = [word]
    return {name: " ".join(words) or "on" for name, words in found.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump_json(value)


def differing(one: Mapping[str, str], two: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (key, value in one, value in two) of every key that differs; `not set` for none."""
    return [
        (key, one.get(key, "not set"), two.get(key, "not set"))
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    ]


def left_keys(
    scored: Mapping[str, Any], keys: Mapping[str, str]
) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return how a server's keys leave those that it was scored with, and what they do not tell.

    First (key, value scored, value now) of every other value, then the keys that are not told. A
    key is found under every name of one meaning (`same_key`); True is a flag without a value, and
    False one that is not given.
    """
    served = {same_key(key): value for key, value in keys.items()}
    left, untold = [], []
    for key, value in scored.items():
        now = served.get(same_key(key))
        was = {True: "on", False: "not set"}[value] if isinstance(value, bool) else str(value)
        if now is None and value is not False:
            untold.append(key)
        elif now is not None and now != was:
            left.append((key, was, now))
    return left, untold


def same_key(key: str) -> str:
    """Return what a flag and a setting of one meaning share: `--kv-dtype` is `kv_dtype`."""
    bare = key.removeprefix("setting ").removeprefix("env ").lstrip("-")
    return bare.replace("-", "_").lower()
