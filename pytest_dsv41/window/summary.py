"""summary.json: what a window was and how it ended, the one file that later readers go by.

The window cap, the history, the chain gate, `dsv41 windows`, `compare` and every report read this
file and nothing else to learn how a window ended. It is written last of all files that hold facts
and atomically, so a folder that has one belongs to a window that ended; `junit.xml` and
`report.html` are views that can be made again from it and from plan.json, values.jsonl and
journal.jsonl beside it.

The strings in `status`, `restore.status` and `chain` are the ones that WIN2 gives ("Back-to-back
mode", "Process rules as code"); a status of the restore may carry a detail after a colon. A head
that this version does not know is kept, and `Restore.production_up` is then False: what cannot be
read never counts as production being up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .. import durable
from ..errors import UsageError
from ..text import one_line
from .names import SUMMARY as FILE_NAME
from .names import summary_path

__all__ = [
    "CHAINED",
    "COUNTED_STATUSES",
    "FILE_NAME",
    "RESTORE_CHAINED",
    "RESTORE_FAILED",
    "RESTORE_NOT_NEEDED",
    "RESTORE_RESTORED",
    "SCHEMA",
    "STATUSES",
    "WATCH_FAILED",
    "WATCH_NOT_RUN",
    "WATCH_PASSED",
    "ArchiveHead",
    "ArchiveUse",
    "ArmInfo",
    "ArmKey",
    "CellResolution",
    "ClaimInfo",
    "Cost",
    "CostRow",
    "PilotInfo",
    "ProcessRules",
    "Promotion",
    "Restore",
    "RuleAnswer",
    "Spread",
    "StartInfo",
    "Status",
    "Summary",
    "TargetInfo",
    "Watch",
    "WindowInfo",
    "json_schema",
    "read_summary",
    "summary_path",
    "write_summary",
]

SCHEMA: Final = "dsv41-summary-v1"

Status = Literal[
    "CANDIDATE", "NOT A CANDIDATE", "INCONCLUSIVE", "COMPLETE", "INCOMPLETE", "REFUSED"
]
STATUSES: Final[tuple[Status, ...]] = (
    "CANDIDATE",
    "NOT A CANDIDATE",
    "INCONCLUSIVE",
    "COMPLETE",
    "INCOMPLETE",
    "REFUSED",
)
COUNTED_STATUSES: Final[frozenset[str]] = frozenset(
    {"COMPLETE", "INCONCLUSIVE", "NOT A CANDIDATE", "CANDIDATE"}
)
"""The statuses that the two-window cap counts (WIN2 "Process rules as code" item 2)."""

RESTORE_RESTORED: Final = "RESTORED"
"""Production started again and gave six IDENTICAL greedy answers."""
RESTORE_CHAINED: Final = "CHAINED: production left down"
"""A chained window that is not the chain's last: down on purpose, marker written."""
RESTORE_NOT_NEEDED: Final = "NOT NEEDED: production untouched"
"""The window ended before it touched production, or its target has none."""
RESTORE_FAILED: Final = "FAILED"
"""Production is down, or not known to be up and itself."""

WATCH_PASSED: Final = "PASS"
WATCH_FAILED: Final = "FAIL"
WATCH_NOT_RUN: Final = "NOT RUN"

CHAINED: Final = "CHAINED"
"""`chain` of a window that left production down for the next one."""

