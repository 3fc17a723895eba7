"""Read lines of text files, write text files atomically, and set their permissions."""

from __future__ import annotations

import os
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


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, and create its folder.

    The text is written to a temporary file in the same folder, which is renamed when it is on the disk. A full disk, a
    killed process or a power failure therefore leaves the old file unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def allow_reading(path: Path) -> None:
    """Give a file the permissions that ``open`` gives to a new file; safetensors writes files that only their owner may
    read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
