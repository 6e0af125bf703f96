"""Target systemd-unit on a simulated host: arms through drop-ins, proved, and taken away again."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import fake_systemd
import pytest

from pytest_dsv41.durable import dump_json
from pytest_dsv41.engines import ENGINES
from pytest_dsv41.engines.llamacpp import LlamaCpp
from pytest_dsv41.errors import (
    RefusedByWorld,
    SpecError,
    StartFailed,
    TransportError,
    WindowStopped,
)
from pytest_dsv41.hosts import CommandLog, Probe
from pytest_dsv41.hosts.fake import CallerKilled, FakeHost, FakeWorld
from pytest_dsv41.targets import Arm, Target, TargetContext, systemd_unit_target
from pytest_dsv41.targets.systemd_unit import SystemdUnitTarget, preflight
from pytest_dsv41.unit.drift import Finding
from pytest_dsv41.unit.live import BOOT_LOG

ENV_FILE = "/etc/serve/serve.env"
ENVIRONMENT = "# what is served\nKV=f16\nTOKEN=canary-77\n"
SERVED = ["/usr/bin/serve", "--port", "8000", "--cache-type-k", "f16"]
SERVED += ["--api-key", "canary-77"]
DROP_IN = f"/run/systemd/system/{fake_systemd.UNIT}.d/zzzz-dsv41.conf"
TABLE: dict[str, Any] = {
    "kind": "systemd-unit",
    "engine": "llamacpp",
    "model": "tiny",
    "unit": fake_systemd.UNIT,
    "env_file": ENV_FILE,
    "env_var": "SERVE_ENV_FILE",
    "port": fake_systemd.PORT,
    "health": ["curl", "-fsS", "http://127.0.0.1:{port}/health"],
    "world": "world",
}
CONTROL = Arm("control", "control", settings={"flags": {"--cache-type-k": "f16"}})
SMALL = Arm(
    "small",
    "candidate",
    env={"KV": "q8_0"},
    settings={"flags": {"--cache-type-k": "q8_0"}, "ledger": {"kv K dtype": "q8_0"}},
)


class Serves(LlamaCpp):
    """The dialect without a server behind it: it lists what it is told to."""

    listed = ("tiny",)

    def models(self, url: str, timeout: float = 5.0, client: Any = None) -> list[str]:
        return list(self.listed)


class Host:
    """A host whose unit serves, and targets of one window on it."""

    def __init__(self, folder: Path) -> None:
        programs = {
            "systemctl": "systemctl",
            BOOT_LOG: "boot_log",
            "stat": "stat",
            "readlink": "readlink",
            "chmod": "chmod",
            "chown": "chmod",
            "install": "nothing",
            "test": "exists",
            "sha256sum": "sha256sum",
            "podman": "podman",
            "getconf": "getconf",
        }
        self.world = FakeWorld.create(
            folder / "world",
            ["alpha"],
            seed=1,
            programs={name: f"fake_systemd:{what}" for name, what in programs.items()},
        )
        self.folder = folder
        self.log = CommandLog(folder / "cmd")
        self.host = FakeHost(self.world, "alpha", self.log)
        self.host.write(
            fake_systemd.UNIT_FILE, f"[Service]\nEnvironment=SERVE_ENV_FILE={ENV_FILE}\n"
        )
        self.host.write(ENV_FILE, ENVIRONMENT)
        for verb in ("daemon-reload", "restart"):
            self.run("systemctl", verb, fake_systemd.UNIT)
        self.context = TargetContext(
            window_id="UNIT-kv-W-20260101T000000Z",
            folder=folder,
            campaign=folder / "campaign",
            base=folder,
            seed=7,
            limits={"start_s": 2.0, "stop_s": 2.0, "window_s": 600.0},
            state={},
            variables={},
            log=self.log,
            pause=lambda _seconds: time.sleep(0.001),
            epoch=5,
        )

    def run(self, *argv: str) -> str:
        return self.host.run(argv, name="test", deadline_s=5.0).stdout

    def target(self, epoch: int = 5, **changes: Any) -> SystemdUnitTarget:
        context = dataclasses.replace(self.context, epoch=epoch)
        target = systemd_unit_target({**TABLE, **changes}, context)
        target.check((CONTROL, SMALL))
        return target

    def captured(self, **changes: Any) -> SystemdUnitTarget:
        """A target whose window has written its capture and stopped production."""
        target = self.target(**changes)
        record = {"configuration": target.capture()}
        (self.folder / "rollback.json").write_text(dump_json(record))
        target.stop_production()
        return target

    def systemd(self) -> dict[str, Any]:
        return fake_systemd.state(self.world.machine("alpha"))

    def mode(self, path: str) -> str:
        return (self.host.read(f"/fake/mode{path}") or b"").decode()

    def serves_its_own_shape(self, *, running: bool = False) -> bool:
        """Whether it does; `running`: whatever files of a start lie there, not loaded."""
        machine = self.world.machine("alpha")
        argv = [p.argv for p in machine.processes.values()]
        if running and DROP_IN in self.systemd()["drop_ins"]:
            return False
        return (
            self.systemd()["active"] == "active"
            and argv == [SERVED]
            and self.host.read(ENV_FILE) == ENVIRONMENT.encode()
            and (running or not [p for p in machine.files if p.startswith("/run/")])
        )


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setitem(ENGINES, "llamacpp", Serves())
    # No D-Bus is simulated; drift has tests of its own, and the real hosts have both together.
    monkeypatch.setattr(preflight, "drift", lambda *_words, **_named: found)
    found.clear()
    return Host(tmp_path)


found: list[Finding] = []


def test_a_drifted_unit_is_refused_unless_the_drift_is_registered(unit: Host) -> None:
    path = "/etc/systemd/system/served.service.d/bench.conf"
    found.append(
        Finding("drop-in", path, 3, "Service.ExecStart", "sets it", (), "0123456789abcdef")
    )
    with pytest.raises(
        RefusedByWorld, match=r"drifted: \[0123456789abcdef\] drop-in: .*bench\.conf:3"
    ):
        unit.target().capture()
    unit.target(registered_drift=["0123456789abcdef"]).capture()


LIMIT = "/sys/module/ttm/parameters/pages_limit"
KNOBS = {"paths": [LIMIT, "/sys/module/ttm/parameters/pages_max"], "floor_mib": 150_000}


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        # FRANK-ARCHON's outage: 125,988 MiB after the power failure; and its repair.
        (
            b"32253039\n",
            "pages_limit caps at 125988 MiB, below the floor 150000 MiB; nothing was written, "
            "dsv41 knob-gate --raise raises it",
        ),
        (b"52428800\n", None),
        (b"max\n", "pages_limit: holds 'max', no count; the cap is not known"),
        (None, "the kernel exposes none of "),
    ],
)
def test_a_kernel_limit_below_its_floor_refuses_the_window(
    unit: Host, limit: bytes | None, told: str | None
) -> None:
    if limit is not None:
        unit.host.write(LIMIT, limit)
    before = unit.systemd()
    target = unit.target(knobs=KNOBS)
    if told is None:
        target.capture()
    else:
        with pytest.raises(RefusedByWorld) as refused:
            target.capture()
        assert str(refused.value).startswith("target.knobs: alpha: ")
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
    # Nothing was touched: neither the unit nor the knob.
    assert unit.systemd() == before
    assert unit.host.read(LIMIT) == limit
    # A host with larger pages has another cap under the same count.
    unit.host.write("/fake/page", "65536")
    if limit == b"32253039\n":
        target.capture()


def test_a_limit_that_cannot_be_read_refuses_the_window(unit: Host) -> None:
    unit.host.write(LIMIT, b"52428800\n")
    unit.world.arm("partition", f"read {LIMIT}", host="alpha")
    with pytest.raises(RefusedByWorld, match=r"target\.knobs: alpha: cannot be read"):
        unit.target(knobs=KNOBS).capture()


# FRANK-ARCHON's three slots of 24,000/5,120, as that boot printed them.
THREE_SLOTS = [
    "--kv-cache-dtype", "fp8", "--max-num-seqs", "3", "--max-model-len", "200000",
    "--vram-weights-mib", "24000", "--vram-kv-mib", "5120", "--max-num-batched-tokens", "2048",
]  # fmt: skip
THREE_SLOTS_SAID = """\
kv cache 5.00 GiB -- backs 3 sequences all at 200000 tokens at once, which is the worst case
vram_weights      23.44 GiB   stated by --vram-weights-mib
vram_kv            5.00 GiB   stated by --vram-kv-mib
kv_attn      full 13 layers block 4 tok page 26.00 KiB 151935 blocks = 3.77 GiB (607740 tokens)
kv_qsa_bkey  full 13 layers block 4 tok page  3.25 KiB 151935 blocks = 482.22 MiB (607740 tokens)
card 0 settled at 2.01 GiB free against 209.19 MiB (the 96.00 MiB --gpu-headroom-mib
    and 113.19 MiB kept for the static region)
