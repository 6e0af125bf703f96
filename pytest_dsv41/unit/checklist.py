"""The list that is gone through after a cutover: typed checks of one unit, each with its evidence.

Health, the served name, the running command line and environment, the boot ledger, drop-ins, ports
and files, as FRANK-ARCHON's verification tables ask for them, and whatever a command can tell. All
are evaluated, also after one has failed; what cannot be seen has failed, with the reason (SAFETY:
unknown is no pass). A check only looks, but for `command`, which runs what the list names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from pytest_dsv41.address import parse_url
from pytest_dsv41.engines import check_url, detect_engine, fetch, get_engine
from pytest_dsv41.errors import CommandFailed, Dsv41Error, UsageError
from pytest_dsv41.hosts import Host, Probe
from pytest_dsv41.hosts.ended import answer
from pytest_dsv41.quality.fleet import PASS, PROBES, fleet_probe
from pytest_dsv41.quality.reference import read_receipt
from pytest_dsv41.text import counted, error_line, one_line
from pytest_dsv41.unit.drift import find_drift, load_checkout, read_file, unregistered
from pytest_dsv41.unit.masking import masked_argv, masked_value, masked_words
from pytest_dsv41.unit.memory import parse_ledger
from pytest_dsv41.unit.memory.ledger import DIALECTS
from pytest_dsv41.unit.proof import ledger_faults
from pytest_dsv41.unit.systemd import RunningProcess, UnitFacts, read_host_file, read_unit
from pytest_dsv41.unit.unitfile import unit_name
from pytest_dsv41.window.arm_keys import flag_keys, left_keys
from pytest_dsv41.window.source import Source, first_slip, read_toml, refuse_nulls, slip_text

__all__ = ["CHECKS", "Answer", "Checklist", "load_checklist", "verify"]

_BODY_MAX: Final = 16 << 20
_CONTAINER: Final = r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$"
_Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class _Check(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: str = ""

    def title(self) -> str:
        """What the check is called where the list gives no name."""
        return ""

    def look(self, at: _Place) -> tuple[bool, str]:
        """Whether it holds, and what was seen."""
        raise NotImplementedError


class _State(_Check):
    check: Literal["state"]
    active: str = "active"
    enabled: str = ""

    def look(self, at: _Place) -> tuple[bool, str]:
        loaded = at.facts.loaded
        holds = loaded.active_state == self.active
        holds = holds and self.enabled in ("", loaded.unit_file_state)
        state = f"{loaded.active_state} ({loaded.sub_state})"
        return holds, f"{state}, {loaded.unit_file_state or 'not installed'}"


class _Restarts(_Check):
    check: Literal["restarts"]
    at_most: int = Field(default=0, ge=0)

    def look(self, at: _Place) -> tuple[bool, str]:
        count = at.facts.loaded.restarts
        return count <= self.at_most, f"{counted(count, 'automatic restart')} since it was started"


class _Health(_Check):
    check: Literal["health"]
    url: str = ""

    def look(self, at: _Place) -> tuple[bool, str]:
        url = at.url(self.url)
        health = get_engine(at.engine(url)).health(url, timeout=10.0)
        return health == "up", f"{health}{f': {health.reason}' if health.reason else ''}"


class _Models(_Check):
    check: Literal["models"]
    url: str = ""
    ids: _Words

    def title(self) -> str:
        return ", ".join(self.ids)

    def look(self, at: _Place) -> tuple[bool, str]:
        url = at.url(self.url)
        # The list and not a chat: some engines echo whatever name they are asked for.
        served = get_engine(at.engine(url)).models(url, timeout=10.0)
        told = ", ".join(one_line(name, 120) for name in served)
        return sorted(served) == sorted(self.ids), f"/v1/models names {told or 'nothing'}"


class _Argv(_Check):
    """Flags of the running command line; of a container, of the command podman holds for it."""

    check: Literal["argv"]
    flags: dict[str, str | bool] = {}
    absent: list[str] = []
    container: str = Field(default="", pattern=_CONTAINER, description="a container's name")

    @model_validator(mode="after")
    def _asks(self) -> _Argv:
        if not self.flags and not self.absent:
            raise ValueError("needs flags or absent")
        if any(value is False for value in self.flags.values()):
            raise ValueError("a flag that must not be there belongs to absent")
        return self

    def title(self) -> str:
        return ", ".join([*self.flags, *(f"no {flag}" for flag in self.absent)])

    def look(self, at: _Place) -> tuple[bool, str]:
        argv = at.words(self.container)
        wrong = []
        for flag, wanted in self.flags.items():
            values = _flag_values(argv, flag, bare=wanted is True)
            if not values:
                wrong.append(f"{flag} is not there")
            elif wanted is not True and values[-1] != wanted:
                wrong.append(f"{masked_argv([flag, values[-1]])}, not {wanted}")
        wrong += [f"{flag} is there" for flag in self.absent if _flag_values(argv, flag, bare=True)]
        return not wrong, one_line("; ".join(wrong) or masked_argv(argv), 400)


def _flag_values(argv: Sequence[str], flag: str, *, bare: bool) -> list[str]:
    """The values that a flag is given, in order; of a bare one an empty word each."""
    values = []
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if word == flag and (bare or position + 1 < len(argv)):
            values.append("" if bare else argv[position + 1])
        elif name == flag and equals:
            values.append(value)
    return values


class _Environment(_Check):
    check: Literal["environment"]
    values: dict[str, str] = {}
    absent: list[str] = []

    @model_validator(mode="after")
    def _asks(self) -> _Environment:
        if not self.values and not self.absent:
            raise ValueError("needs values or absent")
        return self

    def title(self) -> str:
        return ", ".join([*self.values, *(f"no {name}" for name in self.absent)])

    def look(self, at: _Place) -> tuple[bool, str]:
        has = at.process.environment
        wrong = [
            f"{name} is {masked_value(name, has[name])}, not {masked_value(name, wanted)}"
            if name in has
            else f"{name} is not set; asked for: {masked_value(name, wanted)}"
            for name, wanted in self.values.items()
            if has.get(name) != wanted
        ]
        wrong += [f"{name} is set" for name in self.absent if name in has]
        held = ", ".join(f"{name}={masked_value(name, v)}" for name, v in self.values.items())
        return not wrong, one_line("; ".join(wrong) or held or "not set", 400)


class _DropIns(_Check):
    check: Literal["drop-ins"]
    paths: list[str]

    def look(self, at: _Place) -> tuple[bool, str]:
        applied = list(at.facts.loaded.drop_ins)
        told = ", ".join(one_line(path, 200) for path in applied)
        return applied == self.paths, told or "none applies"


class _Drift(_Check):
    check: Literal["drift"]
    registered: list[str] = []
    checkout: str = ""
    env_files: dict[str, str] = {}

    def look(self, at: _Place) -> tuple[bool, str]:
        checkout = load_checkout(at.base / self.checkout) if self.checkout else None
        wanted = {path: read_file(at.base / file) for path, file in self.env_files.items()}
        found = find_drift(
            at.facts_with_process,
            checkout=checkout,
            env_files={path: (data, at.read(path)) for path, data in wanted.items()},
        )
        left = unregistered(found, self.registered)
        told = counted(len(found) - len(left), "registered finding") if found else "none"
        return not left, "; ".join(map(str, left[:3])) + _more(left) if left else told


def _more(findings: Sequence[object]) -> str:
    return f"; and {len(findings) - 3} more" if len(findings) > 3 else ""


class _Port(_Check):
    check: Literal["port"]
    port: int = Field(ge=1, le=65535)
    address: str = "127.0.0.1"
    open: bool = True

    def title(self) -> str:
        return str(self.port)

    def look(self, at: _Place) -> tuple[bool, str]:
        seen = at.host.port(self.port, self.address)
        wanted = Probe.UP if self.open else Probe.DOWN
        told = {Probe.UP: "something listens", Probe.DOWN: "refused"}.get(seen, "cannot be told")
        return seen is wanted, f"{told} at {self.address}:{self.port}, seen from {at.host.name}"


class _File(_Check):
    check: Literal["file"]
    path: str = Field(pattern="^/", description="an absolute path")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="64 hex digits")

    def title(self) -> str:
        return self.path

    def look(self, at: _Place) -> tuple[bool, str]:
        data = at.read(self.path)
        if data is None:
            return False, "not on the host"
        digest = hashlib.sha256(data).hexdigest()
        return digest == self.sha256, f"sha256 {digest}, {counted(len(data), 'byte')}"


class _Ledger(_Check):
    """One fact of the boot ledger, or, without `fact`, that it is whole and agrees.

    It must agree with itself and with the flags that run, of a container those that podman holds.
    The ledger is what the unit wrote to its journal since this start, or a file on the host.
    """

    check: Literal["ledger"]
    dialect: str
    file: str = Field(default="", pattern="^(/.*)?$", description="an absolute path")
    container: str = Field(default="", pattern=_CONTAINER, description="a container's name")
    subject: str = ""
    fact: str = ""
    unit: str = ""
    equals: float | str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _asks(self) -> _Ledger:
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect {self.dialect!r}; valid: {', '.join(sorted(DIALECTS))}")
        bounds = [self.equals, self.at_least, self.at_most]
        given = [bound for bound in bounds if bound is not None]
        if bool(self.fact) != bool(given) or bool(self.fact) != bool(self.subject):
            raise ValueError("subject, fact and one of equals, at_least, at_most belong together")
        return self

    def title(self) -> str:
        return f"{self.subject} {self.fact}" if self.fact else "whole"

    def look(self, at: _Place) -> tuple[bool, str]:
        ledger = parse_ledger(at.start_log(self.file), self.dialect)
        if not self.fact:
            argv = at.words(self.container)
            wrong = [f"missing: {name}" for name in ledger.missing] + ledger_faults(ledger, argv)
            return not wrong, "; ".join(
                wrong
            ) or f"{counted(len(ledger.facts), 'fact')}, none missing"
        fact = ledger.find(self.subject, self.fact)
        if fact is None:
            known = dict.fromkeys(f"{each.subject} {each.name}" for each in ledger.facts)
            return False, one_line(f"not in the ledger; it has {', '.join(known) or 'nothing'}")
        if self.unit and fact.unit != self.unit:
            return False, f"{fact}; not in {self.unit}"
        if isinstance(fact.value, str):
            holds = self.equals == fact.value
        else:
            # As exact as it was printed, no more.
            slack = fact.rounding
            holds = (
                (self.equals is None or _near(fact.value, self.equals, slack))
                and (self.at_least is None or fact.value + slack >= self.at_least)
                and (self.at_most is None or fact.value - slack <= self.at_most)
            )
        return holds, str(fact)


def _near(value: float, wanted: float | str, slack: float) -> bool:
    return not isinstance(wanted, str) and abs(value - wanted) <= slack


class _Scored(_Check):
    """Production still runs in the shape that a KL score was made in, by the gate's receipt."""

    check: Literal["scored"]
    receipt: str = Field(min_length=1)
    container: str = Field(default="", pattern=_CONTAINER, description="a container's name")

    def title(self) -> str:
        return self.receipt

    def look(self, at: _Place) -> tuple[bool, str]:
        shape = read_receipt(at.base / self.receipt)["shape"]
        if not shape:
            return False, "the receipt was written without a shape"
        left, untold = left_keys(shape, flag_keys(at.words(self.container)))
        wrong = [f"{key} was {was}, {masked_words([key, now])[1]} runs" for key, was, now in left]
        wrong += [f"{key} was {shape[key]}, and is not given" for key in untold]
        return not wrong, one_line("; ".join(wrong) or f"{counted(len(shape), 'key')} as scored")


