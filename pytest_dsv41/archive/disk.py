"""Every effect the archive has on files, in one small interface.

The crash tests put a simulated disk here, so that the code that runs in them is the code that
runs in a window. Offsets and sizes are in bytes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["DISK", "Disk"]

_MODE = 0o600


class Disk:
    """The real disk. Errors are the operating system's own `OSError`."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """Open `path` for reading and writing; a symbolic link is refused.

        With `create` the file must not exist yet.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return os.open(path, flags, _MODE)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`, in as many system calls as it takes."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            if written <= 0:
                raise OSError(errno.EIO, "write made no progress")
            view = view[written:]
            offset += written

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Make the file's bytes and size durable."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Make bytes that were overwritten durable; the file's size is already."""
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: Path, target: Path) -> None:
        """Give `source` a second name, which must be free."""
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, atomically."""
        os.rename(source, target)  # noqa: PTH104 - one spelling for all effects

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        os.unlink(path)  # noqa: PTH108 - one spelling for all effects


DISK = Disk()