serving on http://:::7770
"""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        # The document's own next step, and the step that it found out of reach.
        ({"--vram-weights-mib": "25600"}, None),
        (
            {"--vram-weights-mib": "26112"},
            "weights and pool take 31,232 MiB; the ledger leaves 30,969",
        ),
        # "At two slots the pool falls to 3,072": it does not back two windows.
        (
            {"--max-num-seqs": 2, "--vram-kv-mib": "3072"},
            "a pool of 3,072 MiB backs 336,642 tokens = 1.68 windows; 2 of 200,000 tokens need "
            "3,525 MiB",
        ),
        ({"--max-num-seqs": "2", "--vram-kv-mib": "3525"}, None),
        # Four at fp8 need 6,601 MiB, and exact keys and values of two 6,063.5.
        ({"--max-num-seqs": "4"}, "4 of 200,000 tokens need 6,601 MiB"),
        (
            {"--kv-cache-dtype": "bf16", "--max-num-seqs": "2"},
            "2 of 200,000 tokens need 6,064 MiB",
        ),
        ({"--kv-cache-dtype": "q8_0"}, "dtype 'q8_0': --kv-cache-dtype takes fp8, bf16"),
        ({"--max-num-batched-tokens": "2560"}, "max-num-batched-tokens 2560: at most 2048"),
        ({"--max-num-seqs": "many"}, "--max-num-seqs many: no number"),
        ({"--max-num-seqs": "2.5"}, "--max-num-seqs 2.5: no whole number"),
        ({"--max-num-seqs": False}, "the law needs --max-num-seqs; neither"),
    ],
)
def test_a_shape_that_the_memory_law_refuses_is_refused_before_production_is_touched(
    unit: Host, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], told: str | None
) -> None:
    monkeypatch.setitem(ENGINES, "radiance", Serves())
    unit.host.write("/fake/server", json.dumps([THREE_SLOTS, THREE_SLOTS_SAID.splitlines()]))
    unit.run("systemctl", "restart", fake_systemd.UNIT)
    before = unit.systemd()
    target = unit.target(engine="radiance", law="radiance")
    target.check((dataclasses.replace(CONTROL, settings={}), shaped(flags)))
    if told is None:
        target.capture()
    else:
        with pytest.raises(RefusedByWorld) as refused:
            target.capture()
        assert str(refused.value).startswith("arms.small: target.law: ")
        assert told in str(refused.value)
    assert unit.systemd() == before


def shaped(flags: dict[str, Any]) -> Arm:
    return Arm("small", "candidate", env={"SHAPE": "other"}, settings={"flags": flags})


@pytest.mark.parametrize(
    ("engine", "law", "told"),
    [
        ("llamacpp", "radiance", "is of dialect radiance, target.engine is llamacpp"),
        ("radiance", "none.toml", r"target\.law .*none\.toml: no such file; shipped: llamacpp-"),
    ],
)
def test_a_law_of_another_dialect_or_none_is_refused_as_it_is_written(
    unit: Host, engine: str, law: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        unit.target(engine=engine, law=law)


def test_it_is_a_target_that_holds_and_has_no_chains(unit: Host) -> None:
    target = unit.target()
    assert isinstance(target, Target)
    assert (target.holds, target.ephemeral, target.chains) == (True, False, False)
    assert target.commit() == unit.target(epoch=9).commit()
    assert target.probe().state is Probe.UP


def test_each_start_is_a_variant_a_drop_in_and_a_proof(unit: Host) -> None:
    target = unit.captured()
    assert target.probe().state is Probe.DOWN
    assert target.quiet_problems() == []
    target.start_arm("C1", CONTROL)
    target.stop_arm("C1")
    started = target.start_arm("X", SMALL)
    assert started.endpoint.model == "tiny"
    path = f"/run/dsv41/{unit.context.window_id}/X.env"
    drop_in = (unit.host.read(DROP_IN) or b"").decode()
    assert f"Environment=SERVE_ENV_FILE={path}\n" in drop_in
    data = unit.host.read(path) or b""
    assert data.splitlines()[1:] == [b"# what is served", b"KV=q8_0", b"TOKEN=canary-77"]
    assert unit.mode(path) == "600 serve"
    lines = [json.loads(x) for x in (unit.folder / "unit.jsonl").read_text().splitlines()]
    written = [line["files"] for line in lines if line["event"] == "write"][-1]
    assert written[path] == hashlib.sha256(data).hexdigest()
    # An arm that serves is not production, and nothing is quiet beside it.
    seen = target.probe()
    assert seen.state is Probe.DOWN
    assert "not as production" in seen.detail
    assert target.check_arm("X") is None
    assert target.live_experiments() != []
    target.stop_all()
    assert target.live_experiments() == []
    target.start_production()
    target.start_production()
    assert unit.serves_its_own_shape()
    assert target.leftovers() == []


def test_another_process_finds_and_ends_what_a_killed_window_left(unit: Host) -> None:
    unit.captured().start_arm("X", SMALL)
    other = unit.target(epoch=6)
    with pytest.raises(StartFailed, match="not as production"):
        other.start_production()
    other.stop_all()
    other.start_production()
    assert unit.serves_its_own_shape()


def test_killed_between_its_two_files(unit: Host) -> None:
    target = unit.captured()
    unit.world.arm("hang", f"write {DROP_IN}", host="alpha", after=True)
    with pytest.raises(StartFailed):
        target.start_arm("X", SMALL)
    other = unit.target(epoch=6)
    other.stop_all()
    other.start_production()
    assert unit.serves_its_own_shape()


def test_a_start_that_systemd_repeats_has_failed_and_its_loop_is_stopped(unit: Host) -> None:
    target = unit.captured()
    with pytest.raises(StartFailed, match=r"3 restarts.*no such dtype: broken"):
        target.start_arm("X", dataclasses.replace(SMALL, env={"KV": "broken"}))
    assert unit.systemd()["active"] == "inactive"
    assert unit.systemd()["restarts"] == 0
    target.start_production()
    assert unit.serves_its_own_shape()


@pytest.mark.parametrize("verb", ["daemon-reload", "restart"])
def test_what_systemd_refuses_is_one_line(unit: Host, verb: str) -> None:
    target = unit.captured()
    unit.host.write("/fake/refused", verb)
    with pytest.raises(StartFailed, match=f"Refusing to {verb}"):
        target.start_arm("X", SMALL)
    if verb == "restart":
        unit.host.remove("/fake/refused")
    # A reload that is still refused leaves loaded what was: production's own shape.
    target.start_production()
    assert unit.serves_its_own_shape()


def test_a_drop_in_that_stays_loaded_is_never_production(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    unit.host.write("/fake/refused", "daemon-reload")
    with pytest.raises(TransportError, match="refuses to reload and still has"):
        target.stop_arm("X")
    with pytest.raises(StartFailed):
        target.start_production()
    unit.host.remove("/fake/refused")
    target.stop_all()
    target.start_production()
    assert unit.serves_its_own_shape()


def test_a_server_that_is_not_the_arm_ends_the_window(unit: Host) -> None:
    target = unit.captured()
    unit.host.write(ENV_FILE, ENVIRONMENT + "DEAF=f16\n")
    record = json.loads((unit.folder / "rollback.json").read_text())
    data = (ENVIRONMENT + "DEAF=f16\n").encode()
    record["configuration"]["env_file"] |= {
        "base64": base64.b64encode(data).decode(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (unit.folder / "rollback.json").write_text(json.dumps(record))
    with pytest.raises(WindowStopped) as told:
        target.start_arm("X", SMALL)
    assert "--cache-type-k is f16, not q8_0" in str(told.value)
    assert "ledger: kv K dtype is f16; the arm says q8_0" in str(told.value)
    assert unit.systemd()["active"] == "inactive"
    assert unit.host.read(DROP_IN) is None


def test_another_model_than_the_declared_one_ends_the_window(
    unit: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = unit.captured()
    monkeypatch.setattr(Serves, "listed", ("other",))
    with pytest.raises(WindowStopped, match="/v1/models lists other, not tiny"):
        target.start_arm("X", SMALL)


def test_two_arms_of_one_command_line_are_one(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("C1", dataclasses.replace(CONTROL, settings={}))
    target.stop_arm("C1")
    unread = Arm("unread", "candidate", env={"UNREAD": "1"}, settings={})
    with pytest.raises(WindowStopped, match="arms unread and control are one"):
        target.start_arm("X", unread)
    # The unit is down and nothing of the start is left: production can come back.
    assert unit.systemd()["active"] == "inactive"
    assert unit.host.read(DROP_IN) is None


@pytest.mark.parametrize(
    ("control", "candidate"),
    [
        ({"kv K dtype": "f16"}, {"kv K dtype": "f16"}),
        ({"kv K dtype": "f16"}, {"kv V dtype": "f16"}),
        ({}, {"kv K dtype": "f16"}),
    ],
)
def test_arms_of_one_command_line_need_a_fact_that_differs(
    unit: Host, control: dict[str, str], candidate: dict[str, str]
) -> None:
    target = unit.captured()
    target.start_arm("C1", dataclasses.replace(CONTROL, settings={"ledger": control}))
    target.stop_arm("C1")
    unread = Arm("unread", "candidate", env={"UNREAD": "1"}, settings={"ledger": candidate})
    with pytest.raises(WindowStopped, match=r"settings\.ledger that tells them apart"):
        target.start_arm("X", unread)


def test_arms_that_a_server_reads_from_its_environment_are_told_apart_by_the_ledger(
    unit: Host,
) -> None:
    target = unit.captured()
    for start, dtype in (("C1", "f16"), ("X", "q8_0"), ("C2", "f16")):
        settings = {"ledger": {"kv K dtype": dtype}}
        target.start_arm(start, Arm(dtype, "control", env={"INSIDE": dtype}, settings=settings))
        target.stop_arm(start)
    lines = (unit.folder / "unit.jsonl").read_text().splitlines()
    proofs = [one for one in map(json.loads, lines) if one["event"] == "proved"]
    assert len({one["argv_sha256"] for one in proofs}) == 1
    assert [one["faults"] for one in proofs] == [[], [], []]


def test_a_server_that_systemd_replaced_is_not_the_start(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    unit.run("systemctl", "restart", fake_systemd.UNIT)
    assert "was started again during X" in str(target.check_arm("X"))
    # Whatever was measured last may be the other one's: the window ends, and nothing is left.
    with pytest.raises(WindowStopped, match="was started again during X"):
        target.stop_arm("X")
    assert target.live_experiments() == []
    target.stop_arm("X")


def test_a_reboot_brings_productions_own_shape_up(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    unit.world.inject("reboot", "alpha")
    for verb in ("daemon-reload", "start"):
        unit.run("systemctl", verb, fake_systemd.UNIT)
    starts = unit.systemd()["starts"]
    assert target.probe().state is Probe.UP
    target.stop_all()
    target.start_production()
    assert unit.serves_its_own_shape()
    assert unit.systemd()["starts"] == starts


def test_another_windows_drop_in_is_never_touched(unit: Host) -> None:
    target = unit.captured()
    found = "# dsv41 start of window OTHER-W-1, X\n[Service]\n"
    unit.host.write(DROP_IN, found)
    with pytest.raises(StartFailed, match="says it is of OTHER-W-1, X; not touched"):
        target.start_arm("X", SMALL)
    with pytest.raises(TransportError, match="not touched"):
        target.stop_all()
    assert unit.host.read(DROP_IN) == found.encode()


@pytest.mark.parametrize("up", [False, True], ids=["down", "over a start"])
def test_somebodys_drop_in_in_the_place_of_ours_is_theirs_and_production_comes_back(
    unit: Host, up: bool
) -> None:
    target, found = unit.captured(), "# somebody's\n[Service]\n"
    if up:
        target.start_arm("X", SMALL)
    unit.host.write(DROP_IN, found)
    if not up:
        with pytest.raises(StartFailed, match="it is not a window's; not touched"):
            target.start_arm("X", SMALL)
    target.stop_all()
    assert target.live_experiments() == []
    # It serves again, with what is theirs, and that is told.
    with pytest.raises(StartFailed, match=r"zzzz-dsv41\.conf is new"):
        target.start_production()
    assert target.probe().state is Probe.UP
    assert unit.host.read(DROP_IN) == found.encode()
    unit.host.remove(DROP_IN)
    target.stop_all()
    target.start_production()
    assert unit.serves_its_own_shape()


def test_our_drop_in_that_somebody_has_changed_is_not_ours(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    changed = (unit.host.read(DROP_IN) or b"") + b"Environment=MORE=1\n"
    unit.host.write(DROP_IN, changed)
    with pytest.raises(TransportError, match="somebody has changed it; not touched: move it away"):
        target.stop_all()
    assert unit.host.read(DROP_IN) == changed
    # Whoever changed it moves it away, and the way back is free.
    unit.host.remove(DROP_IN)
    target.stop_all()
    target.start_production()
    assert unit.serves_its_own_shape()


def test_a_variant_that_somebody_has_changed_is_left_and_told(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    path = f"/run/dsv41/{unit.context.window_id}/X.env"
    unit.host.write(path, "KV=q4_0\n")
    target.stop_all()
    assert unit.host.read(path) == b"KV=q4_0\n"
    assert target.leftovers() == [f"{path} lies there, changed by somebody"]


def test_another_windows_start_is_not_stopped(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    # Somebody took its drop-in away; what runs still says whose it is.
    unit.host.remove(DROP_IN)
    unit.run("systemctl", "daemon-reload")
    context = dataclasses.replace(unit.context, window_id="OTHER-kv-W-20260101T000000Z")
    other = systemd_unit_target(TABLE, context)
    with pytest.raises(TransportError, match=r"runs as UNIT-kv-W-.*/X, not this window's"):
        other.stop_all()
    with pytest.raises(
        WindowStopped, match=r"production-stop: .*runs as UNIT-kv-W-.*; not touched"
    ):
        other.stop_production()
    assert target.check_arm("X") is None
    target.stop_all()
    target.start_production()
    assert unit.serves_its_own_shape()


def test_a_unit_that_somebody_started_is_not_started_over(unit: Host) -> None:
    target = unit.captured()
    unit.run("systemctl", "start", fake_systemd.UNIT)
    starts = unit.systemd()["starts"]
    with pytest.raises(WindowStopped, match=r"served\.service is active: somebody started it"):
        target.start_arm("X", SMALL)
    assert unit.systemd()["starts"] == starts
    target.start_production()
    assert unit.systemd()["starts"] == starts
    assert unit.serves_its_own_shape()


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        (f"/etc/systemd/system/{fake_systemd.UNIT}.d/10-new.conf", "[Service]\n", "is new"),
        (f"/etc/systemd/system/{fake_systemd.UNIT}.d/zzzzz.conf", "[Service]\n", "is new"),
        (f"/etc/systemd/system/{fake_systemd.UNIT}.d/zzzz-dsv41.conf", "[Service]\n", "is new"),
        (
            fake_systemd.UNIT_FILE,
            f"[Service]\nEnvironment=SERVE_ENV_FILE={ENV_FILE}\n#\n",
            "changed",
        ),
    ],
)
def test_what_somebody_loads_meanwhile_ends_the_window(
    unit: Host, path: str, text: str, what: str
) -> None:
    target = unit.captured()
    target.start_arm("C1", CONTROL)
    target.stop_arm("C1")
    unit.host.write(path, text)
    with pytest.raises(WindowStopped, match=f"{re.escape(path)} {what}, by somebody else"):
        target.start_arm("X", SMALL)
    assert unit.systemd()["active"] == "inactive"
    assert unit.host.read(path) == text.encode()
    assert unit.host.read(DROP_IN) is None


def test_starts_of_one_arm_that_differ_end_the_window(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("C1", CONTROL)
    target.stop_arm("C1")
    unit.host.write("/fake/key", "canary-88")
    with pytest.raises(
        WindowStopped, match=r"C2 and C1 are both arm control, and differ in the comm"
    ):
        target.start_arm("C2", CONTROL)
    assert unit.systemd()["active"] == "inactive"


def test_a_variant_takes_the_place_of_the_file_among_the_others(unit: Host) -> None:
    unit.host.write(
        fake_systemd.UNIT_FILE,
        f"[Service]\nEnvironmentFile={ENV_FILE}\nEnvironmentFile=-/etc/serve/50%%.env\n",
    )
    unit.host.write("/etc/serve/50%.env", "MODE=local\n")
    unit.host.write(ENV_FILE, ENVIRONMENT + "MODE=common\n")
    for verb in ("daemon-reload", "restart"):
        unit.run("systemctl", verb, fake_systemd.UNIT)
    target = unit.captured(env_var="")
    target.start_arm("X", SMALL)
    assert (unit.host.read(DROP_IN) or b"").decode().splitlines()[-3:] == [
        "EnvironmentFile=",
        f"EnvironmentFile=/run/dsv41/{unit.context.window_id}/X.env",
        "EnvironmentFile=-/etc/serve/50%%.env",
    ]
    running = next(iter(unit.world.machine("alpha").processes.values()))
    assert (running.env["KV"], running.env["MODE"]) == ("q8_0", "local")


@pytest.mark.parametrize(
    ("written", "other", "env_var", "said"),
    [
        ("Environment=A=1", "", "", "reads none by EnvironmentFile=, and target.env_file is"),
        (
            "EnvironmentFile=/etc/o.env",
            "",
            "",
            r"reads /etc/o\.env by EnvironmentFile=, and target",
        ),
        (f"EnvironmentFile={ENV_FILE}\nEnvironmentFile=-/etc/o.env", "KV=f16\n", "", "KV: /etc/o"),
        ("Environment=V=/etc/o.env", "", "V", r"runs with V /etc/o\.env, and target\.env_file is"),
        (f"Environment=V={ENV_FILE}\nEnvironmentFile=/etc/o.env", f"V={ENV_FILE}\n", "V", "over"),
    ],
)
def test_an_arm_that_would_not_be_read_is_refused(
    unit: Host, written: str, other: str, env_var: str, said: str
) -> None:
    unit.host.write("/etc/o.env", other)
    unit.host.write(fake_systemd.UNIT_FILE, f"[Service]\n{written}\n")
    for verb in ("daemon-reload", "restart"):
        unit.run("systemctl", verb, fake_systemd.UNIT)
    with pytest.raises(RefusedByWorld, match=said):
        unit.target(env_var=env_var).capture()


def test_a_unit_whose_stop_takes_others_along_is_refused(unit: Host) -> None:
    unit.host.write("/fake/required-by", "proxy.service web.service")
    with pytest.raises(
        RefusedByWorld, match=r"also stops proxy\.service, web\.service, which noth"
    ):
        unit.target().capture()


def test_the_environment_file_comes_back_and_what_lay_there_is_kept(unit: Host) -> None:
    target = unit.captured()
    unit.host.write(ENV_FILE, "KV=q4_0\n")
    target.start_production()
    assert unit.serves_its_own_shape()
    kept = [path.read_bytes() for path in unit.folder.glob("env-found-*")]
    assert kept == [b"KV=q4_0\n"]


def told(unit: Host) -> list[str]:
    """What the window will say of others' work on the unit."""
    path = unit.folder / "unit.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    return [line["line"] for line in lines if line["event"] == "told"]


