"""Argument types for paths and numbers: one that cannot be used is refused before any work is done."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")


def output_file(text: str | Path) -> Path:
    """Check that a path can be that of a file.

    Raises:
        ArgumentTypeError: it is a folder, a device or the like, or one of its parents is a file.
    """
    text, path = str(text), Path(text)  # jsonargparse checks the result once more
    if not text.strip() or path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder; expected a file, e.g. {path / 'result'}")
    if path.exists() and not path.is_file():
        raise ArgumentTypeError(f"{text!r} is no regular file, and would be replaced; expected the path of a file")
    above = next((parent for parent in path.parents if parent.exists()), Path())
    if not above.is_dir():
        raise ArgumentTypeError(f"{above} is a file and not a folder, so {text!r} cannot be written")
    return path


def output_folder(text: str | Path) -> Path:
    """Check that a path can be that of a folder.

    Raises:
        ArgumentTypeError: the path is empty, as that of a variable that is not set; or it, or one of its parents, is a
            file, a device or the like.
    """
    text, path = str(text), Path(text)
    if not text.strip():
        raise ArgumentTypeError("the path is empty; expected a folder, such as . for the current one")
    found = next((each for each in (path, *path.parents) if each.exists()), Path())
    if not found.is_dir():
        raise ArgumentTypeError(f"{found} is a file; expected a folder, new or existing, and so for its parents")
    return path


def picture_file(text: str) -> Path:
    """Check that a path names a file in which a picture can be saved.

    Raises:
        ArgumentTypeError: as ``output_file``, or its suffix is not one of ``PICTURES``.
    """
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise ArgumentTypeError(f"{text!r} does not end in one of {', '.join(PICTURES)}")
    return path


def at_least(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """Make an argument type: a whole number from ``smallest`` to ``largest``."""

    def number(text: str) -> int:
        value = int(text)
        if not smallest <= value <= largest:
            upper = f" to {largest}" if largest < math.inf else " or more"
            raise ArgumentTypeError(f"it is {text}; expected {smallest}{upper}")
        return value

    number.__name__ = "whole number"  # argparse names the type of a text that is no number
    return number


def finite(*, above: float | None = None, least: float | None = None) -> Callable[[str], float]:
    """Make an argument type: a finite number greater than ``above``, or at least ``least``."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            limit = f"more than {above:g}" if least is None else f"{least:g} or more"
            raise ArgumentTypeError(f"it is {text}; expected {limit}")
        return value

    number.__name__ = "number"
    return number


def existing_folder(text: str) -> Path:
    """Check that a path is that of a folder.

    Raises:
        ArgumentTypeError: there is no such folder.
    """
    return _existing(text, "folder", Path.is_dir)


def existing_base(text: str) -> Path:
    """Check that a path is that of a folder or of a GGUF file.

    Raises:
        ArgumentTypeError: there is neither.
    """
    return existing_file(text) if text.lower().endswith(".gguf") or Path(text).is_file() else existing_folder(text)


def existing_file(text: str) -> Path:
    """Check that a path is that of a file.

    Raises:
        ArgumentTypeError: there is no such file.
    """
    return _existing(text, "file", Path.is_file)


def existing_run(text: str) -> Path:
    """Check that a path is that of a run's folder.

    Raises:
        ArgumentTypeError: there is no such folder, or it has no config.yaml.
    """
    path = existing_folder(text)
    if not (path / "config.yaml").is_file():
        raise ArgumentTypeError(f"{text} is no run folder: it has no config.yaml")
    return path


def _existing(text: str, kind: str, exists: Callable[[Path], bool]) -> Path:
    path = Path(text)
    if not exists(path):
        raise ArgumentTypeError(f"there is no {kind} {text}; check the path")
    return path