_Fraction = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    """Fields that a later writer adds are kept and carried through, never an error."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    def extras(self) -> dict[str, Any]:
        """Return the fields that this version has no name for."""
        return dict(self.model_extra or {})


class WindowInfo(_Part):
    """What was asked."""

    id: str = Field(description="Unique id of the window, `<lane>-<name>-W-<UTC>`.")
    lane: str = Field(description="The line of work that the window belongs to.")
    name: str = Field(description="Name of the window in its file.")
    hypothesis: str = Field(default="", description="What the window was to find out.")
    kind: str = Field(default="candidate", description="candidate, report or admission.")
    seed: int | None = Field(default=None, description="Seed of everything random in the window.")
    plan_digest: str | None = Field(
        default=None, description="sha256 of the plan, as plan.json has it."
    )
    folder: str = Field(default="", description="Name of the window's folder when it was written.")


class TargetInfo(_Part):
    """The machines. A target adds fields of its own."""

    kind: str = Field(
        description="local, endpoints, spark-pair, systemd-unit, or a target of the user's own."
    )


class ArmInfo(_Part):
    """One server configuration."""

    name: str = Field(description="Name of the arm.")
    role: str = Field(description="control or candidate.")
    symbol: str | None = Field(default=None, description="The arm's sign in the schedule.")


class StartInfo(_Part):
    """One launch of an arm."""

    name: str = Field(description="Name of the start, such as C1.")
    arm: str = Field(description="The arm that was started.")
    started_utc: str | None = Field(default=None, description="When the start was begun, UTC.")
    ready_s: float | None = Field(default=None, description="Seconds until it was healthy.")
    ended_utc: str | None = Field(default=None, description="When it was stopped, UTC.")
    reason: str | None = Field(default=None, description="Why it did not come up, if it did not.")


class Promotion(_Part):
    """What a CANDIDATE may be promoted on."""

    arm: str = Field(description="The candidate arm.")
    profile: str | None = Field(
        default=None, description="The profile or group the promotion relies on: single, multi."
    )
    cells: tuple[str, ...] = Field(default=(), description="The decision cells that it won.")


class Restore(_Part):
    """How production came back."""

    status: str = Field(
        min_length=1,
        description="RESTORED, `CHAINED: production left down`, `NOT NEEDED: production untouched`"
        " or FAILED; text after a colon is a detail.",
        examples=[RESTORE_RESTORED, RESTORE_CHAINED, RESTORE_NOT_NEEDED, RESTORE_FAILED],
    )
    answers_identical: int | None = Field(
        default=None,
        description="How many of the six greedy answers equal the capture's; null: not compared.",
    )
    seconds: float | None = Field(default=None, description="Seconds that the restore took.")
    reason: str | None = Field(default=None, description="Why it failed, if it did.")
    seam: str | None = Field(
        default=None,
        description="The planned measurement of production between the check and the end of the"
        " HOLD: DONE, FAILED or SKIPPED, text after a colon says why; null: none was planned.",
    )

    @property
    def head(self) -> str:
        """The status without its detail."""
        return self.status.partition(":")[0].strip()

    @property
    def production_up(self) -> bool:
        """Whether production is known to serve: restored, or never touched."""
        return self.head in {"RESTORED", "NOT NEEDED"}


class Watch(_Part):
    """The watch over production after the restore."""

    status: str = Field(
        min_length=1, description="PASS, FAIL or NOT RUN.", examples=["PASS", "FAIL", "NOT RUN"]
    )
    seconds: float | None = Field(default=None, description="How long it watched.")
    samples: int | None = Field(default=None, description="How often it looked.")
    reason: str | None = Field(default=None, description="What it saw, if it failed.")


class PilotInfo(_Part):
    """The A/A pilot that ran beside the window; it decides nothing. Figures are fractions."""

    status: str = Field(
        min_length=1,
        description="PASSED (every seeded cell with one request at a time gave the same tokens in"
        " the same rounds in both starts), FAILED, or INCOMPLETE.",
        examples=["PASSED", "FAILED", "INCOMPLETE"],
    )
    reasons: tuple[str, ...] = Field(default=(), description="Why it is not PASSED.")
    record: str | None = Field(default=None, description="The pilot's record, in the folder.")
    expect_identical: bool = Field(
        default=False, description="Whether expect_identical may rest on this pilot."
    )
    diff_cv: dict[str, _Fraction] = Field(
        default_factory=dict, description="`<cell>/<metric>` to the CV of paired differences."
    )
    start_sd: dict[str, _Fraction] = Field(
        default_factory=dict, description="`<cell>/<metric>` to the between-start SD, 1 df."
    )
    distribution: dict[str, Any] | None = Field(
        default=None, description="The two probes beside each other; null: no probe."
    )
    h4: str | None = Field(default=None, description="The bridge's H4 line; null: no bridge.")


class ArchiveHead(_Part):
    """State of the control archive at one moment."""

    rows: int = Field(ge=0, description="How many rows.")
    sha256: str | None = Field(default=None, description="sha256 of the last row, the chain's end.")


class ArchiveUse(_Part):
    """The control archive before and after the window's append."""

    path: str | None = Field(default=None, description="The archive's file.")
    before: ArchiveHead | None = Field(default=None, description="Head before the append.")
    after: ArchiveHead | None = Field(default=None, description="Head after the append.")
    appended: int = Field(default=0, ge=0, description="Rows appended by this window.")


