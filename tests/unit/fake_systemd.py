"""A systemd for simulated hosts: one service, its drop-ins, its environment file, its journal.

Only what a window on a unit asks for, by systemd's own rules: drop-ins sort by file name whatever
their folder, what is loaded is what lay there at the last reload, and a start takes what is loaded.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

from pytest_dsv41.hosts.fake import Call, Machine, Reply, Service

UNIT = "served.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
FOLDERS = tuple(
    f"{root}/systemd/system/{name}.d"
    for root in ("/etc", "/run", "/usr/lib")
    for name in (UNIT, "service")
)
PORT = 8000
_STATE = "/fake/systemd.json"
_NEW: dict[str, Any] = {
    "active": "inactive",
    "pid": 0,
    "restarts": 0,
    "starts": 0,
    "loaded": {},
    "env_files": [],
    "enabled": "enabled",
    "drop_ins": [],
}


def state(machine: Machine) -> dict[str, Any]:
    data = machine.load(_STATE)
    found: dict[str, Any] = dict(_NEW) if data is None else json.loads(data)
    if found["pid"] and found["pid"] not in machine.processes:
        found |= {"pid": 0, "active": "inactive"}
    return found


def keep(machine: Machine, now: dict[str, Any]) -> None:
    machine.store(_STATE, json.dumps(now).encode(), synced=False)


def refused(machine: Machine, verb: str) -> bool:
    return verb in (machine.load("/fake/refused") or b"").decode().split()


def drop_ins(machine: Machine) -> list[str]:
    """Every drop-in that applies, by file name; of one name the folder that goes first."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in machine.files:
            if posixpath.dirname(path) == folder and path.endswith(".conf"):
                found.setdefault(posixpath.basename(path), path)
    return [found[name] for name in sorted(found)]


def assigned(data: bytes | None) -> dict[str, str]:
    lines = (data or b"").decode().splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and line[0] not in "#[")
    return {name: value.strip("'") for name, _, value in pairs}


def reload(machine: Machine) -> None:
    now = state(machine)
    now["drop_ins"] = drop_ins(machine)
    now["loaded"], now["env_files"] = {}, []
    for path in (UNIT_FILE, *now["drop_ins"]):
        for line in (machine.load(path) or b"").decode().splitlines():
            key, _, value = line.partition("=")
            if key == "Environment":
                name, _, word = value.partition("=")
                now["loaded"][name] = word
            if key == "EnvironmentFile":
                files = [*now["env_files"], value.replace("%%", "%")]
                now["env_files"] = files if value else []
    keep(machine, now)


def start(call: Call) -> None:
    machine, now = call.machine, state(call.machine)
    if now["pid"]:
        machine.kill(now["pid"])
    now["starts"] += 1
    now["restarts"] = 0
    loaded: dict[str, str] = dict(now["loaded"])
    for path in now["env_files"]:
        loaded |= assigned(machine.load(path.removeprefix("-")))
    read = loaded | assigned(machine.load(loaded.get("SERVE_ENV_FILE", "")))
    kv = read.get("KV", "f16")
    # As a script with a mistake would: it takes what it always took.
    inside = read.get("INSIDE", "")
    flag = inside or read.get("DEAF") or kv
    environ = {**loaded, "INVOCATION_ID": f"run{now['starts']}", "TOKEN": read.get("TOKEN", "")}
    said = [f"serving {flag}"]
    if kv == "broken":
        now |= {"active": "activating", "pid": 0, "restarts": 3}
        said = ["no such dtype: broken"]
    else:
        said += [
            "llama_context: n_ctx         = 4096",
            f"llama_kv_cache: size = 10.00 MiB (  4096 cells,   3 layers,  2/2 seqs), "
            f"K ({flag}): 5.00 MiB, V ({flag}): 5.00 MiB",
        ]
        # A server that reads its environment itself has no flag to show.
        argv = ["/usr/bin/serve", "--port", str(PORT)]
        argv += [] if inside else ["--cache-type-k", flag]
        told = machine.load("/fake/server")
        if told is not None:
            # Another engine: its words and what it prints, as the test has them.
            told_argv, said = json.loads(told)
            argv += told_argv
        argv += ["--api-key", (machine.load("/fake/key") or b"").decode() or read.get("TOKEN", "")]
        process = machine.start(argv, Service(ports=(PORT,)), env=environ)
        now |= {"active": "active", "pid": process.pid}
    machine.store(f"/fake/log/run{now['starts']}", "\n".join(said).encode(), synced=False)
    keep(machine, now)


