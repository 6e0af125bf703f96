"""A command between gates: named checks before it, named checks after it, and a receipt.

All checks of a side are evaluated, also after one has failed, and each says what it found. A check
that cannot see what it asks for fails (SAFETY: unknown is no pass). The command runs from copies
of its scripts, its output goes to a file, and its end alone proves nothing: a converter that ends
with 0 and has written too little is found by the check of its size.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from pytest_dsv41.errors import Dsv41Error, RefusedByWorld, SpecError, UsageError, WindowStopped
from pytest_dsv41.hosts.ended import KEPT, answer, end_group
from pytest_dsv41.payload.hashing import hash_file, identity
from pytest_dsv41.payload.runner import copy_scripts
from pytest_dsv41.payload.step import Step, Untrusted
from pytest_dsv41.text import counted, one_line
from pytest_dsv41.window.source import (
    MAX_BYTES,
    Source,
    first_slip,
    read_input,
    read_toml,
    refuse_nulls,
    slip_text,
)

__all__ = ["KIND", "Found", "Gate", "Outcome", "load_gate", "run_gate"]

KIND: Final = "gate run"
_MIB: Final = 1 << 20
_POLL_S: Final = 0.2
_Argv = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Bounds(_Strict):
    """At least one bound."""

    @model_validator(mode="after")
    def _bounded(self) -> _Bounds:
        keys = [key for key in type(self).model_fields if key.startswith(("at_", "exactly"))]
        if all(getattr(self, key) is None for key in keys):
            raise ValueError(f"needs one of {', '.join(keys)}")
        return self


class _Count(_Bounds):
    check: Literal["count"]
    name: str = ""
    files: str = Field(min_length=1)
    at_least: int | None = Field(default=None, ge=0)
    at_most: int | None = Field(default=None, ge=0)
    exactly: int | None = Field(default=None, ge=0)

    def look(self, at: _Place) -> tuple[bool, str]:
        found = len(at.glob(self.files))
        passed = _within(found, self.at_least, self.at_most, self.exactly)
        return passed, counted(found, "file") + _asked(self.at_least, self.at_most, self.exactly)


class _Absent(_Strict):
    check: Literal["absent"]
    name: str = ""
    files: str = Field(min_length=1)

    def look(self, at: _Place) -> tuple[bool, str]:
        found = at.glob(self.files)
        told = ", ".join(one_line(path, 120) for path in found[:3])
        return not found, f"there: {told}" if found else "nothing there"


class _Free(_Strict):
    check: Literal["free"]
    name: str = ""
    folder: str = Field(min_length=1)
    at_least_mib: int = Field(ge=0)

    def look(self, at: _Place) -> tuple[bool, str]:
        disk = os.statvfs(at.base / self.folder)
        free = disk.f_bavail * disk.f_frsize
        passed = free >= self.at_least_mib * _MIB
        return passed, f"{free // _MIB:,} MiB free, at least {self.at_least_mib:,} asked"


class _Size(_Bounds):
    check: Literal["size"]
    name: str = ""
    file: str = Field(min_length=1)
    at_least_mib: int | None = Field(default=None, ge=0)
    at_most_mib: int | None = Field(default=None, ge=0)
    exactly_bytes: int | None = Field(default=None, ge=0)

    def look(self, at: _Place) -> tuple[bool, str]:
        path = at.base / self.file
        size = identity(path)[0]
        low, high = (None if n is None else n * _MIB for n in (self.at_least_mib, self.at_most_mib))
        asked = _asked(self.at_least_mib, self.at_most_mib, None, " MiB")
        asked += _asked(None, None, self.exactly_bytes, " bytes")
        passed = _within(size, low, high, self.exactly_bytes)
        return passed, f"{size / _MIB:,.1f} MiB ({size:,} bytes){asked}"


class _Output(_Strict):
    """The text stands in the output of the step's own command, or in that of another one."""

    check: Literal["output-contains"]
    name: str = ""
    text: str = Field(min_length=1)
    command: _Argv | None = None
    deadline_s: float = Field(default=60.0, gt=0, le=86400)

    def look(self, at: _Place) -> tuple[bool, str]:
        if self.command is None:
            said, ending = at.output(), ""
        else:
            code, said = answer(
                self.command,
                cwd=at.base,
                env=at.environment,
                deadline_s=self.deadline_s,
                look=lambda: _obey(at.stop, "the check's command was ended"),
            )
            ending = f", which ended with {code}" if code else ""
        there = self.text in said
        last = one_line(said.strip().rpartition("\n")[2], 120)
        told = "there" if there else f"not in the output; its last line: {last or '(none)'}"
        return there and not ending, told + ending