def test_what_somebody_did_to_the_environment_file_is_told(unit: Host) -> None:
    target = unit.captured()
    target.start_production()
    assert told(unit) == []
    unit.run("chmod", "0", ENV_FILE)
    target.start_production()
    assert told(unit).pop().startswith(f"{ENV_FILE} had mode 0 and owner 0:0, by somebody")
    unit.host.write(ENV_FILE, "KV=q4_0\n")
    target.start_production()
    found = hashlib.sha256(b"KV=q4_0\n").hexdigest()[:12]
    assert f"was changed (what lay there is kept as env-found-{found}), by" in told(unit)[1]
    unit.host.remove(ENV_FILE)
    target.start_production()
    assert told(unit)[2].startswith(f"{ENV_FILE} was gone, by somebody during the window")
    target.start_production()
    assert len(told(unit)) == 3
    assert unit.serves_its_own_shape()
    assert unit.mode(ENV_FILE) == "640 0:0"


def test_a_unit_that_somebody_disabled_is_left_so_and_told(unit: Host) -> None:
    target = unit.captured()
    unit.run("systemctl", "disable", fake_systemd.UNIT)
    target.start_production()
    assert told(unit) == [
        "served.service is disabled now and was enabled, by somebody during the window; it is left "
        "so"
    ]
    assert unit.systemd()["enabled"] == "disabled"