class Spread(_Part):
    """Relative spread of the control repeats, and the archive's of the same definition.

    Both are SD (n − 1) divided by the mean, as fractions: 0.02 is 2 %.
    """

    in_window_cv: _Fraction | None = Field(
        default=None, description="Spread of this window's control repeats."
    )
    archive_cv: _Fraction | None = Field(
        default=None,
        description="The archive's pooled within-window spread of the same definition; null: the"
        " archive has none.",
    )


class CostRow(_Part):
    """One metric of one cell in both arms. Fractions: 0.02 is 2 %."""

    cell: str = Field(description="The cell.")
    metric: str = Field(description="The metric.")
    unit: str = Field(default="", description="Its unit.")
    control: _Fraction | None = Field(default=None, description="Mean of the control's repeats.")
    candidate: _Fraction | None = Field(
        default=None, description="Mean of the candidate's repeats."
    )
    n_control: int = Field(default=0, ge=0, description="Repeats of the control.")
    n_candidate: int = Field(default=0, ge=0, description="Repeats of the candidate.")
    delta: _Fraction | None = Field(
        default=None, description="Candidate over control, less 1; null: the control is 0."
    )
    floor: _Fraction | None = Field(
        default=None, description="The metric's registered noise; null: none is registered."
    )
    outside: bool | None = Field(
        default=None, description="Whether the change is larger than the noise; null: not known."
    )
    better: bool | None = Field(
        default=None, description="Whether a change outside the noise is a gain; null: inside."
    )


class ArmKey(_Part):
    """One key in which the two arms differ."""

    key: str = Field(description="Flag, `env NAME` (its value hashed), `setting NAME`.")
    control: str = Field(description="In the control; `not set` where it has none.")
    candidate: str = Field(description="In the candidate.")


class Cost(_Part):
    """What a candidate changes, metric by metric, and in what its arm differs; decides nothing."""

    rows: tuple[CostRow, ...] = Field(default=(), description="Every metric of both arms.")
    differing: tuple[ArmKey, ...] = Field(default=(), description="Every differing key.")


class RuleAnswer(_Part):
    """A process rule's answer."""

    answer: str = Field(
        description="ALLOW, QUEUE, NOT JUDGED or REFUSE.", examples=["ALLOW", "QUEUE", "REFUSE"]
    )
    reason: str = Field(default="", description="Why, in one line.")

    @property
    def refuses(self) -> bool:
        """Whether the window must not open."""
        return self.answer == "REFUSE"


def claimed(direction: str, threshold: float) -> str:
    """Say what a claim expects of a metric, in words."""
    size = f"{100 * threshold:g} %"
    return f"within {size} either way" if direction == "flat" else f"{direction} {size} or more"


class ClaimInfo(_Part):
    """A claim that was registered before the window, and what became of it. Fractions."""

    text: str = Field(description="The claim in words.")
    cell: str = Field(description="The cell that it speaks of.")
    metric: str = Field(description="The metric that it speaks of.")
    from_arm: str = Field(description="The arm that is compared with.")
    to_arm: str = Field(description="The arm that is compared.")
    direction: str = Field(
        description="up, down (by at least the threshold), or flat (by no more, either way).",
        examples=["up", "down", "flat"],
    )
    threshold: _Fraction = Field(description="The registered threshold, a fraction.")
    answer: str = Field(
        description="HELD, FALSIFIED, or NOT RESOLVABLE.",
        examples=["HELD", "FALSIFIED", "NOT RESOLVABLE"],
    )
    reason: str = Field(description="What was seen, in one line.")
    change: _Fraction | None = Field(
        default=None, description="Relative change of the metric's mean; null: not known."
    )
    low: _Fraction | None = Field(default=None, description="Lower end of its 95 % interval.")
    high: _Fraction | None = Field(default=None, description="Upper end of its 95 % interval.")

    @property
    def line(self) -> str:
        """The claim and its answer, in one line."""
        return (
            f"{self.answer}: {self.text} ({self.cell}/{self.metric}, {self.from_arm} to "
            f"{self.to_arm}: {claimed(self.direction, self.threshold)}): {self.reason}"
        )


class CellResolution(RuleAnswer):
    """The resolution filter's answer for one decision cell and candidate arm."""

    cell: str = Field(description="The decision cell.")
    arm: str = Field(description="The candidate arm.")
    metric: str = Field(description="The cell's primary metric.")
    design: str = Field(description="pairs:N, seeded:N or unpaired:AvB.")
    expected_gain: _Fraction | None = Field(
        default=None, description="The gain that the window file expects, a fraction."
    )
    half_width: _Fraction | None = Field(
        default=None, description="What the design can resolve, a fraction; null: not known."
    )
    least_design: str | None = Field(
        default=None, description="The smallest design of the same kind that would queue."
    )

    @property
    def named(self) -> str:
        """Cell, metric and arm, as a line begins."""
        return f"{self.cell}/{self.metric}, arm {self.arm}"


