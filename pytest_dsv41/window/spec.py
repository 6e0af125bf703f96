"""The window file: what a TOML file may say, and the checked `WindowSpec` it becomes.

Every fault is one line, `file:line: key: what is wrong; valid: …`, raised as `SpecError` before
anything is touched. The file's keys are documented in docs/window-file.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from ..errors import MeasurementRefused, SpecError, UsageError
from ..measure.cell import Sampling
from ..measure.metrics import METRICS
from ..text import one_line
from .gates import GATE_REPEATS, KlGate, ThroughputGate
from .schedule import (
    Pairing,
    Start,
    default_pairing,
    name_starts,
    pairing_fault,
    split_schedule,
)
from .source import KeyPath, Source, choices, read_toml, shown

__all__ = [
    "MAX_ITEMS",
    "MIN_REPEATS",
    "PILOT_CELL",
    "AdviceUse",
    "Arm",
    "CellUse",
    "ClaimUse",
    "IdenticalUse",
    "KlGate",
    "Limits",
    "PilotUse",
    "QualityUse",
    "TargetTable",
    "ThroughputGate",
    "WindowSpec",
    "example_names",
    "load_spec",
]

MIN_REPEATS = 3
"""Least repeats of an arm in a decision cell (RULES section 1)."""
PILOT_CELL = "aa-pilot"
"""What the items of the A/A pilot are called in a window."""
MAX_ITEMS = 100_000
_MAX_REPEATS = 10_000
_MAX_TABLES = 256
"""Most arms, and most cells: what a person could still read."""
_MAX_SEED = (1 << 31) - 1

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME_RULE = "1 to 64 of letters, digits, '.', '_' and '-', the first a letter or digit"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_RESERVED = ("port", "python", "seed", "start")
"""Placeholders that the target fills in; no variable may have such a name."""

_SHIPPED = "examples"


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{shown(value)} is no valid name; valid: {_NAME_RULE}")
    return value


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("empty; write a text")
    if len(value) > 2000:
        raise ValueError(f"{len(value)} characters; at most 2000")
    return value


def _folder(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError(f"{shown(value)} is no folder")
    return value


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError(f"{value:g} is not above 0")
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError(f"{value:g} is negative; valid: 0 or more")
    return value


def _fraction(value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{value:g} is no fraction; valid: above 0 and below 1, 0.05 is 5 %")
    return value


def _megahertz(value: int) -> int:
    if value < 1:
        raise ValueError(f"{value} is no clock cap; valid: MHz above 0, 1 where none is set")
    return value


def _seed(value: int) -> int:
    if not 0 <= value <= _MAX_SEED:
        raise ValueError(f"{value} is out of range; valid: 0 to {_MAX_SEED}")
    return value


_Name = Annotated[str, AfterValidator(_name)]
_Text = Annotated[str, AfterValidator(_text)]
_Folder = Annotated[str, AfterValidator(_folder)]
_Seconds = Annotated[float, AfterValidator(_positive)]
_SecondsOrNone = Annotated[float, AfterValidator(_not_negative)]
_Fraction = Annotated[float, AfterValidator(_fraction)]

Kind = Literal["candidate", "report", "admission"]
Profile = Literal["single", "multi"]
Role = Literal["control", "candidate"]
Direction = Literal["up", "down", "flat"]


# -- what the window has, once it is checked ------------------------------------------------------


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Arm(_Frozen):
    """One server configuration. `speculation` is False for a server without a drafter."""

    name: str
    role: Role
    symbol: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    speculation: bool | None = None


class IdenticalUse(_Frozen):
    """The PASSED A/A pilot that a cell's `expect_identical` rests on (RULES section 2).

    `record` is its file, `sha256` its seal, `cell` and `prompt_sha256` what it measured: the
    cell's definition and the identity of its prompt.
    """

    record: str
    sha256: str
    cell: dict[str, Any]
    prompt_sha256: str


class CellUse(_Frozen):
    """How this window uses one cell. Empty `primary`: the cell kind's own primary is reported."""

    name: str
    decision: bool = False
    primary: str = ""
    guards: tuple[str, ...] = ()
    expected_gain: float | None = None
    profile: Profile | None = None
    estimated_s: float | None = None
    sampling: dict[str, Any] | None = None
    expect_identical: IdenticalUse | None = None


class ClaimUse(_Frozen):
    """What the window is said to show: how a metric changes from one arm to another.

    Empty `metric`: the cell's primary. Empty `from_arm`: the control. `threshold` is a fraction;
    `up` and `down` are by at least that, `flat` is by no more, whichever way.
    """

    text: str
    cell: str
    metric: str = ""
    from_arm: str = ""
    to_arm: str
    direction: Direction
    threshold: float


class QualityUse(_Frozen):
    """A quality cell: the distributional probe, judged by a registered band (RULES section 4).

    `band` is the band's file, `band_sha256` its seal. Its subset, positions and conditions are the
    band's own.
    """

    name: str
    band: str
    band_sha256: str
    subset: str
    estimated_s: float | None = None


class PilotUse(_Frozen):
    """The A/A pilot beside the window: start A in the last control start, start B in the restore.

    Empty `cells`: the four registered ones. `subset` None: no probe; `each`: of each subset only
    the first so many prompts. `bridge_sampling` None: the bridge's own settings.
    """

    cells: tuple[str, ...] = ()
    subset: str | None = None
    each: int | None = None
    bridge: bool = True
    bridge_sampling: dict[str, Any] | None = None


class Limits(_Frozen):
    """Longest times in seconds. `window_s` None: the plan computes a generous one."""

    item_s: _Seconds = 120.0
    start_s: _Seconds = 600.0
    stop_s: _Seconds = 60.0
    watch_s: _SecondsOrNone = 900.0
    quiet_s: _SecondsOrNone = 60.0
    window_s: _Seconds | None = None


class AdviceUse(_Frozen):
    """Advice that is shown beside the verdict and never decides; off unless it is registered."""

    moderated: bool = False
    widened_aa: bool = False