class _Flag(_Strict):
    """The word stands neither in the command nor in a line of its scripts."""

    check: Literal["flag-absent"]
    name: str = ""
    flag: str = Field(
        pattern=r"^-{1,2}[A-Za-z0-9][A-Za-z0-9_.-]*$", description="a flag with its dashes"
    )

    def look(self, at: _Place) -> tuple[bool, str]:
        for where, words in at.words():
            for word in words:
                if word == self.flag or word.startswith(f"{self.flag}="):
                    return False, f"stands in {where}"
        return True, "nowhere"


_Check = Annotated[_Count | _Absent | _Free | _Size | _Output | _Flag, Field(discriminator="check")]
_CHECK: TypeAdapter[_Check] = TypeAdapter(_Check)
_KINDS: Final[dict[str, type[BaseModel]]] = {
    "count": _Count,
    "absent": _Absent,
    "free": _Free,
    "size": _Size,
    "output-contains": _Output,
    "flag-absent": _Flag,
}


class _Table(_Strict):
    command: _Argv
    scripts: list[str] = Field(default=[])
    inputs: list[str] = Field(default=[])
    outputs: list[str] = Field(default=[])
    env: dict[Annotated[str, Field(pattern="^[^=]+$")], str] = Field(default={})
    deadline_s: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class Gate:
    """A gate file, read and checked. Paths are relative to the file's folder."""

    path: Path
    sha256: str
    """Of the file's bytes as they were read."""
    table: _Table
    before: tuple[_Check, ...]
    after: tuple[_Check, ...]

    @property
    def base(self) -> Path:
        """The gate file's folder, in which the command runs."""
        return self.path.parent

    @property
    def inputs(self) -> list[Path]:
        """What the receipt's trust rests on: the gate file, its scripts, its inputs."""
        names = dict.fromkeys([*self.table.scripts, *self.table.inputs])
        return [self.path, *(self.base / name for name in names)]


@dataclass(frozen=True)
class Found:
    """One check's answer."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Outcome:
    """How a step ended: `complete`, `trusted` (an earlier receipt), `refused` (a check before the
    command, nothing was run), `failed` (a check after it) or `command` (it did not end with 0)."""

    status: str
    before: tuple[Found, ...] = ()
    after: tuple[Found, ...] = ()
    returncode: int | None = None
    note: str = ""


@dataclass
class _Place:
    """What the checks look at."""

    base: Path
    environment: dict[str, str]
    log: Path
    argv: Sequence[str] = ()
    scripts: Mapping[str, Path] = field(default_factory=dict)
    stop: threading.Event | None = None

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern, root_dir=self.base, include_hidden=True))  # noqa: PTH207

    def output(self, most: int = KEPT) -> str:
        """The last `most` bytes of what the step's command wrote."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def words(self) -> list[tuple[str, list[str]]]:
        """The words of the command, and of its scripts without their comments."""
        told = [("the command", list(self.argv))]
        for name, path in self.scripts.items():
            for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
                told.append((f"{name}:{number}", _words(line)))
        return told


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        # A quote that goes on in the next line.
        return re.split(r"[\s'\";|&()`$]+", line)


def _within(value: int, low: int | None, high: int | None, exact: int | None) -> bool:
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (exact is None or value == exact)
    )


def _asked(low: int | None, high: int | None, exact: int | None, unit: str = "") -> str:
    bounds = (("at least", low), ("at most", high), ("exactly", exact))
    told = " and ".join(f"{word} {n:,}{unit}" for word, n in bounds if n is not None)
    return f", {told} asked" if told else ""


def load_gate(path: Path) -> Gate:
    """Read a gate file.

    Raises:
        SpecError: file, line and key of what is wrong, and what is valid.
    """
    # Hashed before it is read: a change in between is found when the step is run.
    digest = hashlib.sha256(read_input(path, MAX_BYTES)).hexdigest()
    values, source = read_toml(path, str(path))
    refuse_nulls(values, source)
    sides: dict[str, list[_Check]] = {}
    for side in ("before", "after"):
        rows = values.pop(side, [])
        if not isinstance(rows, list):
            raise source.error((side,), f"expected [[{side}]] tables")
        sides[side] = [_check(row, source, side, n) for n, row in enumerate(rows)]
    keys = [*_Table.model_fields, *sides]
    for key in values:
        if key not in keys:
            raise source.error((key,), f"unknown key; valid: {', '.join(keys)}")
    try:
        table = _Table.model_validate(values)
    except ValidationError as error:
        raise _fault(error, source, (), _Table) from None
    if not any(sides.values()):
        raise source.error((), "no [[before]] and no [[after]]: a gate needs a check")
    for n, check in enumerate(sides["before"]):
        if isinstance(check, _Output) and check.command is None:
            raise source.error(
                ("before", n, "check"), "needs a command of its own: the step's has not run yet"
            )
    names = [name for rows in sides.values() for name in map(_name, rows)]
    for name in names:
        if names.count(name) > 1:
            raise source.error(
                (), f"two checks are called {one_line(name, 80)!r}; give them a name"
            )
    return Gate(path.absolute(), digest, table, tuple(sides["before"]), tuple(sides["after"]))