def test_what_is_not_as_captured_is_no_restore(unit: Host) -> None:
    target = unit.captured()
    unit.host.write(f"/etc/systemd/system/{fake_systemd.UNIT}.d/10-new.conf", "[Service]\n")
    with pytest.raises(StartFailed, match=r"10-new\.conf is new"):
        target.start_production()
    # It is gone again, and what runs was started with it: only another start is production's own.
    unit.host.remove(f"/etc/systemd/system/{fake_systemd.UNIT}.d/10-new.conf")
    unit.run("systemctl", "daemon-reload")
    starts = unit.systemd()["starts"]
    unit.target(epoch=6).start_production()
    assert unit.systemd()["starts"] == starts + 1
    unit.target(epoch=7).start_production()
    assert unit.systemd()["starts"] == starts + 1
    assert unit.serves_its_own_shape()


def test_a_unit_that_somebody_masked_is_said_to_be(unit: Host) -> None:
    target = unit.captured()
    unit.host.write("/fake/load", "masked")
    with pytest.raises(WindowStopped, match=r"served\.service: it is masked, by somebody else"):
        target.start_arm("X", SMALL)
    with pytest.raises(RefusedByWorld, match="it is masked since the window's capture"):
        target.apart()
    assert unit.host.read(DROP_IN) is None


