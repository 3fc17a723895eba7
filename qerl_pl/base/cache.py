"""Cache of folders that are derived from a base, shared by all runs on this machine; names depend on the content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from qerl_pl.base.digest import base_digest
from qerl_pl.quant.output import carried_files

VARIABLE = "QERL_PL_CACHE"


def cache_root() -> Path:
    """Return the cache's folder: QERL_PL_CACHE, or qerl_pl in XDG_CACHE_HOME, which is by default ~/.cache."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl_pl"


def made_once(source: Path, label: str, settings: Mapping[str, object], make: Callable[[Path], object]) -> Path:
    """Return the folder that is derived from a base with some settings, and make it if it does not exist.

    Only one process makes it, and others wait.

    Args:
        source: folder of the base. Its contents identify the result, and its path does not.
        label: first part of the folder's name.
        settings: everything else that the result depends on; values that can be written as JSON.
        make: makes the folder at a given path; the folder must appear only when it is complete.

    Raises:
        ValueError: ``make`` raised it.
        OSError: the cache cannot be written.
    """
    content = [base_digest(source), {file.name: _digest(file) for file in carried_files(source)}]
    key = hashlib.sha256(json.dumps([content, settings], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / f"{label}-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")  # released by the operating system if the process dies
    try:
        lock.acquire(timeout=0)
    except Timeout:
        rank_zero_info(f"another process makes {folder}; waiting for it")
        lock.acquire()
    try:
        if not folder.is_dir():
            make(folder)
    finally:
        lock.release()
    return folder


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