def _check(row: Any, source: Source, side: str, number: int) -> _Check:
    where = (side, number)
    if not isinstance(row, dict):
        raise source.error(where, "expected a table")
    kind = row.get("check")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise source.error(
            (*where, "check"), f"{one_line(repr(kind), 60)}; valid: {', '.join(_KINDS)}"
        )
    try:
        return _CHECK.validate_python(row)
    except ValidationError as error:
        keys = [key for key in _KINDS[kind].model_fields if key != "check"]
        more = f"; keys of {kind}: {', '.join(keys)}"
        raise _fault(error, source, where, _KINDS[kind], more) from None


def _fault(
    error: ValidationError,
    source: Source,
    where: tuple[str | int, ...],
    asked: type[BaseModel],
    more: str = "",
) -> SpecError:
    first = first_slip(error.errors(include_url=False))
    # Behind the place of a check stands its kind, as pydantic tells a union's members apart.
    loc = first["loc"][1:] if where and first["loc"] else first["loc"]
    return source.error((*where, *loc), slip_text(first, asked.model_fields) + more)


def _name(check: _Check) -> str:
    told = dict(check)
    target = told.get("files") or told.get("file") or told.get("folder") or told.get("flag")
    return check.name or f"{check.check} {target or told.get('text')}"


def run_gate(
    gate: Gate,
    step: Step,
    *,
    resume: bool = False,
    again: bool = False,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] | None = None,
) -> Outcome:
    """Run a step between its gates, and write its receipt as the last act.

    Args:
        gate: what to do.
        step: its folder, held.
        resume: trust a whole receipt whose inputs still have their bytes, and run nothing.
        again: run although there is a receipt.
        stop: set to end the step: the command and all it has started are ended.
        progress: called about every second with what is going on.

    Raises:
        RefusedByWorld: there is a receipt and neither `resume` nor `again`; an input was changed
            while the step ran.
        UsageError: an input or a script is missing.
        WindowStopped: `stop` was set, or the deadline came.
    """
    show = progress or _silent
    if step.receipt.exists() and not again:
        if not resume:
            raise RefusedByWorld(
                f"{step.receipt}: this step is done; --resume trusts the receipt, --again runs it"
            )
        try:
            what = "holding inputs against the receipt"
            body = step.trusted(gate.inputs, _bytes(show, what, stop))
            _outputs_hold(body)
        except Untrusted as error:
            show(f"the receipt is not trusted: {error}")
            note = f"the receipt is not trusted: {error}"
        else:
            return Outcome(
                "trusted", note=f"done since {body['ended_utc']}; its inputs are the same"
            )
    else:
        note = ""
    # A name that is mistyped must not cost the receipt of a step that is done.
    for path in gate.inputs:
        identity(path)
    _unchanged(gate, hash_file(gate.path))
    step.begin({"gate": str(gate.path), "command": gate.table.command, "note": note})
    scripts = copy_scripts(step.folder / "scripts", gate.base, gate.table.scripts)
    inputs = _hashed(gate.inputs, _bytes(show, "hashing inputs", stop), scripts, gate.base)
    _unchanged(gate, inputs[0]["sha256"])
    step.note("inputs", inputs=[{k: row[k] for k in ("path", "sha256")} for row in inputs])
    copied = {str(gate.base / name): str(copy) for name, copy in scripts.items()}
    argv = [copied.get(str(gate.base / word), word) for word in gate.table.command]
    place = _Place(
        gate.base,
        {**os.environ, **gate.table.env},
        step.output,
        gate.table.command,
        scripts,
        stop,
    )
    place.log.unlink(missing_ok=True)
    before = _evaluate(gate.before, place, show)
    step.note("before", checks=[asdict(found) for found in before])
    if not all(found.passed for found in before):
        return Outcome("refused", before, note=note)
    step.note("command", argv=argv)
    code = _command(argv, place, step, gate.table.deadline_s, stop, show)
    step.note("command-end", returncode=code)
    if code != 0:
        return Outcome("command", before, returncode=code, note=note)
    after = (*_evaluate(gate.after, place, show), *_no_outputs(gate))
    step.note("after", checks=[asdict(found) for found in after])
    if not all(found.passed for found in after):
        return Outcome("failed", before, after, code, note)
    for row in inputs:
        if identity(Path(row["path"])) != row["identity"]:
            raise RefusedByWorld(f"{row['path']}: was changed while the step ran")
    made = [gate.base / name for name in gate.table.outputs]
    outputs = _hashed(made, _bytes(show, "hashing", stop))
    step.finish(
        [{k: row[k] for k in ("path", "bytes", "sha256")} for row in inputs],
        [{k: row[k] for k in ("path", "bytes", "sha256")} for row in outputs],
        command=gate.table.command,
        checks=[asdict(found) for found in (*before, *after)],
    )
    return Outcome("complete", before, after, code, note)


