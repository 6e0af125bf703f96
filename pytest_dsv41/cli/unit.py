"""`dsv41 unit …`: one service under systemd.

`drift`, `why` and `verify` look at it and never touch it; `rollback` brings it back to what it was
before a window, from the window's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import counted, one_line

if TYPE_CHECKING:
    from ..hosts import Host

HELP = (
    "A service under systemd, looked at and never touched: drift (0 clean, 2 drift), why it does "
    "not run (0 nothing is wrong, 2 a cause), verify a checklist (0 all hold, 2 one does not). And "
    "rollback to what it was before a window (0 as captured, 13 refused, 20 down, 21 alert)."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    drift = acts.add_parser(
        "drift", help="files, checkout, loaded and running: where they differ; 0 clean, 2 drift"
    )
    _common(drift)
    drift.add_argument(
        "--checkout", type=Path, metavar="FILE", help="the unit file as it should be; FILE.d too"
    )
    drift.add_argument(
        "--env-file",
        dest="env_files",
        action="append",
        default=[],
        metavar="PATH=FILE",
        help="a file on the host, and the checkout's; repeatable",
    )
    drift.add_argument(
        "--own",
        action="append",
        default=[],
        metavar="PATH",
        help="a drop-in of yours on the host: only what beats it is told; repeatable",
    )
    drift.add_argument(
        "--registered",
        action="append",
        default=[],
        metavar="ID",
        help="a finding that is known and accepted; repeatable",
    )
    why = acts.add_parser(
        "why",
        help="why it does not run: a refused preflight, a crash, a boot loop, a wrong "
        "configuration; 0 nothing is wrong, 2 a cause",
    )
    _common(why)
    verify = acts.add_parser("verify", help="the list after a cutover; 0 all hold, 2 one does not")
    _common(verify)
    verify.add_argument(
        "--checklist", type=Path, required=True, metavar="FILE", help="what must hold, as TOML"
    )
    rollback = acts.add_parser(
        "rollback",
        help="back to what it was before a window, by the window's folder alone; 0 as captured, "
        "13 refused, 20 production down, 21 alert",
    )
    rollback.add_argument("window", type=Path, metavar="FOLDER", help="the window's folder")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("unit", metavar="UNIT", help="its name, such as serve.service")
    parser.add_argument(
        "--host",
        default="",
        metavar="[USER@]ADDRESS[:PORT]",
        help="over ssh; default: this machine",
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="private key for ssh")
    parser.add_argument("--known-hosts", type=Path, metavar="FILE", help="must name the host")
    parser.add_argument("--user", action="store_true", help="a unit of systemd --user")
    parser.add_argument("--sudo", action="store_true", help="read as root, by sudo -n")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Look at the unit, or bring it back."""
    acts = {"drift": _drift, "why": _why, "verify": _verify, "rollback": _rollback}
    act = acts[args.act]
    return act(args)


