"""Cache of model folders that were made from a base checkpoint, such as its quantised copy. All runs on this machine
share it. A folder is named by a digest of the base and of the settings by which the folder was made."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from qerl_pl.base.digest import base_digest, stored_digests
from qerl_pl.quant.output import carried_files

VARIABLE = "QERL_PL_CACHE"


def cache_root() -> Path:
    """Return the cache folder: QERL_PL_CACHE or, if it is not set, qerl_pl in XDG_CACHE_HOME (~/.cache)."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl_pl"


def made_once(source: Path, label: str, settings: Mapping[str, object], make: Callable[[Path], object]) -> Path:
    """Return the folder in the cache that holds a derived copy of a base checkpoint, and call ``make`` to create it if
    it does not exist. If several processes ask for the same folder, one makes it and the others wait.

    The folder's name is ``label`` with a digest of the content of ``source`` (a folder or a GGUF file) and of
    ``settings``, which must be all settings that the copy depends on, in JSON's types. ``make`` is called with the path
    of the copy, and may create it there only when it is complete.
    """
    if source.is_file():
        content = [stored_digests(source.parent, [source])[source.name]]
    else:
        files = carried_files(source)
        carried = {str(file.relative_to(source)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        content = [base_digest(source), carried]
    key = hashlib.sha256(json.dumps([content, settings], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / f"{label}-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")  # the operating system releases the file lock if this process dies
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
