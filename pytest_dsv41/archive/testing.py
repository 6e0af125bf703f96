"""For tests of the archive and of what writes to it: example rows, failing and crashing disks.

`CrashDisk` does everything for real and keeps a log of it. `crash_states` then lists every state
in which the files can be after a power failure at a given effect: what was synced is there, what
was not may be there, be missing, be torn, or be there although an earlier effect is not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.disk import Disk

__all__ = ["CrashDisk", "Effect", "FaultyDisk", "crash_states", "example_row"]

Files = dict[str, bytes]
"""File name to bytes: a folder."""


def example_row(repeat: int = 0, /, **changes: Any) -> dict[str, Any]:
    """Return a valid row; `changes` replaces fields, a value of None leaves one out."""
    row: dict[str, Any] = {
        "window": "DEMO-a-W-20261027T181314Z",
        "cell": "short-b1",
        "metric": "ms_per_round",
        "value": 50.25 + repeat % 7 / 8,
        "max_tokens": 512,
        "commit": "596ba1c" + "0" * 33,
        "clock_cap_mhz": 2150,
        "clock_source": "start-log",
        "date": "20261027",
        "start": "C1",
        "repeat": repeat,
        "prompt_sha256": "932db59f8e4c" + "0" * 52,
    }
    row.update(changes)
    return {name: value for name, value in row.items() if value is not None}


class FaultyDisk(Disk):
    """A disk whose n-th effect (from 1) raises `error`; with `half`, a write does half of it."""

    def __init__(self, n: int, error: BaseException, *, half: bool = False) -> None:
        self._left = n
        self._error = error
        self._half = half
        self.effects: list[str] = []

    def _tick(self, name: str) -> bool:
        self.effects.append(name)
        self._left -= 1
        return self._left == 0

    def open(self, path: Path, *, create: bool = False) -> int:
        if self._tick("open"):
            raise self._error
        return super().open(path, create=create)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self._tick("write"):
            if self._half:
                super().write(fd, data[: len(data) // 2], offset)
            raise self._error
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        if self._tick("truncate"):
            raise self._error
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        if self._tick("sync"):
            raise self._error
        super().sync(fd)

    def sync_data(self, fd: int) -> None:
        if self._tick("sync_data"):
            raise self._error
        super().sync_data(fd)

    def sync_folder(self, folder: Path) -> None:
        if self._tick("sync_folder"):
            raise self._error
        super().sync_folder(folder)

    def link(self, source: Path, target: Path) -> None:
        if self._tick("link"):
            raise self._error
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        if self._tick("rename"):
            raise self._error
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        if self._tick("unlink"):
            raise self._error
        super().unlink(path)


@dataclass(frozen=True)
class Effect:
    """One effect: what it did, to the file of which number, and with what.

    Files have numbers because names move: `number` is the file's own for ever.
    """

    kind: str
    number: int = -1
    offset: int = 0
    data: bytes = b""
    name: str = ""
    other: str = ""


@dataclass
class CrashDisk(Disk):
    """A disk in one folder that logs its effects, without the cost of real syncs."""

    folder: Path
    log: list[Effect] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _fds: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    def _number(self, path: Path) -> int:
        if path.name not in self._names:
            self._names[path.name] = self._next
            self.log.append(Effect("known", self._next, data=path.read_bytes(), name=path.name))
            self._next += 1
        return self._names[path.name]

    def open(self, path: Path, *, create: bool = False) -> int:
        fd = super().open(path, create=create)
        if create:
            self._names[path.name] = self._next
            self.log.append(Effect("create", self._next, name=path.name))
            self._next += 1
        self._fds[fd] = self._number(path)
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        super().write(fd, data, offset)
        self.log.append(Effect("write", self._fds[fd], offset, bytes(data)))

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.log.append(Effect("truncate", self._fds[fd], size))

    def sync(self, fd: int) -> None:
        self.log.append(Effect("sync", self._fds[fd]))

    def sync_data(self, fd: int) -> None:
        self.sync(fd)

    def sync_folder(self, folder: Path) -> None:  # noqa: ARG002 - there is one
        self.log.append(Effect("sync_folder"))

    def link(self, source: Path, target: Path) -> None:
        number = self._number(source)
        super().link(source, target)
        self._names[target.name] = number
        self.log.append(Effect("link", number, name=target.name))

    def rename(self, source: Path, target: Path) -> None:
        number = self._number(source)
        if target.exists():
            self._number(target)
        super().rename(source, target)
        del self._names[source.name]
        self._names[target.name] = number
        self.log.append(Effect("rename", number, name=target.name, other=source.name))

    def unlink(self, path: Path) -> None:
        number = self._number(path)
        super().unlink(path)
        del self._names[path.name]
        self.log.append(Effect("unlink", number, name=path.name))


def _apply(effects: Sequence[Effect]) -> Files:
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    for effect in effects:
        data = contents.setdefault(effect.number, bytearray())
        if effect.kind == "known":
            data[:] = effect.data
            names[effect.name] = effect.number
        elif effect.kind == "write":
            if len(data) < effect.offset:
                data.extend(bytes(effect.offset - len(data)))
            data[effect.offset : effect.offset + len(effect.data)] = effect.data
        elif effect.kind == "truncate":
            del data[effect.offset :]
        elif effect.kind in ("create", "link"):
            names[effect.name] = effect.number
        elif effect.kind == "rename":
            names.pop(effect.other, None)
            names[effect.name] = effect.number
        elif effect.kind == "unlink":
            names.pop(effect.name, None)
    return {name: bytes(contents[number]) for name, number in names.items()}


def _torn(effect: Effect) -> tuple[tuple[Effect, ...], ...]:
    """The ways a write that was not synced can be found: whole, its first or its second half."""
    if effect.kind != "write" or len(effect.data) < 2:
        return ((effect,),)
    half = len(effect.data) // 2
    first = Effect("write", effect.number, effect.offset, effect.data[:half])
    second = Effect("write", effect.number, effect.offset + half, effect.data[half:])
    # The size is written before the data: a hole of zeros where the data should be.
    hole = Effect("write", effect.number, effect.offset, bytes(len(effect.data)))
    return ((effect,), (first,), (second,), (hole,))


def crash_states(log: Sequence[Effect], at: int) -> Iterator[Files]:
    """Yield every folder that a power failure after effect number `at` (from 0) can leave.

    What a later sync of its file, or for names of the folder, covers is durable. Of the rest,
    every subset may have arrived, in every order, each write possibly torn.
    """
    done = list(log[:at])
    synced = {
        number: max(i for i, e in enumerate(done) if e.kind == "sync" and e.number == number)
        for number in {e.number for e in done if e.kind == "sync"}
    }
    folder = max((i for i, e in enumerate(done) if e.kind == "sync_folder"), default=-1)
    durable: list[Effect] = []
    pending: list[Effect] = []
    for place, effect in enumerate(done):
        if effect.kind in ("sync", "sync_folder"):
            continue
        if effect.kind == "known":
            durable.append(effect)
        elif effect.kind in ("write", "truncate"):
            (durable if place < synced.get(effect.number, -1) else pending).append(effect)
        else:
            (durable if place < folder else pending).append(effect)
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for size in range(len(pending) + 1):
        for order in itertools.permutations(pending, size):
            for parts in itertools.product(*(_torn(effect) for effect in order)):
                files = _apply([*durable, *itertools.chain.from_iterable(parts)])
                key = tuple(sorted(files.items()))
                if key not in seen:
                    seen.add(key)
                    yield files


def put_files(folder: Path, files: Files) -> None:
    """Make `folder` hold exactly `files`."""
    for path in folder.iterdir():
        os.unlink(path)  # noqa: PTH108 - as the disk spells it
    for name, data in files.items():
        (folder / name).write_bytes(data)