class _Http(_Check):
    """Any address: a metrics page, a monitor's query. Asked from here."""

    check: Literal["http"]
    url: str
    status: int = 200
    contains: str = ""
    deadline_s: float = Field(default=10.0, gt=0, le=600)

    def title(self) -> str:
        # Without a user's name and password.
        return re.sub("//[^/?#]*@", "//", self.url)

    def look(self, at: _Place) -> tuple[bool, str]:
        status, body = at.get(self.url, self.deadline_s)
        there = self.contains.encode() in body
        holds = status == self.status and there
        told = f"status {status}, {counted(len(body), 'byte')}"
        return holds, told if there else f"{told}, without {one_line(self.contains, 80)!r}"


class _Fleet(_Check):
    check: Literal["fleet"]
    url: str = ""
    probes: _Words

    @model_validator(mode="after")
    def _known(self) -> _Fleet:
        for probe in self.probes:
            if probe not in PROBES:
                raise ValueError(f"probe {probe!r}; valid: {', '.join(PROBES)}")
        return self

    def title(self) -> str:
        return ", ".join(self.probes)

    def look(self, at: _Place) -> tuple[bool, str]:
        url = at.url(self.url)
        answers = fleet_probe(url, engine=at.engine(url), probes=self.probes)
        told = "; ".join(f"{each.name} {each.status}: {each.evidence}" for each in answers)
        return all(each.status == PASS for each in answers), one_line(told, 600)