def shown(path: str) -> str:
    """A string of a list as systemctl 252 prints it."""
    odd = re.sub(r'([\\"$`])', r"\\\1", path)
    return path if re.fullmatch(r"[\w./~@:-]+", path) else f'"{odd}"'


def systemctl(call: Call) -> Reply:
    machine, words = call.machine, [w for w in call.args if w not in ("--no-block", "--")]
    verb = words[0]
    if refused(machine, verb):
        return Reply(1, err=f"Failed to {verb}: Refusing to {verb}\n")
    now = state(machine)
    if verb == "show":
        wanted = words[1].partition("=")[2].split(",")
        said = {
            "LoadState": (machine.load("/fake/load") or b"loaded").decode(),
            "ActiveState": now["active"],
            "Result": "exit-code" if now["restarts"] else "success",
            "MainPID": str(now["pid"]),
            "NRestarts": str(now["restarts"]),
            "InvocationID": f"run{now['starts']}",
            "DropInPaths": " ".join(map(shown, now["drop_ins"])),
            "FragmentPath": UNIT_FILE,
            "UnitFileState": now["enabled"],
            "User": "serve",
            "DynamicUser": "no",
            "EnvironmentFiles": "\nEnvironmentFiles=".join(
                f"{x.removeprefix('-')} (ignore_errors={'yes' if x[0] == '-' else 'no'})"
                for x in now["env_files"]
            ),
            "RequiredBy": (machine.load("/fake/required-by") or b"").decode(),
        }
        if words[1] == "--property=Id,ActiveState":
            return Reply(out="".join(f"Id={name}\nActiveState=active\n\n" for name in words[2:]))
        return Reply(out="".join(f"{name}={said.get(name, '')}\n" for name in wanted))
    if verb == "daemon-reload":
        reload(machine)
    elif verb in ("start", "restart"):
        start(call)
    elif verb == "disable":
        keep(machine, {**now, "enabled": "disabled"})
    elif verb in ("stop", "kill"):
        if now["pid"]:
            machine.kill(now["pid"])
        keep(machine, {**now, "active": "inactive", "pid": 0})
    elif verb == "reset-failed":
        keep(machine, {**now, "restarts": 0})
    return Reply()


def boot_log(call: Call) -> Reply:
    return Reply(out=(call.machine.load(f"/fake/log/{call.args[0]}") or b"").decode())


def stat(call: Call) -> Reply:
    return Reply(
        out=(call.machine.load(f"/fake/mode{call.argv[-1]}") or b"640 0:0").decode() + "\n"
    )


def readlink(call: Call) -> Reply:
    return Reply(out=f"{call.argv[-1]}\n")


def chmod(call: Call) -> Reply:
    mode, owner = stat(call).out.split()
    if call.argv[0] == "chmod":
        mode = call.args[0]
    else:
        owner = call.args[1]
    call.machine.store(f"/fake/mode{call.argv[-1]}", f"{mode} {owner}".encode(), synced=True)
    return Reply()


def exists(call: Call) -> Reply:
    return Reply(0 if call.machine.load(call.argv[-1]) is not None else 1)


def sha256sum(call: Call) -> Reply:
    import hashlib

    data = call.machine.load(call.argv[-1]) or b""
    return Reply(out=f"{hashlib.sha256(data).hexdigest()}  {call.argv[-1]}\n")


def podman(call: Call) -> Reply:
    if call.args[0] == "inspect":
        return Reply(out=(call.machine.load("/fake/podman") or b"").decode() + "\n")
    dtype = "q8_0" if b"q8_0" in (call.machine.load("/fake/podman") or b"") else "f16"
    size = "llama_kv_cache: size = 10.00 MiB (  4096 cells,   3 layers,  2/2 seqs), "
    return Reply(
        out="llama_context: n_ctx         = 4096\n",
        err=f"{size}K ({dtype}): 5.00 MiB, V ({dtype}): 5.00 MiB\n",
    )


def getconf(call: Call) -> Reply:
    return Reply(out=(call.machine.load("/fake/page") or b"4096").decode() + "\n")


def nothing(call: Call) -> Reply:
    return Reply()
