"""Read lines of text files, replace files atomically, and set their permissions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def read_lines(path: Path, *, errors: str = "strict") -> list[str]:
    """Read the lines of a UTF-8 text file.

    Lines end at a line feed only. ``str.splitlines`` also splits at characters such as U+2028, which the JSON of a
    completion may hold.

    Args:
        path: the file.
        errors: as in ``open``: what happens with bytes that are not UTF-8.
    """
    lines = path.read_text(encoding="utf-8", errors=errors).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def replaceable(path: Path) -> Path:
    """Return the path that a file written at ``path`` takes: the target, if ``path`` is a symbolic link.

    Raises:
        OSError: something else than a regular file is there, such as a folder, a device or a named pipe.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file, and would be replaced: give the path of a file", str(path))
    return target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file atomically, and create its folder.

    The context's value is the path of a temporary file in the same folder, which the caller writes. It is renamed to
    ``path``, or to the target of a symbolic link, when the context ends and its bytes are on the disk. After an error
    it is removed. A full disk, a killed process or a power failure therefore leaves the old file unchanged.

    Raises:
        OSError: the file cannot be written, or would replace something else than a regular file (``replaceable``).
    """
    target = replaceable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically (``replacing``), and create its folder.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def allow_reading(path: Path) -> None:
    """Give a file the permissions that ``open`` gives to a new file; safetensors writes files that only their owner may
    read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