def test_a_unit_that_is_down_differs_in_that_alone(unit: Host) -> None:
    target = unit.captured()
    assert target.apart() == ["it runs nothing"]
    unit.host.write(ENV_FILE, "KV=q4_0\n")
    assert target.apart() == [f"{ENV_FILE} is not as it was", "it runs nothing"]


def test_a_capture_that_cannot_bring_back_leaves_production_untouched(unit: Host) -> None:
    target = unit.captured()
    target.start_production()
    record = json.loads((unit.folder / "rollback.json").read_text())
    record["configuration"]["env_file"]["base64"] = base64.b64encode(b"KV=f32\n").decode()
    (unit.folder / "rollback.json").write_text(json.dumps(record))
    with pytest.raises(RefusedByWorld, match="sha256 does not fit"):
        target.stop_production()
    assert unit.serves_its_own_shape()


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        (f"/etc/systemd/system/{fake_systemd.UNIT}.d/zzzzz.conf", "[Service]\n", "sorts after"),
        ("/run/systemd/system/service.d/~.conf", "[Service]\n", "sorts after"),
        (DROP_IN, "# somebody's\n", "sorts after"),
    ],
)
def test_a_drop_in_that_could_beat_ours_is_refused(
    unit: Host, path: str, text: str, told: str
) -> None:
    unit.host.write(path, text)
    unit.run("systemctl", "daemon-reload")
    with pytest.raises(RefusedByWorld, match=told):
        unit.target().capture()
    assert unit.host.read(path) == text.encode()


