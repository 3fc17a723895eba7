"""Text files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write beside the file and rename, so that a full disk or a kill leaves the old one; its folder is made.

    Raises:
        OSError: it cannot be written.
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
    """Give a file the permissions that ``open`` would: safetensors writes files that their owner alone may read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
