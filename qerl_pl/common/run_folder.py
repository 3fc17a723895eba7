"""Output folder of a run: its default name, its normalised path, its files, and whether a process trains in it."""

import fcntl
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
"""Names of a run's last checkpoint, and of the one before it."""
FOLDERS = ("checkpoints", "completions")
FILES = ("config.yaml", ".lock")
PROBE = 4096  # bytes that are written as a test of whether the disk is full, which also finds a quota that is used up
LOCK = ".lock"
"""File in a run's folder that a process locks while it trains there."""


def run_named_after(files: Sequence[Path]) -> str:
    """Return the default path of a run's folder: ``-c configs/tasks/gsm8k.yaml -c configs/arms/bf16.yaml`` gives
    runs/gsm8k_bf16, and no file gives runs/default. ``base.yaml`` and files in ``eval`` are ignored."""
    names = [path.stem for path in files if path.parent.name != "eval" and path.name != "base.yaml"]
    return f"runs/{'_'.join(names) or 'default'}"


def read_run_config(file: Path, *sections: str) -> dict[str, Any]:
    """Read a run's config.yaml. Raises ValueError if the file is no YAML of plain values (no Python objects), or lacks
    model.base or one of the sections."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML of plain values: {' '.join(str(error).split())}") from error
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("base"), str):
        raise ValueError(f"{file} has no model.base: it is not the config.yaml that a run wrote")
    if lacking := [name for name in sections if not isinstance(config.get(name), dict)]:
        raise ValueError(f"{file} has no section {lacking[0]}: it is not the config.yaml that a run wrote")
    return config


def plain_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of plain values; {} if it does not exist, cannot be read, or is no mapping."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def run_folder(text: str) -> str:
    """Normalise the path of a run's folder: replace ``~`` and environment variables, and turn ``a/./b/`` into ``a/b``.
    Raises ArgumentTypeError if the path is empty or unprintable, or names an unknown variable or user."""
    if not text.strip():
        raise ArgumentTypeError("run_dir is empty; expected a folder, e.g. runs/first")
    if not text.isprintable():
        raise ArgumentTypeError(f"run_dir is {text[:80]!r}; expected a path of printable characters")
    path = os.path.expanduser(os.path.expandvars(text))
    if "$" in path or path.startswith("~"):
        raise ArgumentTypeError(f"run_dir is {text!r}, in which a variable or a user is not known: write it out")
    return os.path.normpath(path)


def check_places(run: Path, *, trains: bool = True) -> None:
    """Check, before the model is loaded, that a run can write its files into its folder, which need not exist yet.
    Raises ValueError if the folder or, if the run trains (``trains``), a subfolder for its results cannot be written
    to, or if something else is where the run needs a folder or regular file; and OSError if the disk is full."""
    folder = run.absolute()
    exists = next(path for path in (folder, *folder.parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK | os.X_OK):
        kind = "which cannot be written to" if exists.is_dir() else "which is no folder"
        raise ValueError(f"run_dir is {run}, in {exists}, {kind}; choose another folder with --run_dir")
    try:
        with TemporaryFile(dir=exists) as file:
            file.write(bytes(PROBE))
            file.flush()
    except OSError as error:
        error.filename = str(run)
        raise
    for name in FOLDERS:
        if os.path.lexists(run / name) and not (run / name).is_dir():
            raise ValueError(f"{run / name} is no folder, and the run needs one there: move it away")
        if trains and (run / name).is_dir() and not os.access(run / name, os.W_OK | os.X_OK):
            raise ValueError(f"{run / name} cannot be written to, and the run writes there: change its permissions")
    for path in (*(run / name for name in FILES), *run.glob("checkpoints/*.ckpt")):
        if os.path.lexists(path) and not path.is_file():
            raise ValueError(f"{path} is no regular file, and the run needs one there: move it away")


def run_files(run: Path, checkpoint: str = "last") -> tuple[Path, Path]:
    """Return the paths of a run's config.yaml and of a checkpoint ("last", "best", or a path); raise ValueError if one
    does not exist."""
    config = run / "config.yaml"
    if not config.is_file():
        raise ValueError(f"{run} is no run folder: it has no config.yaml")
    path = run / "checkpoints" / f"{checkpoint}.ckpt" if checkpoint in ("last", "best") else Path(checkpoint)
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; expected last, best, or a file")
    return config, path


def date_in(config: Mapping[str, Any]) -> str | None:
    """Return the date in a run's config.yaml that its chat template writes into prompts; None if it writes none."""
    date = (config.get("data") or {}).get("date")
    return None if date is None else str(date)  # YAML reads a date without quotes as a date


def is_running(folder: Path) -> bool:
    """Return whether a process trains in the folder, that is, holds a lock on its file ``LOCK``."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def keep_metrics(folder: Path) -> Path | None:
    """Rename the metrics.csv of an interrupted run, which Lightning's CSVLogger would delete, to the first free one of
    metrics-1.csv, metrics-2.csv, ... Returns the new path; None, without renaming, if there is no metrics.csv or
    another process trains in the folder. Only the first rank may call this function."""
    metrics = folder / "metrics.csv"
    if not metrics.exists() or is_running(folder):
        return None
    number = 1
    while (kept := folder / f"metrics-{number}.csv").exists():
        number += 1
    return metrics.rename(kept)