@pytest.mark.parametrize("name", ["a b", "c\\x2dd", "e'f", 'g"h', "i$j"])
def test_a_drop_in_of_any_name_is_part_of_the_shape(unit: Host, name: str) -> None:
    path = f"/etc/systemd/system/{fake_systemd.UNIT}.d/{name}.conf"
    unit.host.write(path, "[Service]\nNice=1\n")
    unit.run("systemctl", "daemon-reload")
    target = unit.captured()
    assert target.prove_rollback()
    record = json.loads((unit.folder / "rollback.json").read_text())["configuration"]
    assert record["drop_ins"] == {path: hashlib.sha256(b"[Service]\nNice=1\n").hexdigest()}
    target.start_arm("X", SMALL)
    target.stop_all()
    target.start_production()


def test_what_an_arm_or_a_rollback_needs_is_proved_first(unit: Host) -> None:
    target = unit.target()
    target.check((CONTROL, dataclasses.replace(SMALL, env={"MODEL": "/models/none.bin"})))
    with pytest.raises(RefusedByWorld, match=r"arms\.small\.env\.MODEL: alpha:/models/none\.bin"):
        target.capture()
    with pytest.raises(RefusedByWorld, match=r"target\.payloads: alpha:/models/a\.bin: no such"):
        unit.target(payloads={"/models/a.bin": ""}).capture()
    unit.host.write("/models/a.bin", "weights")
    (unit.folder / "plan.json").write_text("{}")
    with pytest.raises(RefusedByWorld, match=r"a\.bin: its sha256 is"):
        unit.target(payloads={"/models/a.bin": "0" * 64}).capture()
    right = hashlib.sha256(b"weights").hexdigest()
    assert unit.target(payloads={"/models/a.bin": right}).capture()["payloads"]