def _unchanged(gate: Gate, sha256: str) -> None:
    if sha256 != gate.sha256:
        raise RefusedByWorld(f"{gate.path}: was changed since it was read; run it again")


def _no_outputs(gate: Gate) -> Iterator[Found]:
    """What the command should have made and has not."""
    for name in gate.table.outputs:
        try:
            identity(gate.base / name)
        except UsageError as error:
            yield Found(f"output {name}", passed=False, found=one_line(str(error), 200))


def _outputs_hold(body: Mapping[str, Any]) -> None:
    """An output that is gone may be meant so (a later step frees its space); another one is not."""
    for row in body["outputs"]:
        path = Path(row["path"])
        if path.exists() and identity(path)[0] != row["bytes"]:
            raise Untrusted(f"{path}: {path.stat().st_size} bytes, the receipt says {row['bytes']}")


def _hashed(
    paths: Sequence[Path],
    progress: Callable[[int], None],
    scripts: Mapping[str, Path] | None = None,
    base: Path | None = None,
) -> list[dict[str, Any]]:
    rows = []
    copies = {base / name: copy for name, copy in (scripts or {}).items()} if base else {}
    for path in paths:
        before = identity(path)
        # Of a script the copy counts, for that is what runs.
        digest = hash_file(copies.get(path, path), progress)
        if identity(path) != before:
            raise RefusedByWorld(f"{path}: was changed while it was read")
        rows.append({"path": str(path), "bytes": before[0], "sha256": digest, "identity": before})
    return rows


def _bytes(
    show: Callable[[str], None], what: str, stop: threading.Event | None
) -> Callable[[int], None]:
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        _obey(stop, what)
        show(f"{what}: {done >> 20:,} MiB")

    return add


def _evaluate(
    checks: Sequence[_Check], place: _Place, show: Callable[[str], None]
) -> tuple[Found, ...]:
    answers = []
    for check in checks:
        _obey(place.stop, "between two checks")
        show(f"check: {_name(check)}")
        try:
            passed, found = check.look(place)
        except WindowStopped:
            raise
        except (Dsv41Error, OSError, subprocess.SubprocessError) as error:
            passed, found = False, f"cannot be seen: {one_line(str(error), 200)}"
        answers.append(Found(_name(check), passed, found))
    return tuple(answers)


def _obey(stop: threading.Event | None, where: str) -> None:
    if stop is not None and stop.is_set():
        raise WindowStopped(f"stopped ({where})")


def _command(
    argv: Sequence[str],
    place: _Place,
    step: Step,
    deadline_s: float | None,
    stop: threading.Event | None,
    show: Callable[[str], None],
) -> int:
    """Run the command in a session of its own; return its code, negative for a signal."""
    _obey(stop, "the command was not started")
    start = time.monotonic()
    with place.log.open("wb") as log:
        try:
            process = subprocess.Popen(
                argv,
                cwd=place.base,
                env=place.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whatever outlives this runner keeps the step's folder taken.
                pass_fds=(step.lock.fileno(),),
            )
        except OSError as error:
            raise UsageError(f"{one_line(argv[0], 120)}: {error.strerror}") from None
    try:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                pass
            ran = time.monotonic() - start
            if stop is not None and stop.is_set():
                raise WindowStopped(f"stopped after {ran:.0f} s; the command was ended")
            if deadline_s is not None and ran > deadline_s:
                raise WindowStopped(f"the command was ended at its deadline of {deadline_s:g} s")
            show(
                f"the command runs: {one_line(place.output().strip().rpartition(chr(10))[2], 100)}"
            )
    except BaseException:
        end_group(process)
        raise


def _silent(_text: str) -> None:
    """Show nothing."""