class _Command(_Check):
    check: Literal["command"]
    argv: _Words
    on: Literal["host", "here"] = "host"
    contains: str = ""
    deadline_s: float = Field(default=60.0, gt=0, le=86400)

    def title(self) -> str:
        return self.argv[0]

    def look(self, at: _Place) -> tuple[bool, str]:
        code, said = at.run(self.argv, self.deadline_s, here=self.on == "here")
        last = one_line(said.strip().rpartition("\n")[2], 160)
        there = self.contains in said
        told = f"exit {code}: {last or '(no output)'}"
        missing = "" if there else f"; {one_line(self.contains, 80)!r} is not in its output"
        return code == 0 and there, told + missing


_Any = Annotated[
    _State
    | _Restarts
    | _Health
    | _Models
    | _Argv
    | _Environment
    | _DropIns
    | _Drift
    | _Port
    | _File
    | _Ledger
    | _Scored
    | _Http
    | _Fleet
    | _Command,
    Field(discriminator="check"),
]
_ADAPTER: Final[TypeAdapter[Any]] = TypeAdapter(_Any)
CHECKS: Final[dict[str, type[_Check]]] = {
    "state": _State,
    "restarts": _Restarts,
    "health": _Health,
    "models": _Models,
    "argv": _Argv,
    "environment": _Environment,
    "drop-ins": _DropIns,
    "drift": _Drift,
    "port": _Port,
    "file": _File,
    "ledger": _Ledger,
    "scored": _Scored,
    "http": _Http,
    "fleet": _Fleet,
    "command": _Command,
}
"""Each kind of check by its name."""


