"""sha256 of large files, with progress and an identity that says whether a file was changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pytest_dsv41.errors import UsageError

__all__ = ["hash_file", "identity", "tell_bytes"]

_CHUNK: Final = 4 << 20


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return a file's sha256, 64 hex digits; `progress` is called with each chunk's bytes."""
    found = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        # Read once from end to end: what the page cache holds of others stays useful.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while size := file.readinto(buffer):
            found.update(buffer[:size])
            if progress is not None:
                progress(size)
    return found.hexdigest()


def identity(path: Path) -> list[int]:
    """Return what changes whenever a file's content does: size, times, inode, device.

    The time of the last change of the inode cannot be set back by a program.

    Raises:
        UsageError: no such file, or it is no regular file.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if not path.is_file():
        raise UsageError(f"{path}: no regular file")
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def tell_bytes(size: int) -> str:
    """Return a size as people read it: `116,416 MiB`, `640 bytes`."""
    return f"{size >> 20:,} MiB" if size >= 10 << 20 else f"{size:,} bytes"
