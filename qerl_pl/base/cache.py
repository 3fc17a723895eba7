"""Folders that are made of a base once for all runs on this machine: named by content, made under a lock."""

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
    """Folder of the cache: QERL_PL_CACHE, or qerl_pl in XDG_CACHE_HOME, which is ~/.cache if it is not set."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl_pl"


def made_once(source: Path, label: str, settings: Mapping[str, object], make: Callable[[Path], object]) -> Path:
    """Find the folder that is made of a base with some settings, or make it; other processes wait for it.

    Args:
        source: folder of the base. All of its bytes count, but not its path.
        label: first part of the folder's name.
        settings: what else the result depends on, as JSON.
        make: writes the folder that it is given, which must appear only when it is whole.

    Raises:
        ValueError: ``make``'s.
        OSError: the cache cannot be written.
    """
    content = [base_digest(source), {file.name: _digest(file) for file in carried_files(source)}]
    key = hashlib.sha256(json.dumps([content, settings], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / f"{label}-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")  # the operating system frees it when its process ends, however it ends
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
