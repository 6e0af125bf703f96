"""Files that survive a kill: atomic writes, exclusive creation, synced appends, and a lock.

And a read that no FIFO, device or endless file in a file's place can hold up.

An acknowledged write is on disk: the file is synced before it gets its name, the folder after
(SAFETY, "Rules that follow"). After a failed fsync nothing is retried on the same descriptor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeVar

__all__ = [
    "FileLock",
    "append_json_line",
    "create_exclusive",
    "dump_json",
    "from_record",
    "fsync_folder",
    "parse_json",
    "read_json_lines",
    "read_regular",
    "remove",
    "sweep",
    "write_atomic",
]

_MODE = 0o600
_TEMPORARY: Final = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.tmp")


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_T = TypeVar("_T", bound=_Dataclass)
_KINDS: Final[dict[str, Any]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "tuple[str, ...]": (list,),
    "dict[str, str]": (dict,),
    "dict[str, float]": (dict,),
    "dict[str, Any]": (dict,),
}
_INSIDE: Final[dict[str, str]] = {
    "tuple[str, ...]": "str",
    "dict[str, str]": "str",
    "dict[str, float]": "float",
}


def dump_json(value: Any) -> str:
    """Return the canonical JSON of `value`: sorted keys, no spaces, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(raw: str | bytes, *, once: bool = False) -> Any:
    """Return what the JSON text `raw` says, whoever wrote it; `once`: no key may stand there twice.

    Raises:
        ValueError: it is not JSON, or nested deeper than Python can follow.
    """
    try:
        return json.loads(raw, object_pairs_hook=_once if once else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return table


def from_record(kind: type[_T], record: Any) -> _T:
    """Build the dataclass `kind` from a parsed JSON object, as `dataclasses.asdict` gave it.

    Fields are text, whole and finite numbers, and lists and objects of these.

    Raises:
        ValueError: a field is missing, unknown, or of another type; it is named.
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name, value in record.items():
        if name not in fields:
            raise ValueError(f"{name} is unknown")
        if not _fits(value, fields[name]):
            raise ValueError(f"{name} is {value!r}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})
    except TypeError as error:
        raise ValueError(str(error)) from None


def _fits(value: Any, kind: str) -> bool:
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        return False
    inside = _INSIDE.get(kind)
    if inside is not None:
        values = value.values() if isinstance(value, dict) else value
        return all(_fits(one, inside) for one in values)
    try:
        return not isinstance(value, (int, float)) or math.isfinite(value)
    except OverflowError:
        return False


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(fd, view)
        if written == 0:
            raise OSError(errno.EIO, "write made no progress")
        view = view[written:]


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk says of no descriptor which file it is; a person has to know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def _temporary(path: Path, data: bytes, like: os.stat_result | None = None) -> Iterator[Path]:
    """Write `data`, synced, to a new file beside `path`; gone again on leaving."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temp, flags, _MODE)
    except OSError as error:
        # Nobody knows the temporary file's name.
        error.filename = str(path)
        raise
    try:
        try:
            if like is not None:
                # Only root can give a file away; to anybody else it is his own already.
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, like.st_uid, like.st_gid)
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
            with _named(path):
                _write_all(fd, data)
                os.fsync(fd)
        finally:
            os.close(fd)
        yield temp
    finally:
        with contextlib.suppress(FileNotFoundError):
            temp.unlink()


def write_atomic(path: Path, data: bytes | str, *, like: os.stat_result | None = None) -> None:
    """Replace `path` by `data`: readers see the old bytes or the new ones, never a part.

    The new file has the owner and the permissions of `like`; by default it is its owner's alone.
    """
    raw = data.encode() if isinstance(data, str) else data
    with _temporary(path, raw, like) as temp:
        temp.rename(path)
        fsync_folder(path.parent)


def create_exclusive(path: Path, data: bytes | str) -> None:
    """Create `path` with `data` once.

    Raises:
        FileExistsError: somebody else has created it; its bytes are untouched.
    """
    raw = data.encode() if isinstance(data, str) else data
    with _temporary(path, raw) as temp:
        os.link(temp, path, follow_symlinks=False)
        fsync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove `path` durably; a missing file is fine, removal is idempotent."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if path.parent.is_dir():
        fsync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove the temporary files in `folder` whose writers were killed; others' stay."""
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(OSError):
                path.unlink()


def append_json_line(path: Path, value: Any) -> None:
    """Append one JSON line, synced. One writer a file; a torn tail is cut by the reader."""
    line = (dump_json(value) + "\n").encode()
    existed = path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        # A line torn by a kill must not swallow the next one.
        size = os.fstat(fd).st_size
        if size and _last_byte(path) != b"\n":
            line = b"\n" + line
        with _named(path):
            _write_all(fd, line)
            os.fsync(fd)
    finally:
        os.close(fd)
    if not existed:
        fsync_folder(path.parent)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON-lines file; lines torn by a kill are left out."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_regular(file: Path, limit: int) -> bytes:
    """Return the bytes of a regular file; a FIFO or device in its place never hangs the reader.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, is no regular file, or has more than `limit` bytes.
    """
    if "\0" in str(file):
        raise ValueError("a name with a null character")
    fd = -1
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        with os.fdopen(fd, "rb", closefd=False) as stream:
            raw = stream.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    finally:
        if fd >= 0:
            os.close(fd)
    if len(raw) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return raw


class FileLock:
    """An exclusive flock on a separate, never renamed file; freed by the kernel at process exit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, blocking: bool = False) -> bool:
        """Take the lock; False if somebody else holds it and `blocking` is off."""
        if self._fd is not None:
            return True
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(fd)
                return False
            except BaseException:
                os.close(fd)
                raise
            try:
                # Whoever waited may hold the lock of a file that is no longer there.
                same = os.path.samestat(os.fstat(fd), self.path.stat())
                regular = stat.S_ISREG(os.fstat(fd).st_mode)
            except FileNotFoundError:
                same = regular = False
            except BaseException:
                os.close(fd)
                raise
            if same and regular:
                self._fd = fd
                return True
            os.close(fd)
            if same:
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))

    def fileno(self) -> int:
        """The descriptor: a child that inherits it holds the lock for as long as it lives.

        Raises:
            ValueError: the lock is not held.
        """
        if self._fd is None:
            raise ValueError(f"{self.path}: not held")
        return self._fd

    def held_elsewhere(self) -> bool:
        """Whether another process holds the lock now; takes nothing and creates nothing."""
        if self._fd is not None:
            return False
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # A shared try-lock fails only while somebody holds the exclusive one.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def release(self) -> None:
        """Give the lock back; releasing twice is fine."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __enter__(self) -> FileLock:
        self.acquire(blocking=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
