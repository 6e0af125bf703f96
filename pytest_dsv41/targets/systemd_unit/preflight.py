"""What must hold of a unit, its host and the arms before production is stopped: reads only."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import Dsv41Error, RefusedByWorld, SpecError, UsageError
from ...hosts import Host
from ...text import one_line
from ...unit.drift import drift, load_checkout, unregistered
from ...unit.envfile import variant
from ...unit.knob_gate import judge_knobs
from ...unit.lawful import law_refusals
from ...unit.live import LiveUnit, UnitState
from ...unit.memory import Law, read_law, shipped_laws
from ...unit.proof import Expected
from ...unit.unitfile import parse_environment_file
from ..base import Arm, TargetContext
from ..tables import beside
from .shape import UnitShape
from .starts import told_by
from .table import UnitTable

__all__ = ["Preflight"]


class Preflight:
    """The refusals of a window on a unit, each by its name."""

    def __init__(
        self,
        login: Host,
        root: Host,
        unit: LiveUnit,
        table: UnitTable,
        context: TargetContext,
        shape: UnitShape,
    ) -> None:
        self._login = login
        self._root = root
        self._unit = unit
        self._table = table
        self._context = context
        self._shape = shape

    def check(self, arms: Sequence[Arm], unit: UnitState, env_file: bytes) -> None:
        """Refuse what would not come back, and what no arm could be given over.

        Args:
            arms: what the window serves.
            unit: production as it runs.
            env_file: the bytes of its environment file.

        Raises:
            RefusedByWorld: names what does not hold.
        """
        self._knobs_clear_their_floor()
        self._given_by(arms, unit)
        along = self._unit.dependents()
        if along:
            raise RefusedByWorld(
                f"a stop of {self._table.unit} also stops {one_line(', '.join(along))}, which "
                "nothing starts again: stop them first"
            )
        self._undrifted()
        self._lawful(arms, unit)
        self._named_by_arms(arms, env_file)

    def _knobs_clear_their_floor(self) -> None:
        """The kernel's limit allows a start, so that what is stopped can come up again. Reads only.

        Raises:
            RefusedByWorld: it does not, or cannot be known.
        """
        asked = self._table.knobs
        if asked is None:
            return
        try:
            page = int(told_by(self._root, ["getconf", "PAGE_SIZE"], "page-size"))
            found = {path: self._root.read(path) for path in asked.paths}
        except (Dsv41Error, OSError, ValueError) as error:
            raise RefusedByWorld(
                f"target.knobs: {self._login.name}: cannot be read: {one_line(str(error))}"
            ) from error
        report = judge_knobs(found, unit=asked.unit, floor_mib=asked.floor_mib, page_bytes=page)
        if not report.passed:
            told = next(line for line in report.lines if line.startswith("REFUSED: "))
            raise RefusedByWorld(
                f"target.knobs: {self._login.name}: {told.removeprefix('REFUSED: ')}"
            )

    def _undrifted(self) -> None:
        """The unit is what its files say: a restart would start what runs now.

        Raises:
            RefusedByWorld: it is not, and that is not registered.
        """
        checkout = beside(self._context.base, self._table.checkout)
        findings = drift(
            self._login,
            self._table.unit,
            checkout=load_checkout(checkout) if checkout else None,
            user=self._table.manager == "user",
            become=("sudo", "-n", "--") if self._table.sudo else (),
        )
        left = unregistered(findings, self._table.registered_drift)
        if left:
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            raise RefusedByWorld(
                f"{self._table.unit} has drifted: [{left[0].id}] {left[0].kind}: {left[0]}{more}; "
                "dsv41 unit drift says all; what is accepted goes into target.registered_drift"
            )

    def _given_by(self, arms: Sequence[Arm], unit: UnitState) -> None:
        """The unit is given `env_file`, in the way that the table says, and an arm's in its place.

        Raises:
            RefusedByWorld: it reads another file, or an arm's would not be read.
        """
        table, name = self._table, self._table.env_var
        files = [path for path, _ in unit.environment_files]
        if not name:
            if table.env_file not in files:
                reads = f"reads {one_line(', '.join(files))}" if files else "reads none"
                raise RefusedByWorld(
                    f"{table.unit} {reads} by EnvironmentFile=, and target.env_file is "
                    f"{table.env_file}: name it as the unit does, or the variable by which the "
                    "unit is given it (target.env_var)"
                )
            for path in files[files.index(table.env_file) + 1 :]:
                after = parse_environment_file(self._root.read(path) or b"")
                for arm in arms:
                    for beaten in sorted(after.keys() & arm.env.keys()):
                        raise RefusedByWorld(
                            f"arms.{arm.name}.env.{beaten}: {path} sets it too, and is read after "
                            f"{table.env_file}"
                        )
            return
        given = self._unit.environ(unit).get(name, table.env_file)
        if given != table.env_file and self._shape.real(given) != self._shape.real(table.env_file):
            raise RefusedByWorld(
                f"{table.unit} runs with {name} {one_line(given, 200)}, and target.env_file is "
                f"{table.env_file}"
            )
        for path in files:
            if name in parse_environment_file(self._root.read(path) or b""):
                raise RefusedByWorld(
                    f"{path}: it sets {name} for {table.unit}, and goes over what an arm would "
                    "be given; leave target.env_var out and name that file in target.env_file"
                )
        if unit.dynamic_user and table.manager == "system":
            raise RefusedByWorld(
                f"{table.unit} has DynamicUser=yes: no file can be given to a user that is there "
                "only while it runs; leave target.env_var out, and systemd reads the file"
            )

    def _lawful(self, arms: Sequence[Arm], unit: UnitState) -> None:
        """Every arm fits the memory law, and the budget that production's own boot has left.

        Raises:
            RefusedByWorld: one does not.
        """
        law = self.law()
        if law is None:
            return
        argv, ledger = self._unit.argv(unit), self._unit.ledger(self._unit.boot_log(unit))
        for arm in arms:
            stated = Expected.of(arm.settings, f"arms.{arm.name}.settings").flags
            refused = law_refusals(law, argv, stated, ledger)
            if refused:
                raise RefusedByWorld(f"arms.{arm.name}: target.law: {'; '.join(refused)}")

    def law(self) -> Law | None:
        """The model's memory law. Read when it is asked for: the way back needs none."""
        name = self._table.law
        if not name:
            return None
        try:
            law = read_law(
                name if name in shipped_laws() else str(beside(self._context.base, name)),
                "target.law",
            )
        except UsageError as error:
            raise SpecError(str(error)) from error
        if law.dialect != self._table.engine:
            raise SpecError(
                f"target.law: {one_line(name, 120)} is of dialect {law.dialect}, target.engine is "
                f"{self._table.engine}"
            )
        return law

    def _named_by_arms(self, arms: Sequence[Arm], env_file: bytes) -> None:
        """Every arm's variant can be written, and the paths that it names are there."""
        for arm in arms:
            try:
                variant(
                    env_file,
                    arm.env,
                    header="",
                    where=self._table.env_file,
                    sourced=bool(self._table.env_var),
                )
            except UsageError as error:
                raise RefusedByWorld(f"arms.{arm.name}.env: {error}") from error
            for name, value in arm.env.items():
                if value.startswith("/") and not self._exists(value):
                    raise RefusedByWorld(
                        f"arms.{arm.name}.env.{name}: {self._login.name}:{one_line(value)}: "
                        "no such file"
                    )

    def payloads(self) -> dict[str, str]:
        """The table's payloads, each proved to be there and to hash.

        Raises:
            RefusedByWorld: one is not, or does not.
        """
        for path, sha256 in self._table.payloads.items():
            if not self._exists(path):
                raise RefusedByWorld(f"target.payloads: {self._login.name}:{path}: no such file")
            if not sha256 or not (self._context.folder / "plan.json").exists():
                continue
            done = self._root.run(
                ["sha256sum", "--", path],
                name="payload",
                deadline_s=self._context.limits.get("start_s", 600.0),
            )
            if done.stdout.split()[0].lstrip("\\") != sha256:
                raise RefusedByWorld(
                    f"target.payloads: {self._login.name}:{path}: its sha256 is "
                    f"{one_line(done.stdout.split()[0], 80)}"
                )
        return dict(self._table.payloads)

    def _exists(self, path: str) -> bool:
        seen = self._root.run(["test", "-e", path], name="exists", deadline_s=30.0, check=False)
        return seen.returncode == 0