def whole(target: SystemdUnitTarget) -> None:
    """From production down over one start to production back."""
    target.stop_production()
    target.start_arm("X", SMALL)
    target.stop_arm("X")
    target.start_production()


def acts(unit: Host) -> list[tuple[str, int]]:
    """Every act of a whole flow on the host, each with how often it was done before."""
    before = len(unit.world.events())
    whole(unit.target())
    seen: list[tuple[str, int]] = []
    for event in unit.world.events()[before:]:
        name = str(event["what"])
        seen.append((name, 1 + sum(known == name for known, _ in seen)))
    return seen


@pytest.mark.slow  # a hundred kills
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_act_leaves_what_another_process_brings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setitem(ENGINES, "llamacpp", Serves())
    monkeypatch.setattr(preflight, "drift", lambda *_words, **_named: [])
    # What is killed undoes nothing.
    monkeypatch.setattr(SystemdUnitTarget, "_undo", lambda _self, _name: None)

    def host(name: str) -> Host:
        (tmp_path / name).mkdir()
        unit = Host(tmp_path / name)
        record = {"configuration": unit.target().capture()}
        (unit.folder / "rollback.json").write_text(dump_json(record))
        return unit

    everything = acts(host("clean"))
    assert len(everything) > 40
    for number, (name, count) in enumerate(everything):
        unit = host(f"killed-{number}")
        unit.world.arm("kill", name, host="alpha", after=after, count=count)
        with pytest.raises(CallerKilled):
            whole(unit.target())
        other = unit.target(epoch=6)
        seen = other.probe()
        assert (seen.state is Probe.UP) == unit.serves_its_own_shape(running=True), (name, seen)
        other.stop_all()
        assert other.live_experiments() == [], name
        other.start_production()
        assert other.probe().state is Probe.UP
        assert unit.serves_its_own_shape(), name
        assert other.leftovers() == []


