"""What is known of an arm's server as one flat set of keys, and how two arms differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..durable import dump_json

if TYPE_CHECKING:
    from .spec import Arm

__all__ = ["arm_keys", "differing", "same_key"]

_FLAG = re.compile(r"--?[A-Za-z]")


def arm_keys(arm: Arm, argv: Sequence[str] = ()) -> dict[str, str]:
    """Return key to value: flags by their name, `env NAME`, `setting NAME`, the rest by place.

    A flag without a value is `on`; one that stands twice has both values. Values of the
    environment are as the plan has them: hashed, for they may be secrets. `argv` is the command
    line that a start of the arm was proved to have: its flags go over those that the arm states.
    """
    keys = _flags(arm.args)
    for name, value in arm.settings.items():
        if name == "flags" and isinstance(value, Mapping):
            # What target systemd-unit holds the server's command line against.
            stated = {flag: given for flag, given in value.items() if given is not False}
            keys |= {flag: "on" if given is True else str(given) for flag, given in stated.items()}
        else:
            keys[f"setting {name}"] = _text(value)
    keys |= _flags(argv)
    keys |= {f"env {name}": value for name, value in arm.env.items()}
    if arm.speculation is not None:
        keys["speculation"] = "on" if arm.speculation else "off"
    return keys


def _flags(args: Sequence[str]) -> dict[str, str]:
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


def same_key(key: str) -> str:
    """Return what a flag and a setting of one meaning share: `--kv-dtype` is `kv_dtype`."""
    bare = key.removeprefix("setting ").removeprefix("env ").lstrip("-")
    return bare.replace("-", "_").lower()
