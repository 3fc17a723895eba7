"""A run's folder, the same however it is written."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError


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