class TargetTable(_Frozen):
    """The target's table as written, variables filled in; the target itself checks its keys."""

    kind: str
    table: dict[str, Any]
    where: str
    """The file that holds the table; the target's relative paths start in its folder."""
    source: Source | None = Field(default=None, exclude=True, repr=False)

    def located(self, error: SpecError) -> SpecError:
        """Return a target's error `target.key: …` with the file and line of that key."""
        text = one_line(str(error), 1000)
        found = re.match(r"target((?:\.[A-Za-z0-9_-]+|\[\d+\])*)", text)
        if self.source is None or found is None:
            return error
        parts = re.findall(r"[A-Za-z0-9_-]+", found[1])
        path: KeyPath = ("target", *(int(part) if part.isdigit() else part for part in parts))
        return SpecError(f"{self.source.name}:{self.source.line(path)}: {text}")


class WindowSpec(_Frozen):
    """A checked window: everything later rooms need to know about WHAT runs."""

    lane: str
    name: str
    hypothesis: str
    kind: Kind
    schedule: str
    starts: tuple[Start, ...]
    arms: tuple[Arm, ...]
    cells: tuple[CellUse, ...]
    repeats: dict[str, int]
    """Repeats of every cell in a start, by start name."""
    pairing: Pairing
    interleave: bool
    by_profile: bool
    smoke: str = ""
    """`x-first`: each candidate arm is smoked before the first control start; empty: none is."""
    start_sd: dict[str, float] = Field(default_factory=dict)
    """Registered between-start SD (a fraction) of seeded pairs, by `<cell>/<metric>`."""
    diff_cv: dict[str, float] = Field(default_factory=dict)
    """Registered CV of paired differences (a fraction), by `<cell>/<primary>`."""
    clock_cap_mhz: int | None = None
    """The clock cap that the starts will have: it picks the archive's definition."""
    report_only: bool
    override: str = ""
    """Why the window is opened although a process rule refuses it; empty: it is not."""
    limits: Limits
    advice: AdviceUse = AdviceUse()
    noise: dict[str, float] = Field(default_factory=dict)
    """Registered noise floor (a fraction) by metric: what the cost table calls inside."""
    gates: tuple[ThroughputGate | KlGate, ...] = ()
    quality: tuple[QualityUse, ...] = ()
    claims: tuple[ClaimUse, ...] = ()
    pilot: PilotUse | None = None
    target: TargetTable
    seed: int | None
    out: Path
    campaign: Path
    cell_modules: tuple[Path, ...]
    start_estimate_s: float | None
    variables: dict[str, str]
    path: Path
    source: Source | None = Field(default=None, exclude=True, repr=False)

    @property
    def control(self) -> Arm:
        """The one control arm."""
        return next(arm for arm in self.arms if arm.role == "control")

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """The candidate arms in the file's order."""
        return tuple(arm for arm in self.arms if arm.role == "candidate")

    @property
    def decision_cells(self) -> tuple[str, ...]:
        """The names of the cells that decide, in the file's order."""
        return tuple(cell.name for cell in self.cells if cell.decision)

    def repeats_of(self, start_name: str) -> int:
        """How often every cell is measured in one start.

        Raises:
            KeyError: the window has no start of that name.
        """
        return self.repeats[start_name]

    def arm(self, name: str) -> Arm:
        """The arm of that name.

        Raises:
            KeyError: the window has no such arm.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(f"no arm '{name}'; valid: {', '.join(arm.name for arm in self.arms)}")

    def cell(self, name: str) -> CellUse:
        """The use of the cell of that name.

        Raises:
            KeyError: the window has no such cell.
        """
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise KeyError(f"no cell '{name}'; valid: {', '.join(cell.name for cell in self.cells)}")

    def error(self, key: KeyPath, message: str) -> SpecError:
        """The one-line error of a key of the window file, `("cells", 0, "name")`."""
        return (self.source or Source(str(self.path), {})).error(key, message)

    def to_json(self) -> dict[str, Any]:
        """The resolved window as JSON; `WindowSpec.model_validate` reads it back."""
        return self.model_dump(mode="json")


# -- what the file may say ------------------------------------------------------------------------


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Window(_Table):
    lane: _Name
    name: _Name
    hypothesis: _Text
    kind: Kind | None = None
    schedule: str
    repeats: Any = MIN_REPEATS
    pairing: Pairing | None = None
    interleave: bool = False
    by_profile: bool = False
    smoke: Literal["", "x-first"] = ""
    start_sd: dict[str, _Fraction] = Field(default_factory=dict)
    diff_cv: dict[str, _Fraction] = Field(default_factory=dict)
    clock_cap_mhz: Annotated[int, AfterValidator(_megahertz)] | None = None
    seed: Annotated[int, AfterValidator(_seed)] | None = None
    out: _Folder = "dsv41-windows"
    campaign: _Folder | None = None
    cell_modules: list[str] = Field(default_factory=list)
    start_estimate_s: _SecondsOrNone | None = None


class _Arm(_Table):
    role: Role
    symbol: _Name | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    speculation: bool | None = None


class _Quality(_Table):
    """A [[cells]] table with role = "quality"."""

    name: _Name
    role: Literal["quality"]
    band: _Folder
    subset: str | None = None
    estimated_s: _Seconds | None = None


class _Pilot(_Table):
    cells: list[_Name] = Field(default_factory=list)
    subset: str = "short,32k"
    each: Annotated[int, AfterValidator(_positive)] | None = None
    bridge: bool = True
    bridge_sampling: dict[str, Any] | None = None


class _Cell(_Table):
    name: _Name
    decision: bool = False
    primary: str = ""
    guards: list[str] = Field(default_factory=list)
    expected_gain: _Fraction | None = None
    profile: Profile | None = None
    estimated_s: _Seconds | None = None
    sampling: dict[str, Any] | None = None
    expect_identical: _Folder | None = None


class _Claim(_Table):
    text: _Text
    cell: _Name
    metric: str = ""
    from_arm: str = ""
    to_arm: str
    direction: Direction
    threshold: _Fraction


# Keys and types are those of `Sampling`; left out, a key keeps the cell's own value.
_SAMPLING_FIELDS: dict[str, Any] = {
    name: (hint | None, None) for name, hint in get_type_hints(Sampling).items()
}
_Sampling = create_model("_Sampling", __base__=_Table, **_SAMPLING_FIELDS)


class _Limits(Limits):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Advice(AdviceUse):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ThroughputGate(_Table):
    name: _Name
    kind: Literal["throughput"]
    cell: _Name
    metric: str = "decode_tok_s"
    floor: Annotated[float, AfterValidator(_positive)]
    source: _Text
    rate_tolerance: _Fraction | None = None


class _KlGate(_Table):
    name: _Name
    kind: Literal["kl"]
    report: _Folder
    arm: str | None = None
    mean_kl_max: Annotated[float, AfterValidator(_positive)] | None = 0.03
    top1_min: _Fraction | None = 0.95
    ppl_ratio_max: Annotated[float, AfterValidator(_positive)] | None = None
    trusted_share_min: _Fraction = 0.99
    shape: dict[str, Any] = Field(default_factory=dict)


_GATES: dict[str, type[_ThroughputGate] | type[_KlGate]] = {
    "throughput": _ThroughputGate,
    "kl": _KlGate,
}


class _Variable(_Table):
    env: str | None = None
    help: str = ""
    default: str | None = None


_TOP = (
    "window", "arms", "cells", "claims", "limits", "advice", "noise", "gates", "pilot", "variables",
    "target",
)  # fmt: skip
_TARGET_TOP = ("target", "variables")

_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "a table",
    "mapping_type": "a table",
}

_Model = TypeVar("_Model", bound=BaseModel)


def _parse(model: type[_Model], value: Any, source: Source, path: KeyPath) -> _Model:
    """Check one table against its model; the first fault by line is the one that is told.

    A missing key comes last: where it is only misspelt, the unknown key says more.
    """
    if not isinstance(value, dict):
        raise source.error(path, f"expected a table, got {shown(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    keys = list(model.model_fields)
    told = []
    for fault in faults:
        key, kind = fault["loc"], fault["type"]
        at: KeyPath = (*path, *key[:1])
        if kind == "extra_forbidden":
            what = f"unknown key{choices(str(key[0]), keys)}"
        elif kind == "missing":
            what = "missing"
        elif kind == "literal_error":
            valid = [str(option) for option in _options(model, str(key[0]))]
            what = f"unknown value {shown(fault['input'])}{choices(str(fault['input']), valid)}"
        elif kind == "value_error":
            what = str(fault["ctx"]["error"])
        else:
            # A longer location names an array's element or a table's key.
            at = (*path, *key)
            what = f"expected {_WANTED.get(kind, fault['msg'])}, got {shown(fault['input'])}"
        told.append(((kind == "missing", source.line(at)), at, what))
    _, at, what = min(told, key=lambda fault: fault[0])
    raise source.error(at, what)


def _options(model: type[BaseModel], key: str) -> Iterable[Any]:
    """The values of a Literal field, which may also be None."""
    annotation = model.model_fields[key].annotation
    for inner in (annotation, *get_args(annotation)):
        if options := [option for option in get_args(inner) if isinstance(option, str)]:
            return options
    return ()


# -- reading --------------------------------------------------------------------------------------


def example_names() -> tuple[str, ...]:
    """Return the names of the shipped example windows, sorted."""
    folder = resources.files(__package__) / _SHIPPED
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name[:-5] for name in names if name.endswith(".toml")))


def load_spec(
    where: str | Path,
    *,
    variables: Mapping[str, str] | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    campaign: str | Path | None = None,
    report_only: bool = False,
    override: str = "",
    extra_metrics: Collection[str] = (),
    target_kinds: Collection[str] = ("local", "endpoints", "spark-pair", "systemd-unit"),
    environ: Mapping[str, str] | None = None,
) -> WindowSpec:
    """Read and check a window file, given by its path or by a shipped example's name.

    Args:
        where: a TOML file; or a name of `example_names()` when no such file exists.
        variables: values of the file's `[variables.*]`; they win over the environment.
        seed: wins over the file's seed.
        out: wins over the file's out folder (and over its campaign folder's default).
        campaign: wins over the file's campaign folder.
        report_only: the window is measured and reported, and decides nothing.
        override: why the window is opened although a process rule refuses it.
        extra_metrics: metric names that plugins add to the registry's.
        target_kinds: the kinds of target that are registered.
        environ: the environment; `os.environ` when None.

    Raises:
        SpecError: the file is missing or wrong; one line that names file, line and key.
    """
    path, label = _find(where)
    values, source = read_toml(path, label)
    return _Reader(
        path=path,
        values=values,
        source=source,
        metrics=(*METRICS, *(name for name in extra_metrics if name not in METRICS)),
        target_kinds=tuple(target_kinds),
        given=dict(variables or {}),
        environ=os.environ if environ is None else environ,
    ).read(seed=seed, out=out, campaign=campaign, report_only=report_only, override=override)


def _find(where: str | Path) -> tuple[Path, str]:
    """The file that `where` means, and what messages call it."""
    path, label = Path(where), str(where)
    try:
        exists = path.exists() and not (path.is_dir() and label in example_names())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(f"{one_line(label, 200)}: cannot be read: {reason}") from None
    if exists:
        return path, label
    names = example_names()
    if label in names:
        # The shipped files are plain files of the installed package.
        return Path(str(resources.files(__package__) / _SHIPPED / f"{label}.toml")), f"{label}.toml"
    raise SpecError(
        f"{one_line(label, 200)}: no such window file or shipped example{choices(label, names)}"
    )


class _Reader:
    """Turns the values of one window file into a WindowSpec, or raises the first fault."""

    def __init__(
        self,
        *,
        path: Path,
        values: dict[str, Any],
        source: Source,
        metrics: tuple[str, ...],
        target_kinds: tuple[str, ...],
        given: dict[str, str],
        environ: Mapping[str, str],
    ) -> None:
        self._path = path
        self._values = values
        self._source = source
        self._metrics = metrics
        self._kinds = target_kinds
        self._given = given
        self._environ = environ

    def read(
        self,
        *,
        seed: int | None,
        out: str | Path | None,
        campaign: str | Path | None,
        report_only: bool,
        override: str,
    ) -> WindowSpec:
        values, source = self._values, self._source
        _check_top(values, _TOP, source)
        window = _parse(_Window, values.get("window", {}), source, ("window",))
        raw_arms = self._arms_tables()
        raw_cells, raw_quality = self._cells_tables()
        limits = _parse(_Limits, values.get("limits", {}), source, ("limits",))
        advice = _parse(_Advice, values.get("advice", {}), source, ("advice",))
        target_values, target_source, target_file = self._target_file()
        variables = self._variables(target_values, target_source)

        starts, symbols = self._starts(window, raw_arms)
        arms = tuple(
            Arm(
                name=name,
                role=arm.role,
                symbol=symbols[name],
                args=tuple(_fill(arm.args, variables)),
                env=_fill(arm.env, variables),
                settings=_fill(arm.settings, variables),
                speculation=_speculation(arm),
            )
            for name, arm in raw_arms.items()
        )
        cells = tuple(
            CellUse(
                **{
                    **cell.model_dump(),
                    "guards": tuple(cell.guards),
                    "expect_identical": self._identical(position, cell, variables),
                }
            )
            for position, cell in enumerate(raw_cells)
        )
        control = next(arm.name for arm in arms if arm.role == "control")
        repeats = self._repeats(window.repeats, arms, starts)
        pairing = window.pairing or default_pairing(starts, control, interleave=window.interleave)
        if fault := pairing_fault(starts, control, repeats, pairing):
            key = "repeats" if "equal repeats" in fault and not window.pairing else "pairing"
            self._fail(("window", key), fault)
        kind = window.kind or ("candidate" if any(cell.decision for cell in cells) else "report")
        self._check_kind(kind, arms, cells)
        self._check_metrics(arms, cells)
        self._check_repeats(kind, arms, starts, repeats, cells)
        target = self._target(target_values, target_source, target_file, variables)
        if window.interleave and target.kind != "endpoints":
            self._fail(
                ("window", "interleave"),
                f"needs target kind 'endpoints' (servers that run side by side), "
                f"not '{target.kind}'",
            )
        quality = tuple(
            self._quality(len(raw_cells) + place, use, variables)
            for place, use in enumerate(raw_quality)
        )
        claims = self._claims(arms, cells)
        pilot = self._pilot(target.kind, [*raw_cells, *raw_quality])
        out_folder = Path(out if out is not None else window.out)
        campaign_folder = campaign if campaign is not None else window.campaign
        return WindowSpec(
            lane=window.lane,
            name=window.name,
            hypothesis=window.hypothesis,
            kind=kind,
            schedule=window.schedule,
            starts=starts,
            arms=arms,
            cells=cells,
            repeats=repeats,
            pairing=pairing,
            interleave=window.interleave,
            by_profile=window.by_profile,
            smoke=window.smoke,
            start_sd=window.start_sd,
            diff_cv=window.diff_cv,
            clock_cap_mhz=window.clock_cap_mhz,
            report_only=report_only,
            override=self._reason(override),
            limits=Limits(**limits.model_dump()),
            advice=AdviceUse(**advice.model_dump()),
            noise=self._noise(),
            gates=self._gates(arms, cells, starts, repeats, variables),
            quality=quality,
            claims=claims,
            pilot=pilot,
            target=target,
            seed=window.seed if seed is None else self._override_seed(seed),
            out=out_folder,
            campaign=out_folder if campaign_folder is None else Path(campaign_folder),
            cell_modules=self._modules(window.cell_modules),
            start_estimate_s=window.start_estimate_s,
            variables=variables,
            path=self._path,
            source=source,
        )

    def _fail(self, key: KeyPath, message: str) -> NoReturn:
        raise self._source.error(key, message)

    def _override_seed(self, seed: int) -> int:
        try:
            return _seed(seed)
        except ValueError as error:
            raise SpecError(f"seed: {error}") from None

    def _reason(self, text: str) -> str:
        try:
            return _text(text) if text else ""
        except ValueError as error:
            raise SpecError(f"window_override: {error}") from None

    # -- tables ------------------------------------------------------------------------------------

    def _arms_tables(self) -> dict[str, _Arm]:
        tables = self._values.get("arms", {})
        if not isinstance(tables, dict):
            self._fail(("arms",), "expected tables [arms.NAME], got an array")
        if len(tables) > _MAX_TABLES:
            self._fail(("arms",), f"{len(tables)} arms; at most {_MAX_TABLES}")
        arms: dict[str, _Arm] = {}
        for name, table in tables.items():
            try:
                _name(name)
            except ValueError as error:
                self._fail(("arms", name), str(error))
            arms[name] = _parse(_Arm, table, self._source, ("arms", name))
        controls = [name for name, arm in arms.items() if arm.role == "control"]
        if not controls:
            self._fail(("arms",), 'no arm has role = "control"; exactly one is needed')
        if len(controls) > 1:
            self._fail(
                ("arms", controls[1], "role"),
                f"a second control; '{controls[0]}' is the control, exactly one is needed",
            )
        return arms

    def _cells_tables(self) -> tuple[list[_Cell], list[_Quality]]:
        tables = self._values.get("cells", [])
        if not isinstance(tables, list):
            self._fail(("cells",), f"expected tables [[cells]], got {shown(tables)}")
        if not tables:
            self._fail(("cells",), "no cell; at least one [[cells]] is needed")
        if len(tables) > _MAX_TABLES:
            self._fail(("cells",), f"{len(tables)} cells; at most {_MAX_TABLES}")
        cells: list[_Cell] = []
        quality: list[_Quality] = []
        names: set[str] = set()
        for position, table in enumerate(tables):
            key: KeyPath = ("cells", position)
            cell: _Cell | _Quality
            if isinstance(table, dict) and "role" in table:
                cell = _parse(_Quality, table, self._source, key)
            else:
                cell = _parse(_Cell, table, self._source, key)
            if cell.name in names:
                self._fail((*key, "name"), f"cell '{cell.name}' is listed twice")
            names.add(cell.name)
            if isinstance(cell, _Quality):
                quality.append(cell)
                continue
            if quality:
                self._fail(key, "stands after a quality cell; quality cells run last, list them so")
            if cell.sampling is not None:
                self._check_sampling(cell.sampling, (*key, "sampling"))
            cells.append(cell)
        if not cells:
            self._fail(("cells",), "only quality cells; at least one measured cell is needed")
        return cells, quality

    def _claims(self, arms: Sequence[Arm], cells: Sequence[CellUse]) -> tuple[ClaimUse, ...]:
        tables = self._values.get("claims", [])
        if not isinstance(tables, list):
            self._fail(("claims",), f"expected tables [[claims]], got {shown(tables)}")
        if len(tables) > _MAX_TABLES:
            self._fail(("claims",), f"{len(tables)} claims; at most {_MAX_TABLES}")
        claims: list[ClaimUse] = []
        names = [arm.name for arm in arms]
        control = next(arm.name for arm in arms if arm.role == "control")
        for position, table in enumerate(tables):
            key: KeyPath = ("claims", position)
            claim = _parse(_Claim, table, self._source, key)
            known = [cell.name for cell in cells]
            if claim.cell not in known:
                self._fail(
                    (*key, "cell"), f"no cell {shown(claim.cell)}{choices(claim.cell, known)}"
                )
            for where, arm in (("from_arm", claim.from_arm or control), ("to_arm", claim.to_arm)):
                if arm not in names:
                    self._fail((*key, where), f"no arm {shown(arm)}{choices(arm, names)}")
            if claim.to_arm == (claim.from_arm or control):
                self._fail((*key, "to_arm"), "is the arm that it is compared with")
            if claim.metric and claim.metric not in self._metrics:
                self._fail(
                    (*key, "metric"),
                    f"unknown metric {shown(claim.metric)}{choices(claim.metric, self._metrics)}",
                )
            claims.append(ClaimUse(**claim.model_dump()))
        return tuple(claims)

    def _quality(self, position: int, use: _Quality, variables: Mapping[str, str]) -> QualityUse:
        """Read the band that a quality cell names: it is registered before the window begins."""
        # numpy and scipy are loaded only where a window has such a cell.
        from ..quality.bands import load_band

        key: KeyPath = ("cells", position)
        try:
            path = (self._path.parent / str(_fill(use.band, variables))).resolve()
            band, seal = load_band(path)
        except (UsageError, MeasurementRefused, OSError, ValueError) as error:
            self._fail((*key, "band"), one_line(str(error), 400))
        if use.subset is not None and self._subset(use.subset, (*key, "subset")) != band.subset:
            self._fail(
                (*key, "subset"),
                f"'{one_line(use.subset, 40)}', and the band covers '{band.subset}': a band judges "
                "the subset that it was gathered over",
            )
        return QualityUse(
            name=use.name,
            band=str(path),
            band_sha256=seal,
            subset=band.subset,
            estimated_s=use.estimated_s,
        )

    def _noise(self) -> dict[str, float]:
        """The registered noise floor of each metric, a fraction."""
        table = self._values.get("noise", {})
        if not isinstance(table, dict):
            self._fail(("noise",), f"expected a table, got {shown(table)}")
        for metric, floor in table.items():
            key: KeyPath = ("noise", metric)
            if metric not in self._metrics:
                self._fail(key, f"unknown metric{choices(metric, self._metrics)}")
            if isinstance(floor, bool) or not isinstance(floor, (int, float)) or not 0 < floor < 1:
                self._fail(key, f"expected a fraction such as 0.03 for 3 %, got {shown(floor)}")
        return {metric: float(floor) for metric, floor in table.items()}

    def _gates(
        self,
        arms: Sequence[Arm],
        cells: Sequence[CellUse],
        starts: Sequence[Start],
        repeats: Mapping[str, int],
        variables: Mapping[str, str],
    ) -> tuple[ThroughputGate | KlGate, ...]:
        tables = self._values.get("gates", [])
        if not isinstance(tables, list):
            self._fail(("gates",), f"expected tables [[gates]], got {shown(tables)}")
        candidates = [arm.name for arm in arms if arm.role == "candidate"]
        taken = {cell["name"] for cell in self._values["cells"]}
        gates: list[ThroughputGate | KlGate] = []
        for position, table in enumerate(tables):
            key: KeyPath = ("gates", position)
            kind = table.get("kind") if isinstance(table, dict) else None
            if not isinstance(kind, str) or kind not in _GATES:
                valid = ", ".join(_GATES)
                self._fail((*key, "kind"), f"no kind of gate: {shown(kind)}; valid: {valid}")
            given = _parse(_GATES[kind], table, self._source, key)
            if given.name in taken:
                self._fail((*key, "name"), f"'{given.name}' is a cell or a gate already")
            taken.add(given.name)
            if not candidates:
                self._fail(key, "a gate is about a candidate arm, which this window does not have")
            if isinstance(given, _ThroughputGate):
                gates.append(self._throughput(given, key, arms, cells, starts, repeats))
            else:
                gates.append(self._kl(given, key, candidates, variables))
        return tuple(gates)

    def _throughput(
        self,
        given: _ThroughputGate,
        key: KeyPath,
        arms: Sequence[Arm],
        cells: Sequence[CellUse],
        starts: Sequence[Start],
        repeats: Mapping[str, int],
    ) -> ThroughputGate:
        names = [cell.name for cell in cells]
        if given.cell not in names:
            self._fail(
                (*key, "cell"), f"no measured cell of this window{choices(given.cell, names)}"
            )
        higher = [
            name
            for name in self._metrics
            if name not in METRICS or not METRICS[name].lower_is_better
        ]
        if given.metric not in higher:
            self._fail(
                (*key, "metric"),
                f"a floor needs a metric of which more is better{choices(given.metric, higher)}",
            )
        if given.rate_tolerance is not None and given.metric != "decode_tok_s":
            self._fail((*key, "rate_tolerance"), "belongs to metric 'decode_tok_s'")
        for arm in arms:
            count = sum(repeats[start.name] for start in starts if start.arm == arm.name)
            if arm.role == "candidate" and count < GATE_REPEATS:
                self._fail(
                    ("window", "repeats"),
                    f"arm '{arm.name}' has {count} over all its starts; gate '{given.name}' needs "
                    f"{GATE_REPEATS} or more",
                )
        return ThroughputGate(**given.model_dump())

    def _kl(
        self,
        given: _KlGate,
        key: KeyPath,
        candidates: Sequence[str],
        variables: Mapping[str, str],
    ) -> KlGate:
        """Judge the report when the window is read: it was scored before, and is no value of it."""
        from ..quality.reference import Limits, judge

        arm = given.arm or candidates[0]
        if given.arm is None and len(candidates) > 1:
            self._fail((*key, "arm"), f"missing; valid: {', '.join(candidates)}")
        if arm not in candidates:
            self._fail((*key, "arm"), f"no candidate arm{choices(arm, candidates)}")
        for name, value in given.shape.items():
            if not isinstance(value, (str, int, float)):
                self._fail(
                    (*key, "shape", name), f"expected a text or a number, got {shown(value)}"
                )
        limits = Limits(
            mean_kl_max=given.mean_kl_max,
            top1_min=given.top1_min,
            ppl_ratio_max=given.ppl_ratio_max,
            trusted_share_min=given.trusted_share_min,
        )
        path = (self._path.parent / str(_fill(given.report, variables))).resolve()
        try:
            receipt = judge(path, limits, given.shape)
        except (MeasurementRefused, UsageError, OSError, ValueError) as error:
            self._fail((*key, "report"), one_line(str(error), 400))
        told = receipt.report
        return KlGate(
            name=given.name,
            arm=arm,
            report=path.name,
            report_sha256=str(told["sha256"]),
            verdict=receipt.verdict,
            checks=tuple(receipt.to_json()["checks"]),
            scored={k: v for k, v in told.items() if k not in ("path", "ref_dir")},
            shape=given.shape,
        )

    def _identical(
        self, position: int, use: _Cell, variables: Mapping[str, str]
    ) -> IdenticalUse | None:
        """Read the A/A pilot that allows a cell to expect identical streams of its controls."""
        if use.expect_identical is None:
            return None
        from ..quality.aa_compare import PILOT_SCHEMA, identical_fault
        from ..quality.sealed import read_sealed

        key: KeyPath = ("cells", position, "expect_identical")
        if not use.decision:
            self._fail(key, f"cell '{use.name}' decides nothing; only a decision cell expects it")
        try:
            path = (self._path.parent / str(_fill(use.expect_identical, variables))).resolve()
            pilot, seal = read_sealed(path, "pilot", PILOT_SCHEMA, dict)
            measured = pilot["definition"]["cells"].get(use.name, {})
            fault = identical_fault(pilot, {"name": use.name, **measured.get("cell", {})})
        except (UsageError, MeasurementRefused, OSError, ValueError) as error:
            self._fail(key, one_line(str(error), 400))
        except (KeyError, TypeError, AttributeError):
            self._fail(key, f"{one_line(str(path), 200)} is not the record of an A/A pilot")
        if fault:
            self._fail(key, fault)
        return IdenticalUse(
            record=str(path),
            sha256=seal,
            cell=measured["cell"],
            prompt_sha256=measured["prompt_sha256"],
        )

    def _subset(self, text: str, key: KeyPath) -> str:
        from ..quality.prompts import parse_subset

        try:
            return ",".join(parse_subset(text))
        except UsageError as error:
            self._fail(key, str(error))

    def _pilot(self, kind: str, cells: Sequence[_Cell | _Quality]) -> PilotUse | None:
        if "pilot" not in self._values:
            return None
        given = _parse(_Pilot, self._values["pilot"], self._source, ("pilot",))
        if kind == "endpoints":
            self._fail(
                ("pilot",),
                "start B is the restored production, which target kind 'endpoints' does not have; "
                "run it by hand: dsv41 aa-pilot run",
            )
        for position, cell in enumerate(cells):
            if cell.name == PILOT_CELL:
                self._fail(("cells", position, "name"), f"'{PILOT_CELL}' is the pilot's own name")
        if given.bridge_sampling is not None:
            self._check_sampling(given.bridge_sampling, ("pilot", "bridge_sampling"))
        subset = given.subset
        return PilotUse(
            cells=tuple(given.cells),
            subset=None if subset == "none" else self._subset(subset, ("pilot", "subset")),
            each=given.each,
            bridge=given.bridge,
            bridge_sampling=given.bridge_sampling,
        )

    def _check_sampling(self, sampling: dict[str, Any], key: KeyPath) -> None:
        _parse(_Sampling, sampling, self._source, key)
        try:
            Sampling(**sampling)
        except ValueError as error:
            self._fail(key, one_line(str(error)))

    # -- schedule ----------------------------------------------------------------------------------

    def _starts(
        self, window: _Window, arms: Mapping[str, _Arm]
    ) -> tuple[tuple[Start, ...], dict[str, str]]:
        key: KeyPath = ("window", "schedule")
        try:
            tokens = split_schedule(window.schedule)
        except ValueError as error:
            self._fail(key, str(error))
        symbols = self._symbols(tokens, arms)
        by_token = {symbol: name for name, symbol in symbols.items()} | {
            name: name for name in arms
        }
        for token in tokens:
            if token not in by_token:
                self._fail(key, f"unknown token {shown(token)}{choices(token, sorted(by_token))}")
        try:
            starts = name_starts(tokens, by_token)
        except ValueError as error:
            self._fail(key, str(error))
        started = {start.arm for start in starts}
        for name in arms:
            if name not in started:
                self._fail(
                    ("arms", name),
                    f"never started; the schedule '{one_line(window.schedule, 60)}' has neither "
                    f"'{symbols[name]}' nor '{name}'",
                )
        ids: dict[str, tuple[str, str]] = {}
        for start in starts:
            for cell in self._values["cells"]:
                joined = f"{start.name}-{cell['name']}"
                if joined in ids:
                    self._fail(
                        key,
                        f"start {start.name} with cell {cell['name']} and start "
                        f"{ids[joined][0]} with cell {ids[joined][1]} would have the same item id; "
                        "choose other symbols",
                    )
                ids[joined] = (start.name, cell["name"])
        return starts, symbols

    def _symbols(self, tokens: Sequence[str], arms: Mapping[str, _Arm]) -> dict[str, str]:
        """Each arm's symbol: its own, else K or C for the control, I, X or X1, X2, … ."""
        candidates = [name for name, arm in arms.items() if arm.role == "candidate"]
        symbols: dict[str, str] = {}
        for name, arm in arms.items():
            if arm.symbol is not None:
                symbols[name] = arm.symbol
            elif arm.role == "control":
                symbols[name] = "K" if "K" in tokens else "C"
            elif len(candidates) == 1:
                symbols[name] = "I" if "I" in tokens else "X"
            else:
                symbols[name] = f"X{candidates.index(name) + 1}"
        owner: dict[str, str] = {}
        for name, symbol in symbols.items():
            key: KeyPath = ("arms", name, "symbol")
            if symbol in owner:
                self._fail(key, f"symbol '{symbol}' is arm '{owner[symbol]}' already")
            if symbol in arms and symbol != name:
                self._fail(key, f"symbol '{symbol}' is the name of another arm")
            owner[symbol] = name
        return symbols

    def _repeats(self, given: Any, arms: Sequence[Arm], starts: Sequence[Start]) -> dict[str, int]:
        key: KeyPath = ("window", "repeats")
        if not isinstance(given, dict):
            count = self._count(given, key)
            return {start.name: count for start in starts}
        names = {arm.name for arm in arms}
        by_start = {start.name: start for start in starts}
        for name in given:
            if name not in names and name not in by_start:
                valid = list(dict.fromkeys([*(arm.name for arm in arms), *by_start]))
                self._fail((*key, name), f"unknown arm or start{choices(name, valid)}")
            if name in names and name in by_start and by_start[name].arm != name:
                self._fail(
                    (*key, name),
                    f"'{name}' is an arm and a start of arm '{by_start[name].arm}'; "
                    "choose another symbol",
                )
        repeats: dict[str, int] = {}
        for start in starts:
            chosen = start.name if start.name in given else start.arm
            if chosen not in given:
                self._fail(key, f"no repeats for start {start.name} (arm '{start.arm}')")
            repeats[start.name] = self._count(given[chosen], (*key, chosen))
        return repeats

    def _count(self, value: Any, key: KeyPath) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._fail(key, f"expected an integer or a table of integers, got {shown(value)}")
        if not 1 <= value <= _MAX_REPEATS:
            self._fail(key, f"{value} is out of range; valid: 1 to {_MAX_REPEATS}")
        return value

    # -- rules that span tables --------------------------------------------------------------------

    def _check_kind(self, kind: Kind, arms: Sequence[Arm], cells: Sequence[CellUse]) -> None:
        key: KeyPath = ("window", "kind")
        deciding = [position for position, cell in enumerate(cells) if cell.decision]
        if kind != "candidate":
            if deciding:
                self._fail(
                    ("cells", deciding[0], "decision"),
                    f"a window of kind '{kind}' decides nothing; remove it or use "
                    'kind = "candidate"',
                )
            return
        if all(arm.role == "control" for arm in arms):
            self._fail(("arms",), 'no arm has role = "candidate"; kind = "candidate" needs one')
        if not deciding:
            self._fail(
                key,
                "no cell has decision = true; name one or two decision cells, or use "
                'kind = "report"',
            )

    def _check_metrics(self, arms: Sequence[Arm], cells: Sequence[CellUse]) -> None:
        plain = [arm.name for arm in arms if arm.speculation is False]
        for position, cell in enumerate(cells):
            here: KeyPath = ("cells", position)
            if cell.decision and not cell.primary:
                self._fail(
                    (*here, "primary"),
                    f"missing; a decision cell names its primary metric; valid: "
                    f"{', '.join(self._metrics)}",
                )
            uses = [((*here, "primary"), cell.primary)] if cell.primary else []
            uses += [((*here, "guards", place), guard) for place, guard in enumerate(cell.guards)]
            seen: set[str] = set()
            for key, metric in uses:
                if metric not in self._metrics:
                    self._fail(
                        key, f"unknown metric {shown(metric)}{choices(metric, self._metrics)}"
                    )
                if metric in seen:
                    self._fail(key, f"metric '{metric}' is used twice in cell '{cell.name}'")
                seen.add(metric)
                if plain:
                    self._check_speculation(key, metric, plain, arms)

    def _check_speculation(
        self, key: KeyPath, metric: str, plain: Sequence[str], arms: Sequence[Arm]
    ) -> None:
        """Refuse what a plain arm cannot have, and rounds that mean two things in two arms."""
        if metric in METRICS and METRICS[metric].needs_speculation:
            self._fail(
                key, f"metric '{metric}' needs speculation, which arm '{plain[0]}' does not have"
            )
        if metric in ("ms_per_round", "rounds") and len(plain) < len(arms):
            drafting = next(arm.name for arm in arms if arm.name not in plain)
            self._fail(
                key,
                f"metric '{metric}' cannot compare arm '{drafting}' with arm '{plain[0]}', which "
                "has no speculation: a round is not the same thing in both; use decode_tok_s",
            )

    def _check_repeats(
        self,
        kind: Kind,
        arms: Sequence[Arm],
        starts: Sequence[Start],
        repeats: Mapping[str, int],
        cells: Sequence[CellUse],
    ) -> None:
        key: KeyPath = ("window", "repeats")
        items = sum(repeats.values()) * len(cells)
        if items > MAX_ITEMS:
            self._fail(key, f"{items} items; at most {MAX_ITEMS}")
        if kind != "candidate":
            return
        for arm in arms:
            count = sum(repeats[start.name] for start in starts if start.arm == arm.name)
            if count < MIN_REPEATS:
                self._fail(
                    key,
                    f"arm '{arm.name}' has {count} repeat{'s' if count != 1 else ''} over all its "
                    f"starts; a decision cell needs at least {MIN_REPEATS} in every arm",
                )

    def _modules(self, names: Sequence[str]) -> tuple[Path, ...]:
        found: list[Path] = []
        for position, name in enumerate(names):
            key: KeyPath = ("window", "cell_modules", position)
            try:
                path = (self._path.parent / name).resolve()
                there = path.is_file()
            except (OSError, ValueError, RuntimeError):
                there = False
            if not there:
                self._fail(key, f"no file {shown(name)} beside the window file")
            if path.suffix != ".py":
                self._fail(key, f"{shown(name)} is no Python file (.py)")
            found.append(path)
        return tuple(found)

    # -- target and variables ----------------------------------------------------------------------

    def _target_file(self) -> tuple[dict[str, Any], Source, Path]:
        """The values that hold the [target] table: this file's, or another file's."""
        target = self._values.get("target")
        if target is None:
            self._fail((), 'target: missing; a [target] table, or target = "FILE.toml" on top')
        if isinstance(target, dict):
            return self._values, self._source, self._path
        if not isinstance(target, str):
            self._fail(("target",), f"expected a table or a file's name, got {shown(target)}")
        try:
            path = self._path.parent / target
            there = path.is_file()
        except (OSError, ValueError):
            there = False
        if not there:
            self._fail(("target",), f"no file {shown(target)} beside the window file")
        values, source = read_toml(path, str(path))
        _check_top(values, _TARGET_TOP, source)
        if not isinstance(values.get("target"), dict):
            raise source.error((), "target: missing; the file needs a [target] table")
        return values, source, path

    def _target(
        self, values: Mapping[str, Any], source: Source, path: Path, variables: Mapping[str, str]
    ) -> TargetTable:
        table = values["target"]
        kind = table.get("kind")
        if kind is None:
            raise source.error(("target", "kind"), f"missing; valid: {', '.join(self._kinds)}")
        if not isinstance(kind, str):
            raise source.error(("target", "kind"), f"expected a string, got {shown(kind)}")
        if kind not in self._kinds:
            raise source.error(
                ("target", "kind"), f"unknown target kind {shown(kind)}{choices(kind, self._kinds)}"
            )
        filled: dict[str, Any] = _fill(table, variables)
        return TargetTable(kind=kind, table=filled, where=str(path.resolve()), source=source)

    def _variables(self, target_values: Mapping[str, Any], target: Source) -> dict[str, str]:
        declared: dict[str, tuple[_Variable, Source]] = {}
        files = [(self._values, self._source)]
        if target is not self._source:
            files.append((dict(target_values), target))
        for values, source in files:
            tables = values.get("variables", {})
            if not isinstance(tables, dict):
                raise source.error(
                    ("variables",), f"expected tables [variables.NAME], got {shown(tables)}"
                )
            for name, table in tables.items():
                key: KeyPath = ("variables", name)
                if not _VARIABLE.fullmatch(name) or name in _RESERVED:
                    raise source.error(
                        key,
                        "no valid name; valid: letters, digits and '_', not starting with a "
                        f"digit, and none of {', '.join(_RESERVED)}",
                    )
                if name in declared:
                    raise source.error(key, f"declared in {declared[name][1].name} already")
                declared[name] = (_parse(_Variable, table, source, key), source)
        for name in self._given:
            if name not in declared:
                raise SpecError(
                    f"{self._source.name}: variable {shown(name)} is not declared"
                    f"{choices(name, list(declared))}"
                )
        return {name: self._value(name, *found) for name, found in declared.items()}

    def _value(self, name: str, variable: _Variable, source: Source) -> str:
        if name in self._given:
            value = self._given[name]
        elif variable.env and variable.env in self._environ:
            value = self._environ[variable.env]
        elif variable.default is not None:
            value = variable.default
        else:
            value = ""
        if not value and variable.default != "":
            also = f" or the environment variable {variable.env}" if variable.env else ""
            about = f" ({one_line(variable.help, 120)})" if variable.help else ""
            raise source.error(
                ("variables", name), f"not set{about}; give --window-set {name}=VALUE{also}"
            )
        return value


def _check_top(values: Mapping[str, Any], valid: Sequence[str], source: Source) -> None:
    for key in values:
        if key not in valid:
            raise source.error((key,), f"unknown key{choices(key, valid)}")


def _speculation(arm: _Arm) -> bool | None:
    if arm.speculation is not None:
        return arm.speculation
    said = arm.settings.get("speculation")
    return said if isinstance(said, bool) else None


def _fill(value: Any, variables: Mapping[str, str]) -> Any:
    """Put the variables into every string of a value; other placeholders stay for the target."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda found: variables.get(found[1], found[0]), value)
    if isinstance(value, dict):
        return {key: _fill(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, variables) for inner in value]
    return value
