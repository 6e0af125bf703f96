"""Proof that a started server is the one that was asked for: its argv, environment and ledger.

A server that answers proves nothing: one may have been started from another file, may echo
whatever model it is asked for, or may fall back to a default in silence. What is asked for is held
against what the kernel says the process was given, and against what the server printed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_dsv41.errors import SpecError
from pytest_dsv41.text import one_line

from .masking import masked_words
from .memory import Law, Ledger, check_ledger, printed_dtype, read_law
from .memory.ledger import SIZES

__all__ = ["Expected", "flag_values", "ledger_faults", "mismatches"]

_KEYS: Final = ("flags", "ledger", "model")
_SIZE_FLAGS: Final = ("--vram-kv-mib", "--vram-weights-mib")
# Flag names to the ledger's subject and fact that must be their value.
_STATED: Final[Mapping[str, tuple[tuple[tuple[str, ...], str, str], ...]]] = {
    "llamacpp": (
        (("--cache-type-k", "-ctk"), "kv", "K dtype"),
        (("--cache-type-v", "-ctv"), "kv", "V dtype"),
    ),
    "radiance": (
        (("--max-num-seqs",), "kv cache", "sequences"),
        (("--max-model-len",), "kv cache", "tokens each"),
    ),
}
# llama.cpp rounds the context of each sequence up to a multiple of this.
_CTX_STEP: Final = 256


@dataclasses.dataclass(frozen=True)
class Expected:
    """What an arm's server must show: flags of its argv, ledger facts, the served model's name.

    A flag's value is its text; True: it stands there without one; False: it is absent.
    """

    flags: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    ledger: Mapping[str, str | float] = dataclasses.field(default_factory=dict)
    model: str = ""

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> Expected:
        """Read an arm's `settings`.

        Raises:
            SpecError: an unknown key, or a value of another type; names the key.
        """
        for key in settings:
            if key not in _KEYS:
                raise SpecError(f"{where}.{one_line(key, 60)}: unknown; valid: {', '.join(_KEYS)}")
        flags, ledger = settings.get("flags", {}), settings.get("ledger", {})
        model = settings.get("model", "")
        for key, table in (("flags", flags), ("ledger", ledger)):
            if not isinstance(table, Mapping):
                raise SpecError(f"{where}.{key}: expected a table")
            for name, value in table.items():
                if not isinstance(value, (str, int, float)):
                    raise SpecError(f"{where}.{key}.{one_line(name, 60)}: expected text or number")
                if key == "flags" and not name.startswith("-"):
                    raise SpecError(
                        f"{where}.flags.{one_line(name, 60)}: no flag; valid: a name that begins "
                        "with '-'"
                    )
        if not isinstance(model, str):
            raise SpecError(f"{where}.model: expected text")
        return cls(
            flags={n: v if isinstance(v, bool) else str(v) for n, v in flags.items()},
            ledger=dict(ledger),
            model=model,
        )


def flag_values(argv: Sequence[str], name: str) -> list[str | bool]:
    """Return every value that `--name VALUE` or `--name=VALUE` has; True where none follows."""
    found: list[str | bool] = []
    for index, word in enumerate(argv):
        if word.startswith(f"{name}="):
            found.append(word.partition("=")[2])
        elif word == name:
            after = argv[index + 1] if index + 1 < len(argv) else None
            number = after is not None and re.fullmatch(r"-\d[\d.]*", after)
            bare = after is None or (after.startswith("-") and not number)
            found.append(True if bare or after is None else after)
    return found


def mismatches(
    expected: Expected,
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    wanted_environ: Mapping[str, str],
    optional_environ: Mapping[str, str],
    models: Sequence[str],
    ledger: Ledger | None,
    law: Law | None = None,
) -> list[str]:
    """Return what does not fit, one line each; empty means proved.

    `wanted_environ` must be in the process's environment, `optional_environ` must be equal where
    the process has it (a script may read a file without exporting it). Values of the environment
    are never shown. `law` is that of the model, whose pages the ledger must show; None: the shipped
    one, where its pages are shown.
    """
    found: list[str] = []
    for name, value in expected.flags.items():
        given = flag_values(argv, name)
        if value is False:
            if given:
                found.append(f"{name} is given, and must not be")
        elif value is True:
            if not given:
                found.append(f"{name} is not given")
        elif set(given) != {value}:
            masked = [one_line(masked_words([name, str(one)])[1], 80) for one in given]
            wanted = one_line(masked_words([name, str(value)])[1], 80)
            found.append(f"{name} is {' and '.join(masked) or 'nothing'}, not {wanted}")
    for name, value in wanted_environ.items():
        if environ.get(name) != value:
            what = "is another" if name in environ else "is missing"
            found.append(f"{name} {what} in the environment of the main process")
    found += [
        f"{name} is another in the environment of the main process"
        for name, value in optional_environ.items()
        if name in environ and environ[name] != value and name not in wanted_environ
    ]
    if expected.model and expected.model not in models:
        shown = ", ".join(one_line(name, 80) for name in models) or "nothing"
        found.append(f"/v1/models lists {shown}, not {one_line(expected.model, 80)}")
    if ledger is None:
        if expected.ledger:
            found.append("the engine has no boot ledger that could be read")
        return found
    return found + _expected_facts(expected.ledger, ledger) + ledger_faults(ledger, argv, law)


def ledger_faults(ledger: Ledger, argv: Sequence[str], law: Law | None = None) -> list[str]:
    """Return where a ledger disagrees with itself, the law or the flags of `argv`, one line each.

    `law`: as `mismatches`.
    """
    sizes = {
        name: float(values[-1])
        for name in _SIZE_FLAGS
        if (values := flag_values(argv, name)) and _number(values[-1]) is not None
    }
    found = check_ledger(ledger, sizes)
    for names, subject, fact_name in _STATED.get(ledger.dialect, ()):
        given = [value for name in names for value in flag_values(argv, name)]
        if not given:
            continue
        found += _unequal(ledger, f"{subject} {fact_name}", given[-1], f"{names[0]} says")
    if ledger.dialect == "llamacpp":
        found += _context(ledger, argv)
    if ledger.dialect == "radiance":
        found += _cache_dtype(ledger, argv, law)
    return found


def _cache_dtype(ledger: Ledger, argv: Sequence[str], given: Law | None) -> list[str]:
    """What the printed pages say of the KV cache's dtype against its flag.

    Pages that no dtype of the shipped law has are another model's, and say nothing.
    """
    law = given or read_law("radiance")
    group, flag = law.groups[0], law.flags.get("dtype", "")
    asked, printed = flag_values(argv, flag), printed_dtype(law, ledger)
    if printed is None:
        none = [f"ledger: its pages are those of no dtype of the law ({', '.join(law.dtypes)})"]
        return none if given is not None else []
    if not asked or printed == asked[-1]:
        return []
    return [
        f"ledger: {group.name} has pages of {group.page_kib[printed]:.2f} KiB, which is "
        f"{printed}; {flag} says {one_line(str(asked[-1]), 40)}"
    ]


def _context(ledger: Ledger, argv: Sequence[str]) -> list[str]:
    given = [v for name in ("--ctx-size", "-c") for v in flag_values(argv, name)]
    asked = _number(given[-1]) if given else None
    seqs = max(
        (ledger.number(s, "sequences") or 1 for s in ledger.subjects("sequences")), default=1
    )
    printed = ledger.number("context", "n_ctx")
    # 0 asks for the model's own.
    if not asked or printed is None or 0 <= printed - asked < _CTX_STEP * seqs:
        return []
    return [f"ledger: context n_ctx is {printed:,.0f}; --ctx-size says {asked:,.0f}"]


def _expected_facts(wanted: Mapping[str, str | float], ledger: Ledger) -> list[str]:
    found: list[str] = []
    for key, value in wanted.items():
        known = _facts(ledger, key)
        if not known:
            missing = (
                f"; the ledger is missing {', '.join(ledger.missing)}" if ledger.missing else ""
            )
            found.append(f"ledger: {one_line(key, 80)} is not printed{missing}")
        found += _unequal(ledger, key, value, "the arm says")
    return found


def _facts(ledger: Ledger, key: str) -> list[tuple[str, str | float, str, float]]:
    """The facts called `subject name`; a subject's kind in parentheses may be left out."""
    return [
        (f"{fact.subject} {fact.name}", fact.value, fact.unit, fact.rounding)
        for fact in ledger.facts
        if key in (f"{fact.subject} {fact.name}", f"{fact.subject.split(' (')[0]} {fact.name}")
    ]


def _unequal(ledger: Ledger, key: str, value: str | float | bool, who: str) -> list[str]:
    found = []
    for name, printed, unit, rounding in _facts(ledger, key):
        if isinstance(printed, str):
            same = printed == str(value)
        else:
            wanted = _mib(value) if unit == "MiB" else _number(value)
            same = wanted is not None and abs(printed - wanted) <= rounding + 1e-9 * abs(wanted)
        if not same:
            shown = printed if isinstance(printed, str) else f"{printed:,.10g}"
            # A size that was asked for with its unit is shown with one.
            told = f" {unit}" if unit == "MiB" and isinstance(value, str) else ""
            found.append(
                f"ledger: {name} is {one_line(str(shown), 80)}{told}; {who} "
                f"{one_line(str(value), 80)}"
            )
    return found


def _mib(value: str | float | bool) -> float | None:
    """A size in MiB: a number, or a text with its unit as a server prints it, such as 26.00 KiB."""
    with_unit = re.fullmatch(r"([\d.]+) ?(KiB|MiB|GiB)", value) if isinstance(value, str) else None
    if with_unit is None:
        return _number(value)
    number = _number(with_unit[1])
    return None if number is None else number * SIZES[with_unit[2]]


def _number(value: str | float | bool) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
