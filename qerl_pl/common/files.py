"""Write text files atomically, and set their permissions."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, and create its folder.

    The text is written to a temporary file in the same folder, which is then renamed, so a full disk or a killed
    process leaves the old file unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
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