@dataclass(frozen=True)
class Checklist:
    """A checklist file, read and checked. Paths in it are relative to its folder."""

    path: Path
    url: str
    engine: str
    checks: tuple[_Check, ...]


@dataclass(frozen=True)
class Answer:
    """One check: its kind, what it is called, whether it holds, and what was seen."""

    kind: str
    name: str
    passed: bool
    evidence: str


def load_checklist(path: Path) -> Checklist:
    """Read a checklist.

    Raises:
        SpecError: file, line and key of what is wrong, and what is valid.
    """
    values, source = read_toml(path, str(path))
    refuse_nulls(values, source)
    rows = values.pop("check", [])
    for key in values:
        if key not in ("url", "engine"):
            raise source.error((key,), "unknown key; valid: url, engine, [[check]]")
    for key in ("url", "engine"):
        if not isinstance(values.get(key, ""), str):
            raise source.error((key,), "expected a string")
    if not isinstance(rows, list) or not rows:
        raise source.error((), "no [[check]]: a list needs one")
    checks = tuple(_read(row, source, number) for number, row in enumerate(rows))
    try:
        if values.get("url"):
            check_url(values["url"])
        if values.get("engine"):
            get_engine(values["engine"])
    except UsageError as error:
        raise source.error((), str(error)) from None
    for number, check in enumerate(checks):
        url = getattr(check, "url", None)
        if url == "" and not values.get("url"):
            raise source.error(("check", number), "needs a url, here or at the top of the file")
        if url or isinstance(check, _Http):
            try:
                parse_url(str(url)) if isinstance(check, _Http) else check_url(str(url))
            except UsageError as error:
                raise source.error(("check", number, "url"), str(error)) from None
    return Checklist(path, values.get("url", ""), values.get("engine", ""), checks)


def _read(row: Any, source: Source, number: int) -> _Check:
    where = ("check", number)
    if not isinstance(row, dict):
        raise source.error(where, "expected a table")
    kind = row.get("check")
    if not isinstance(kind, str) or kind not in CHECKS:
        raise source.error(
            (*where, "check"), f"{one_line(repr(kind), 60)}; valid: {', '.join(CHECKS)}"
        )
    try:
        check: _Check = _ADAPTER.validate_python(row)
    except ValidationError as error:
        first = first_slip(error.errors(include_url=False))
        keys = ", ".join(key for key in CHECKS[kind].model_fields if key != "check")
        message = slip_text(first, CHECKS[kind].model_fields)
        # Behind the place of a check stands its kind, as pydantic tells a union's members apart.
        raise source.error(
            (*where, *first["loc"][1:]), f"{message}; keys of {kind}: {keys}"
        ) from None
    return check


