"""Check a parsed configuration for mistakes that would end in a traceback of Lightning or jsonargparse."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from jsonargparse import Namespace

from qerl_pl.checkpoint import LAST


def check_groups(groups: Iterable[str], config: Namespace) -> None:
    """Refuse a value where a group of named settings is expected, as in ``sampling: [1]``.

    Args:
        groups: dotted paths of groups of settings, such as model.sampling.
        config: parsed configuration of one command.

    Raises:
        ValueError: names the group and the value.
    """
    for name in groups:
        value = config.get(name)
        if not isinstance(value, Namespace | Mapping | None):
            raise ValueError(f"{name} is {value!r}; expected settings by their names below it, see --help")


def check_checkpoint(path: str | None, *, words: Collection[str] = ()) -> None:
    """Refuse a checkpoint that does not exist, before anything is loaded.

    Args:
        path: value of --ckpt_path; None if it is not given.
        words: values, such as "last", that stand for a checkpoint and are resolved later.

    Raises:
        ValueError: names the file and what may be given.
    """
    if path is None or path in words or Path(path).is_file():
        return
    if path == "best":
        raise ValueError("ckpt_path is 'best', with which fit cannot go on: it goes on from 'last', or from a file")
    raise ValueError(f"there is no checkpoint {path}; --ckpt_path is last, best (not for fit) or a file")


def check_run_is_new(run_dir: str, ckpt_path: str | None) -> None:
    """Refuse to start a run in a folder that holds one, unless it is resumed.

    Args:
        run_dir: folder of the run.
        ckpt_path: value of --ckpt_path; None if it is not given.

    Raises:
        ValueError: names the folder and its last checkpoint.
    """
    last = Path(run_dir, "checkpoints", LAST)
    if ckpt_path is None and last.exists():
        raise ValueError(
            f"{run_dir} already holds a run ({last}): resume it with --ckpt_path last, or choose another folder with "
            "--run_dir"
        )