PODMAN = json.dumps(
    {"Entrypoint": ["/bin/serve"], "Cmd": ["--cache-type-k", "f16"], "Env": ["TOKEN=canary-77"]}
)


def test_a_containers_command_line_is_the_servers(unit: Host) -> None:
    unit.host.write("/fake/podman", PODMAN)
    target = unit.target(runtime="podman", container="served")
    assert target.capture()["argv"] == ["/bin/serve", "--cache-type-k", "f16"]
    (unit.folder / "rollback.json").write_text(dump_json({"configuration": target.capture()}))
    target.stop_production()
    # The container runs on as it was: whatever the unit's own process says, it is not the arm.
    with pytest.raises(WindowStopped, match="--cache-type-k is f16, not q8_0"):
        target.start_arm("X", SMALL)
    unit.host.write("/fake/podman", PODMAN.replace("f16", "q8_0"))
    target.start_arm("X", SMALL)
    assert "canary-77" not in (unit.folder / "unit.jsonl").read_text()
    target.stop_all()
    unit.host.write("/fake/podman", PODMAN)
    target.start_production()


def test_the_last_words_of_a_start_without_a_container_are_not_an_earlier_ones(
    unit: Host,
) -> None:
    unit.host.write("/fake/podman", PODMAN)
    target = unit.target(runtime="podman", container="served")
    (unit.folder / "rollback.json").write_text(dump_json({"configuration": target.capture()}))
    target.stop_production()
    # The container of an earlier start is there still, and podman tells what it printed.
    with pytest.raises(StartFailed, match="its last line: no such dtype: broken"):
        target.start_arm("X", dataclasses.replace(SMALL, env={"KV": "broken"}))


def test_values_of_the_environment_stand_in_no_record(unit: Host) -> None:
    target = unit.captured()
    target.start_arm("X", SMALL)
    target.stop_all()
    # Another key is another server, though neither key is shown.
    unit.host.write("/fake/key", "canary-88")
    with pytest.raises(StartFailed, match=r"it runs .*--api-key '\*\*\*'$"):
        target.start_production()
    for path in unit.folder.rglob("*"):
        if path.is_file() and "world" not in path.parts:
            text = path.read_text("utf-8", "replace")
            assert "canary-77" not in text, path
            assert "canary-88" not in text, path


@pytest.mark.parametrize(
    ("arm", "told"),
    [
        (dataclasses.replace(SMALL, args=("--x",)), r"arms\.small\.args: an arm of target"),
        (dataclasses.replace(SMALL, env={}), r"arms\.small\.env: the same as that of arm control"),
        (dataclasses.replace(SMALL, env={"KV": "it's"}), r"arms\.small\.env\.KV: .*quote"),
        (dataclasses.replace(SMALL, settings={"flag": {}}), r"settings\.flag: unknown"),
        (dataclasses.replace(SMALL, settings={"flags": {"ctx": "1"}}), r"flags\.ctx: no flag"),
    ],
)
def test_an_arm_that_could_not_be_started_is_refused_as_it_is_written(
    unit: Host, arm: Arm, told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        unit.target().check((CONTROL, arm))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": "served"}, r"^target\.unit: 'served'; valid: a service's name with \.service"),
        ({"env_file": "serve.env"}, r"^target\.env_file: 'serve\.env'; valid: an absolute path"),
        ({"runtime": "podman"}, r"target\.container: missing"),
        ({"manager": "user", "sudo": True}, r"target\.sudo"),
        ({"payloads": {"a": ""}}, r"target\.payloads\.a"),
        ({"speed": 1}, r"^target\.speed: unknown key; keys of target: kind"),
        (
            {"knobs": {"paths": ["/k"], "floor": 1}},
            r"^target\.knobs\.floor: unknown key; keys of target\.knobs: paths, unit, floor_mib$",
        ),
        ({"host": {"adress": "a"}}, r"target\.host\.adress: .*keys of target\.host: address"),
    ],
)
def test_a_wrong_table_is_one_line(unit: Host, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told) as error:
        unit.target(**changes)
    assert "\n" not in str(error.value)


def test_the_pages_example_is_a_target_with_two_arms(unit: Host) -> None:
    page = Path(__file__).parents[2] / "docs" / "own-unit.md"
    table, arms = re.findall(r"^```toml .*?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    target = systemd_unit_target(tomllib.loads(table)["target"], unit.context)
    written = tomllib.loads(arms)["arms"].items()
    target.check([Arm(name, **settings) for name, settings in written])
    assert target.production().url == "http://192.0.2.20:8080"
