"""`dsv41 payload manifest | verify`: what a payload consists of, and whether it still does."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..text import counted
from .arguments import new_file

HELP = "a payload against its manifest: count, sizes, sha256; resumable. 0 verified, 2 not"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    made = acts.add_parser("manifest", help="write the manifest of what lies in a folder")
    made.add_argument("folder", type=Path, metavar="DIR", help="the payload")
    made.add_argument("manifest", type=Path, metavar="MANIFEST", help="the file to write; new")
    verify = acts.add_parser("verify", help="hold a folder against its manifest; 0 verified, 2 not")
    verify.add_argument("folder", type=Path, metavar="DIR", help="the payload")
    verify.add_argument("manifest", type=Path, metavar="MANIFEST", help="what it must be")
    verify.add_argument(
        "--run",
        dest="step",
        type=Path,
        metavar="DIR",
        help="journal and receipt; default: MANIFEST.run",
    )
    verify.add_argument(
        "--resume", action="store_true", help="do not read again what has not changed since"
    )
    for one in (made, verify):
        one.add_argument(
            "--ignore",
            action="append",
            default=[],
            metavar="GLOB",
            help="paths that are no part of it, as '.cache/*'; repeatable",
        )


def run(args: argparse.Namespace) -> int:
    """Run the chosen act."""
    return _manifest(args) if args.act == "manifest" else _verify(args)


def _manifest(args: argparse.Namespace) -> int:
    from ..durable import create_exclusive
    from ..payload.manifest import make_manifest
    from ..payload.shown import Shown

    new_file(args.manifest, "a manifest is never overwritten")
    with Shown(sys.stderr) as show:
        body = make_manifest(
            args.folder,
            ignore=args.ignore,
            progress=lambda text, done, total: show(text, done / total if total else 1.0),
        )
    create_exclusive(args.manifest, json.dumps(body, indent=1) + "\n")
    size = sum(row["bytes"] for row in body["files"])
    print(f"{args.manifest}: {counted(len(body['files']), 'file')}, {counted(size, 'byte')}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from ..errors import UsageError
    from ..payload.manifest import KIND, load_manifest, verify_payload
    from ..payload.runner import from_copy, swept
    from ..payload.shown import Shown
    from ..payload.step import Step

    # Before the step has a folder: a mistyped name leaves none.
    load_manifest(args.manifest)
    if not args.folder.is_dir():
        raise UsageError(f"{args.folder}: no such folder")
    folder = args.step or args.manifest.with_name(f"{args.manifest.name}.run")
    code = from_copy(folder, args.words) if args.alone else ""
    with swept(folder), Step(folder, KIND, code=code) as step, Shown(sys.stderr) as show:
        found = verify_payload(
            args.folder,
            args.manifest,
            step,
            resume=args.resume,
            ignore=args.ignore,
            progress=lambda text, done, total: show(text, done / total if total else 1.0),
        )
    for problem in found.problems:
        print(f"WRONG {problem}", file=sys.stderr)
    for note in found.notes:
        print(note)
    if found.problems:
        print(
            f"{args.folder}: NOT VERIFIED: {counted(len(found.problems), 'finding')}",
            file=sys.stderr,
        )
        return 2
    print(f"{args.folder}: verified, {counted(found.files, 'file')}, {found.hashed} read now")
    print(f"receipt: {folder / 'receipt.json'}")
    return 0
