"""Every runner works from a copy of itself.

A step of hours must not depend on files that somebody may replace meanwhile: a shell reads its
script as it goes, so that a script which is overwritten in mid-run ends in the middle of another
one (FRANK-ARCHON "The payload chain", step 3). The runner's own package is copied beside the step
and the process goes on from there; the scripts of its command are copied too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest_dsv41
from pytest_dsv41.errors import UsageError
from pytest_dsv41.payload.step import refuse_foreign

__all__ = ["code_sha256", "copy_scripts", "from_copy", "swept"]

_PACKAGE: Final = "pytest_dsv41"


def from_copy(folder: Path, words: Sequence[str]) -> str:
    """Go on from a copy of the package in `folder`; return the sha256 of the code that runs.

    The first call copies and puts `python -m pytest_dsv41 WORDS` from the copy in this process's
    place (it does not return); the second, in the copy, takes the traces out of the environment.
    """
    here = Path(pytest_dsv41.__file__).resolve().parent
    marked = os.environ.get("DSV41_RUNNER_COPY", "")
    if marked:
        del os.environ["DSV41_RUNNER_COPY"]
        # The commands that this process starts get the path it was itself started with.
        first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
        if first == marked:
            if rest:
                os.environ["PYTHONPATH"] = rest
            else:
                del os.environ["PYTHONPATH"]
        if here != Path(marked).resolve() / _PACKAGE:
            raise UsageError(f"{marked}: the copy was made, but {here} is what Python runs")
        return code_sha256(here)
    refuse_foreign(folder)
    copy = folder / f"runner-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The times of the files are kept, and with them what Python has compiled.
        shutil.copytree(here, copy / _PACKAGE, dirs_exist_ok=True)
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        # Of a whole tree there is one error for each file that could not be copied.
        several = isinstance(error, shutil.Error) and error.args and error.args[0]
        why = str(several[0][-1]) if isinstance(several, list) else error.strerror
        raise UsageError(f"{folder}: the runner cannot be copied there: {why}") from None
    path = os.pathsep.join([str(copy.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "DSV41_RUNNER_COPY": str(copy.resolve())}
    argv = [sys.executable, "-P", "-m", _PACKAGE, *words]
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(sys.executable, argv, environment)  # noqa: S606 - itself, from its copy


def code_sha256(package: Path) -> str:
    """Return the sha256 over names and bytes of a package's modules."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        raw = path.read_bytes()
        found.update(f"{path.relative_to(package)}\0{len(raw)}\0".encode() + raw)
    return found.hexdigest()


@contextlib.contextmanager
def swept(folder: Path) -> Iterator[None]:
    """Remove the copies that ended runs have left in `folder`; at the end, this process's own."""
    own = folder / f"runner-{os.getpid()}"
    for path in folder.glob("runner-*"):
        pid = path.name.removeprefix("runner-")
        if path != own and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(own, ignore_errors=True)


def copy_scripts(folder: Path, base: Path, scripts: Sequence[str]) -> dict[str, Path]:
    """Copy `scripts`, relative to `base`, below `folder`; return each name's copy.

    Raises:
        UsageError: one is missing, lies outside `base`, or is no regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
    copies = {}
    for name in scripts:
        path = base / name
        try:
            inside = path.resolve().is_relative_to(base.resolve())
        except RuntimeError:
            raise UsageError(f"{path}: a loop of symbolic links") from None
        if Path(name).is_absolute() or not inside or not path.is_file():
            why = "no such file" if inside else "lies outside the gate file's folder"
            if Path(name).is_absolute():
                why = "valid: a path relative to the gate file's folder"
            raise UsageError(f"{path}: {why}")
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
        copies[name] = copy
    return copies
