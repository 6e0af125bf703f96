"""The knob gate: a kernel limit must clear a floor before a server starts.

A module parameter is runtime state: a power failure puts it back to its default, and a server
whose pinned memory no longer fits under it is refused at every start (FRANK-ARCHON "The outage: a
refusal, not a crash"). The gate reads the cap as the smallest of the knobs that the kernel
exposes; where it is below the floor and the caller may raise it, the target is written into every
knob that can be written, everything is read again, and only then is the start refused, by name.
An absent knob is skipped, never read as zero. A knob that is there and cannot be understood is
no cap at all: nothing is written and the start is refused (SAFETY: unknown changes nothing).

Only the standard library is imported here: the gate runs as root before a server, at boot.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

__all__ = ["UNITS", "Knob", "KnobReport", "check_knobs", "judge_knobs"]

_MIB: Final = 1 << 20
_MOST: Final = 4096  # bytes of a knob that are read; sysfs gives one page

UNITS: Final[dict[str, int]] = {
    "pages": os.sysconf("SC_PAGE_SIZE"),
    "bytes": 1,
    "kib": 1 << 10,
    "mib": _MIB,
}
"""What a knob counts in, to the bytes of one."""


@dataclass(frozen=True)
class Knob:
    """One knob as it was found: `absent`, `read` with its `value` (in units), or `unknown`.

    `why` says why it is unknown, `refused` why the target could not be written into it.
    """

    path: Path
    state: str
    value: int | None = None
    why: str = ""
    refused: str = ""


@dataclass(frozen=True)
class KnobReport:
    """What the gate found and did. `passed` is the answer; `lines` say it, in order."""

    passed: bool
    knobs: tuple[Knob, ...]
    cap_mib: int | None
    """The smallest of the knobs in whole MiB, rounded down; None where it is not known."""
    written: tuple[Path, ...] = ()
    lines: tuple[str, ...] = field(default=())


def check_knobs(
    paths: Sequence[Path], *, unit: str, floor_mib: int, target_mib: int, raise_knobs: bool = False
) -> KnobReport:
    """Compare the smallest of the knobs with `floor_mib`; raise them first where that is allowed.

    Args:
        paths: the knobs; those that do not exist are skipped.
        unit: what they count in, a key of `UNITS`.
        floor_mib: the least cap that passes, in MiB; exactly the floor passes.
        target_mib: what is written, in MiB, where the cap is below the floor. A knob that already
            holds as much or more keeps its value: raising never lowers.
        raise_knobs: write; otherwise only read.

    Raises:
        UsageError: no path, an unknown unit, a floor below 1 or a target below the floor.
    """
    size = UNITS.get(unit)
    if size is None:
        raise UsageError(f"--unit {one_line(unit, 40)}: valid: {', '.join(UNITS)}")
    if not paths:
        raise UsageError("--knob: name at least one")
    if floor_mib < 1:
        raise UsageError(f"--floor-mib {floor_mib}: at least 1")
    if target_mib < floor_mib:
        raise UsageError(f"--target-mib {target_mib}: below the floor of {floor_mib} MiB")
    target = -(-target_mib * _MIB // size)

    knobs = [_read(path) for path in paths]
    lines: list[str] = []
    cap = _cap(knobs)
    if cap is None or cap * size >= floor_mib * _MIB or not raise_knobs:
        return _judge(knobs, size, floor_mib, (), lines)
    low = f"cap is {cap * size // _MIB} MiB, below the floor {floor_mib} MiB"
    counts = "" if unit == "mib" else f" ({target} {unit})"
    lines.append(f"{low}: raising to {target_mib} MiB{counts}")
    written: list[Path] = []
    refused: dict[Path, str] = {}
    for knob in knobs:
        if knob.value is None or knob.value >= target:
            continue
        why = _write(knob.path, target)
        if why:
            refused[knob.path] = why
            lines.append(f"{knob.path}: not raised: {why}")
        else:
            written.append(knob.path)
    again = [_read(path) for path in paths]
    told = [
        Knob(k.path, k.state, k.value, k.why, refused[k.path]) if k.path in refused else k
        for k in again
    ]
    return _judge(told, size, floor_mib, tuple(written), lines)


def judge_knobs(
    found: Mapping[str, bytes | None], *, unit: str, floor_mib: int, page_bytes: int
) -> KnobReport:
    """Judge knobs that were read elsewhere, such as on another host; nothing is written.

    Args:
        found: path to content; None: not there.
        unit: what they count in, a key of `UNITS`.
        floor_mib: the least cap that passes, in MiB; exactly the floor passes.
        page_bytes: the size of a page where they were read.
    """
    knobs = [
        Knob(Path(path), "absent") if raw is None else _understood(Path(path), raw)
        for path, raw in found.items()
    ]
    return _judge(knobs, page_bytes if unit == "pages" else UNITS[unit], floor_mib, (), [])


def _cap(knobs: Sequence[Knob]) -> int | None:
    """The smallest value in units; None where a knob is not understood, or none is there."""
    if any(knob.state == "unknown" for knob in knobs):
        return None
    return min((knob.value for knob in knobs if knob.value is not None), default=None)


def _judge(
    knobs: Sequence[Knob], size: int, floor_mib: int, written: tuple[Path, ...], lines: list[str]
) -> KnobReport:
    for knob in knobs:
        if knob.state == "absent":
            lines.append(f"{knob.path}: not there, skipped")
    unknown = [knob for knob in knobs if knob.state == "unknown"]
    cap = _cap(knobs)
    if unknown:
        lines += [f"REFUSED: {knob.path}: {knob.why}; the cap is not known" for knob in unknown]
    elif cap is None:
        names = ", ".join(str(knob.path) for knob in knobs)
        lines.append(f"REFUSED: the kernel exposes none of {names}; the cap is not known")
    else:
        low = [k for k in knobs if k.value is not None and k.value * size < floor_mib * _MIB]
        if not low:
            whole = cap * size // _MIB
            lines.append(f"PASS: cap {whole} MiB clears the floor {floor_mib} MiB")
            return KnobReport(True, tuple(knobs), whole, written, tuple(lines))
        for knob in low:
            assert knob.value is not None
            why = f" ({knob.refused})" if knob.refused else ""
            told = "; nothing was written, dsv41 knob-gate --raise raises it"
            hint = "" if written or knob.refused else told
            if knob.path in written:
                hint = "; the target was written and the kernel did not take it"
            lines.append(
                f"REFUSED: {knob.path} caps at {knob.value * size // _MIB} MiB, below the floor "
                f"{floor_mib} MiB{why}{hint}"
            )
    told_cap = None if cap is None else cap * size // _MIB
    return KnobReport(False, tuple(knobs), told_cap, written, tuple(lines))


def _read(path: Path) -> Knob:
    try:
        # Without waiting: a knob that is a pipe must not hold up a boot.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return Knob(path, "absent")
    except OSError as error:
        return Knob(path, "unknown", why=f"cannot be read ({error.strerror})")
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return Knob(path, "unknown", why="is no file")
        raw = os.read(fd, _MOST)
    except OSError as error:
        return Knob(path, "unknown", why=f"cannot be read ({error.strerror})")
    finally:
        os.close(fd)
    return _understood(path, raw)


def _understood(path: Path, raw: bytes) -> Knob:
    text = raw.decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        return Knob(path, "unknown", why=f"holds {one_line(repr(text), 60)}, no count")
    return Knob(path, "read", int(text))


def _write(path: Path, value: int) -> str:
    """Write `value` into a knob that is there; return why not, empty where it was taken."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        # One write: the kernel takes each as a whole value.
        os.write(fd, f"{value}\n".encode())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    return ""
