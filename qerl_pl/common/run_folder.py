"""A run's folder: its path, the same however it is written, and whether a process trains in it."""

from __future__ import annotations

import fcntl
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

LOCK = ".lock"
"""File in a run's folder that the process which trains there holds locked."""


def run_named_after(files: Sequence[Path]) -> str:
    """Name the folder of a run whose settings name none: after its files, but not those of an evaluation.

    ``-c configs/tasks/gsm8k.yaml -c configs/arms/bf16.yaml`` give runs/gsm8k_bf16; no file gives runs/default.
    """
    names = [path.stem for path in files if path.parent.name != "eval" and path.name != "base.yaml"]
    return f"runs/{'_'.join(names) or 'default'}"


def run_folder(text: str) -> str:
    """Normalise the path of a run's folder: ``~`` and environment variables are replaced, ``a/./b/`` becomes ``a/b``.

    Raises:
        ArgumentTypeError: the path is empty, or names a variable that is not set or a user that does not exist.
    """
    if not text.strip():
        raise ArgumentTypeError("run_dir is empty; expected a folder, e.g. runs/first")
    path = os.path.expanduser(os.path.expandvars(text))
    if "$" in path or path.startswith("~"):
        raise ArgumentTypeError(f"run_dir is {text!r}, in which a variable or a user is not known: write it out")
    return os.path.normpath(path)


def is_running(folder: Path) -> bool:
    """Whether a process trains in the folder: it holds a lock for as long as it lives."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@rank_zero_only
def keep_metrics(folder: Path) -> Path | None:
    """Move metrics.csv out of the way of Lightning's CSVLogger, which deletes the file of the start before.

    Returns:
        Where it is now: metrics-1.csv, or the first such name that is free; None where there was none, or where a
        process that trains in the folder still writes it.
    """
    metrics = folder / "metrics.csv"
    if not metrics.exists() or is_running(folder):
        return None
    number = 1
    while (kept := folder / f"metrics-{number}.csv").exists():
        number += 1
    return metrics.rename(kept)