class _Place:
    """What the checks look at; each part is read once, when it is first asked for."""

    def __init__(
        self,
        host: Host,
        unit: str,
        checklist: Checklist,
        user: bool,
        become: tuple[str, ...],
    ) -> None:
        self.host = host
        self.unit = unit
        self.base = checklist.path.parent
        self._url = checklist.url
        self._engine = checklist.engine
        self._user = user
        self._become = become
        self._engines: dict[str, str] = {}

    @functools.cached_property
    def facts(self) -> UnitFacts:
        return read_unit(self.host, self.unit, user=self._user, become=self._become, process=False)

    @functools.cached_property
    def facts_with_process(self) -> UnitFacts:
        return read_unit(self.host, self.unit, user=self._user, become=self._become)

    def read(self, path: str) -> bytes | None:
        """The bytes of a file on the host."""
        return read_host_file(self.host, path, become=self._become)

    @property
    def process(self) -> RunningProcess:
        found = self.facts_with_process.process
        if found is None:
            raise CommandFailed("no main process runs", 1)
        return found

    def url(self, own: str) -> str:
        return own or self._url

    def engine(self, url: str) -> str:
        if url not in self._engines:
            self._engines[url] = self._engine or detect_engine(url)
        return self._engines[url]

    def get(self, url: str, deadline_s: float) -> tuple[int, bytes]:
        """The status and the body of an answer, asked from here and by no proxy."""
        with httpx.Client(trust_env=False) as client:
            answer = fetch(client, url, deadline_s, most=_BODY_MAX)
        return answer.status_code, answer.content

    def words(self, container: str) -> Sequence[str]:
        """The command line that runs: the main process's, or its container's by name."""
        return self._container(container) if container else self.process.argv

    def _container(self, name: str) -> tuple[str, ...]:
        """The command that podman holds for a running container."""
        argv = [*self._become, "podman", "inspect", name, "--format", "{{json .Config.Cmd}}"]
        said = self.host.run(argv, name="unit-container", deadline_s=30.0, private=True).stdout
        try:
            words = json.loads(said)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CommandFailed(f"podman inspect {name}: no list of words", 1)
        return tuple(words)

    def start_log(self, file: str) -> str:
        """What the unit wrote since this start: its journal, or `file` on the host."""
        if file:
            data = self.read(file)
            if data is None:
                raise CommandFailed(f"{file}: not on the host", 1)
            return data.decode("utf-8", "replace")
        begun = int(self.facts.loaded.properties.get("InactiveExitTimestamp", 0))
        if not begun:
            raise CommandFailed("the unit was not started since the boot", 1)
        # By time and not by invocation: of a process that ended at once the journal may learn it
        # too late.
        which = "--user-unit" if self._user else "--unit"
        since = f"--since=@{begun // 10**6}.{begun % 10**6:06d}"
        argv = [*self._become, "journalctl", "--no-pager", "--quiet", "--output=cat"]
        return self.host.run(
            [*argv, f"{which}={self.facts.unit}", since],
            name="unit-ledger",
            deadline_s=60.0,
            private=True,
        ).stdout

    def run(self, argv: Sequence[str], deadline_s: float, *, here: bool) -> tuple[int, str]:
        """A command's exit code and output, on the host or here in the list's folder."""
        if not here:
            done = self.host.run(
                argv, name="unit-check", deadline_s=deadline_s, check=False, private=True
            )
            return done.returncode, f"{done.stdout}\n{done.stderr}"
        return answer(argv, cwd=self.base, deadline_s=deadline_s)


def verify(
    host: Host,
    unit: str,
    checklist: Checklist,
    *,
    user: bool = False,
    become: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Evaluate every check of the list, in order; `progress` is called with each one's name.

    Raises:
        UsageError: no name of a service.
    """
    try:
        unit = unit_name(unit)
    except ValueError as error:
        raise UsageError(f"unit {one_line(unit, 80)!r}: {error}") from error
    at = _Place(host, unit, checklist, user, tuple(become))
    answers = []
    for check in checklist.checks:
        kind = str(getattr(check, "check"))  # noqa: B009 - every kind declares it
        name = check.name or check.title()
        if progress is not None:
            progress(f"{kind} {name}".strip())
        try:
            passed, evidence = check.look(at)
        except subprocess.TimeoutExpired as error:
            passed, evidence = False, f"no answer within {error.timeout:g} s"
        except (Dsv41Error, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            passed, evidence = False, f"cannot be told: {error_line(error)}"
        answers.append(Answer(kind, one_line(name, 120), passed, one_line(evidence, 800)))
    return answers