class ProcessRules(_Part):
    """What was asked before the window opened (WIN2 "Process rules as code")."""

    window_cap: RuleAnswer = Field(description="The two-window cap.")
    resolution: tuple[CellResolution, ...] = Field(
        default=(), description="The resolution filter, for each decision cell and candidate arm."
    )
    override: str | None = Field(
        default=None, description="Why the window was opened although a rule refused; null: none."
    )

    @property
    def refusals(self) -> list[str]:
        """Why the window must not open, one line each; an override does not empty it."""
        found = [f"window cap: {self.window_cap.reason}"] if self.window_cap.refuses else []
        return found + [
            f"resolution: {cell.named}: {cell.reason}" for cell in self.resolution if cell.refuses
        ]

    @property
    def lines(self) -> list[str]:
        """Every answer, one line each."""
        cap = self.window_cap
        found = [f"window cap: {cap.answer}: {cap.reason}"]
        found += [f"resolution: {one.named}: {one.answer}: {one.reason}" for one in self.resolution]
        return found + ([f"overridden: {self.override}"] if self.override else [])


class Summary(_Part):
    """One window, as it ended. `schema_name` is the key `schema` of the file."""

    schema_name: Literal["dsv41-summary-v1"] = Field(
        default=SCHEMA, alias="schema", description="Name and version of this schema."
    )
    window: WindowInfo = Field(description="What was asked: names, seed and plan.")
    status: Status = Field(
        description="The verdict of a candidate window; COMPLETE for a report or admission window;"
        " INCOMPLETE when it was stopped or a decision item is missing; REFUSED when the state of"
        " the world forbade it before anything was touched."
    )
    exit_code: int = Field(
        ge=0,
        le=255,
        description="20 production down, 21 alert, 13 refused, 12 incomplete, 11 not a candidate,"
        " 10 inconclusive, 0 candidate or complete.",
    )
    started_utc: str | None = Field(default=None, description="When the window began, UTC.")
    ended_utc: str | None = Field(default=None, description="When it ended, UTC.")
    target: TargetInfo | None = Field(default=None, description="Kind of the machines, and more.")
    arms: tuple[ArmInfo, ...] = Field(default=(), description="Every arm, control first.")
    starts: tuple[StartInfo, ...] = Field(default=(), description="Every start that was begun.")
    decision_cells: tuple[str, ...] = Field(default=(), description="The cells that decide.")
    decisions: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Candidate arm to its decision, with everything needed to follow the sums.",
    )
    explanations: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Candidate arm to its verdict in plain sentences."
    )
    promotion: Promotion | None = Field(default=None, description="Only for a CANDIDATE.")
    claims: tuple[ClaimInfo, ...] = Field(
        default=(), description="The claims that were registered, and what became of them."
    )
    ledgers: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Candidate arm to what its boot ledger has other than the control's, one line"
        " each; an arm without a ledger has none.",
    )
    incomplete: tuple[str, ...] = Field(
        default=(), description="What is missing, one line each; empty for a whole window."
    )
    notes: tuple[str, ...] = Field(
        default=(), description="What is missing elsewhere and stops nothing, one line each."
    )
    advisory: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Registered advice, or a rule of the user's own, to what it says; it never"
        " decides.",
    )
    pilot: PilotInfo | None = Field(
        default=None, description="The A/A pilot beside the window; null: none was planned."
    )
    stopped: str | None = Field(
        default=None, description="Why the window ended early or was refused; null: it did not."
    )
    process_rules: ProcessRules | None = Field(
        default=None,
        description="What the window cap and the resolution filter said; null: not asked.",
    )
    restore: Restore = Field(description="How production came back.")
    watch: Watch = Field(
        default=Watch(status=WATCH_NOT_RUN), description="The watch after the restore."
    )
    chain: str | None = Field(
        default=None,
        description="State of the chain at the window's end: CHAINED (production left down for the"
        " next window), ENDED, ENDED WITH ALERT; null: no chain.",
        examples=["CHAINED", "ENDED", "ENDED WITH ALERT"],
    )
    production_commit: str | None = Field(
        default=None, description="Commit of production, 40 hex digits; never an experiment's."
    )
    archive: ArchiveUse | None = Field(default=None, description="The control archive.")
    spreads: dict[str, Spread] = Field(
        default_factory=dict, description="`<cell>/<metric>` to its spreads."
    )
    costs: dict[str, Cost] = Field(
        default_factory=dict,
        description="Candidate arm to its cost table, where the window registers noise.",
    )
    alerts: tuple[str, ...] = Field(
        default=(), description="What a person must look at, one line each."
    )
    software: dict[str, str] = Field(
        default_factory=dict, description="Versions of what measured and of what was measured."
    )

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, data: Any) -> Any:
        return _writable(data)

    def to_json(self) -> dict[str, Any]:
        """Return the file's content as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)


def _writable(value: Any) -> Any:
    """Return `value` without what JSON has no form for, so that no odd value costs the summary.

    A number that is not finite becomes null; half a surrogate pair becomes its escape.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    return value


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of summary.json."""
    schema = Summary.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = SCHEMA
    return schema


def write_summary(folder: Path, summary: Summary) -> Path:
    """Write `folder`/summary.json atomically and durably, and return its path.

    Call it after every other file that holds facts. It is laid out for people and is plain ASCII,
    so a hostile text in it reaches no terminal.
    """
    path = folder / FILE_NAME
    durable.write_atomic(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")
    return path


def _from_runner(data: dict[str, Any]) -> dict[str, Any]:
    """Read a summary without a schema name: the form that WIN2's runners write.

    They name the window by its folder, hold one decision, and give the production commit in one of
    two fields ("Control archive", row `commit`), the second of which may be a table with `commit`.
    """
    named = data.get("window")
    identity = named if isinstance(named, str) and named else str(data["folder"])
    lane, _, rest = identity.partition("-")
    name = rest.partition("-W-")[0] or rest
    decision = data.get("decision")
    restore = data.get("restore")
    if not isinstance(restore, dict):
        restore = {"status": restore}
    production = data.get("production")
    commits = (
        data.get("production_commit"),
        production.get("commit") if isinstance(production, dict) else production,
    )
    code = data.get("exit_code")
    chain = data.get("chain")
    new: dict[str, Any] = {
        "schema": SCHEMA,
        "window": {
            "id": identity,
            "lane": str(data.get("lane") or lane),
            "name": name or identity,
            "hypothesis": str(data.get("hypothesis") or ""),
            "kind": str(data.get("kind") or "candidate"),
            "folder": data["folder"],
        },
        "status": data.get("status"),
        "exit_code": _EXIT_OF_STATUS.get(str(data.get("status")), 12) if code is None else code,
        "started_utc": data.get("started_utc"),
        "ended_utc": data.get("ended_utc"),
        "restore": {**restore, "status": restore.get("status") or "NOT RECORDED"},
        "chain": chain if isinstance(chain, str) else None,
        "production_commit": next((x for x in commits if isinstance(x, str) and x), None),
    }
    if isinstance(decision, dict):
        new["decisions"] = {str(decision.get("arm", "candidate")): decision}
        new["decision_cells"] = decision.get("decision_cells") or ()
    return new


_EXIT_OF_STATUS: Final[dict[str, int]] = {
    "CANDIDATE": 0,
    "COMPLETE": 0,
    "INCONCLUSIVE": 10,
    "NOT A CANDIDATE": 11,
    "INCOMPLETE": 12,
    "REFUSED": 13,
}

_UPGRADES: Final[dict[str | None, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    None: _from_runner,
    SCHEMA: lambda data: data,
}


def read_summary(folder: Path) -> Summary:
    """Read the summary of a window's folder (or a summary file), of this or an older version.

    Raises:
        UsageError: there is none, or it is damaged or of an unknown version; one line.
    """
    path = summary_path(folder)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; a window without a summary is still running or was killed"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, not JSON: {one_line(str(error))}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: damaged: a JSON object is expected")
    version = data.get("schema")
    upgrade = _UPGRADES.get(version) if version is None or isinstance(version, str) else None
    if upgrade is None:
        raise UsageError(
            f"{path}: schema {one_line(repr(version))} is unknown to this version; known: {SCHEMA}"
        )
    if version is None:
        data = {**data, "folder": path.parent.resolve().name}
    try:
        return Summary.model_validate(upgrade(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise UsageError(
            f"{path}: damaged: {where}: {one_line(str(first['msg']))}"
            + (f", got {one_line(repr(first['input']), 80)}" if first["type"] != "missing" else "")
        ) from None