def _drift(args: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..payload.shown import Shown
    from ..unit.drift import find_drift, load_checkout, read_file, unregistered
    from ..unit.systemd import read_host_file, read_unit
    from ..unit.unitfile import changes

    checkout = load_checkout(args.checkout) if args.checkout is not None else None
    wanted = {}
    for pair in args.env_files:
        path, equals, file = pair.partition("=")
        if not equals or not path.startswith("/") or not file:
            raise UsageError(f"--env-file {pair}: valid: /PATH/ON/THE/HOST=FILE")
        wanted[path] = read_file(Path(file))
    for path in args.own:
        if not path.startswith("/"):
            raise UsageError(f"--own {path}: valid: a drop-in's path on the host")
    with _host(args) as host, Shown(sys.stderr) as show:
        facts = read_unit(
            host, args.unit, user=args.user, become=_become(args), progress=_telling(show)
        )
        found = find_drift(
            facts,
            checkout=checkout,
            env_files={
                path: (data, read_host_file(host, path, become=_become(args)))
                for path, data in wanted.items()
            },
            ours=args.own,
        )
    left = unregistered(found, args.registered)
    if args.json:
        report = {
            "unit": facts.unit,
            "host": facts.host,
            "drift": bool(left),
            "unit_file": facts.fragment.path if facts.fragment is not None else None,
            "drop_ins": [file.path for file in facts.drop_ins],
            "findings": [
                {**dataclasses.asdict(f), "registered": f.id in args.registered} for f in found
            ],
        }
        print(json.dumps(report, indent=1))
        return 2 if left else 0
    if facts.fragment is not None:
        file = facts.fragment
        link = f" -> {file.target}" if file.target != file.path else ""
        print(f"unit file  {_shown(file.path + link)}  sha256 {file.sha256[:12]}")
    every = changes([*([facts.fragment] if facts.fragment is not None else []), *facts.drop_ins])
    for file in facts.drop_ins:
        keys = ", ".join(dict.fromkeys(c.subject for c in every if c.path == file.path))
        print(f"drop-in    {_shown(file.path)}  sets {_shown(keys or 'nothing')}")
    for finding in found:
        mark = "registered" if finding.id in args.registered else "DRIFT"
        print(f"{mark:<10} [{finding.id}] {finding.kind}: {finding}")
    known = f", {len(found) - len(left)} registered" if len(left) < len(found) else ""
    verdict = f"DRIFT: {counted(len(left), 'finding')}{known}" if left else f"clean{known}"
    print(f"{facts.unit} on {facts.host}: {verdict}")
    return 2 if left else 0


def _why(args: argparse.Namespace) -> int:
    from ..payload.shown import Shown
    from ..text import one_line
    from ..unit.unitfile import unit_name
    from ..unit.why import CAUSES, why

    with _host(args) as host, Shown(sys.stderr) as show:
        told = why(host, args.unit, user=args.user, become=_become(args), progress=_telling(show))
        name = host.name
    if args.json:
        print(json.dumps({**dataclasses.asdict(told), "unit": unit_name(args.unit), "host": name}))
        return 2 if told.fault else 0
    loop = ", again and again" if told.looping and told.cause != "BOOT LOOP" else ""
    print(f"{unit_name(args.unit)} on {name}: {told.cause}{loop}: {CAUSES[told.cause]}")
    print(f"  {one_line(told.said, 1000)}")
    print(f"  automatic restarts: {told.restarts}")
    for line in told.lines:
        print(f"  journal: {line}")
    return 2 if told.fault else 0


def _verify(args: argparse.Namespace) -> int:
    from ..payload.shown import Shown
    from ..unit.checklist import load_checklist, verify

    checklist = load_checklist(args.checklist)
    with _host(args) as host, Shown(sys.stderr) as show:
        answers = verify(
            host,
            args.unit,
            checklist,
            user=args.user,
            become=_become(args),
            progress=_telling(show),
        )
    failed = [answer for answer in answers if not answer.passed]
    if args.json:
        report = {"passed": not failed, "checks": [dataclasses.asdict(a) for a in answers]}
        print(json.dumps(report, indent=1))
        return 2 if failed else 0
    for answer in answers:
        mark = "PASS" if answer.passed else "FAIL"
        print(f"{mark}  {answer.kind} {answer.name}".rstrip() + f": {answer.evidence}")
    count = f"{len(answers) - len(failed)} of {counted(len(answers), 'check')} hold"
    print(f"{args.checklist.name}: {count}")
    return 2 if failed else 0


def _rollback(args: argparse.Namespace) -> int:
    from ..lifecycle.rollback import rollback_window
    from ..report import write_views

    folder: Path = args.window
    done = rollback_window(folder.resolve(), say=lambda line: print(_shown(line)))
    if done.answers is not None:
        asked = done.answers
        if asked.passed:
            print(
                f"{asked.identical} of {asked.asked} answers identical: production is as captured"
            )
            return 0
        print(f"ALERT: production is as captured, and answers otherwise: {_shown(asked.reason)}")
        return 21
    assert done.summary is not None
    write_views(folder)
    print(f"restore {done.summary.restore.status}, watch {done.summary.watch.status}")
    for alert in done.summary.alerts:
        print(f"ALERT: {_shown(alert)}")
    return done.summary.exit_code if done.summary.exit_code in (20, 21) else 0


def _telling(show: Callable[[str], None]) -> Callable[[str], None]:
    return lambda what: show(f"unit: {what}")


def _become(args: argparse.Namespace) -> tuple[str, ...]:
    return ("sudo", "-n", "--") if args.sudo else ()


@contextlib.contextmanager
def _host(args: argparse.Namespace) -> Iterator[Host]:
    """The host of the words; its command records are not kept."""
    from ..errors import UsageError
    from ..hosts import CommandLog

    if not args.host and (args.key is not None or args.known_hosts is not None):
        raise UsageError("--key, --known-hosts: only with --host")
    if args.user and args.sudo:
        raise UsageError("--user and --sudo exclude each other: root has another systemd --user")
    with tempfile.TemporaryDirectory(prefix="dsv41-unit-") as folder:
        log = CommandLog(Path(folder), synced=False)
        if not args.host:
            from ..hosts import LocalHost

            yield LocalHost(log)
            return
        try:
            from ..hosts.ssh import SshHost
        except ImportError as error:
            raise UsageError(
                "--host: needs paramiko, which is not installed: pip install 'pytest-dsv41[ssh]'"
            ) from error
        login, _, rest = args.host.rpartition("@")
        address, colon, port = rest.partition(":")
        if not address or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
            raise UsageError(f"--host {args.host}: valid: [USER@]ADDRESS[:PORT]")
        host = SshHost(
            address,
            address,
            log,
            port=int(port or 22),
            user=login or None,
            key=args.key,
            known_hosts=args.known_hosts,
        )
        try:
            yield host
        finally:
            host.close()


def _shown(text: str) -> str:

    return one_line(text, 300)
