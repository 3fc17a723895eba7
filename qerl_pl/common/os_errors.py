"""Errors of the operating system, in words that say what to do."""

from __future__ import annotations

import errno
import os

ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and start again; what was written before is whole",
    errno.EDQUOT: "the disk quota is used up: free some space and start again; what was written before is whole",
    errno.EROFS: "it is on a file system that can only be read: give another folder",
    errno.EACCES: "this user may not use it: give another folder, or change its permissions",
    errno.EPERM: "this user may not use it: give another folder, or change its permissions",
    errno.ENOTDIR: "a part of its path is a file and not a folder: give another path",
    errno.EEXIST: "a file is where a folder is needed: give another path, or move it away",
    errno.EISDIR: "it is a folder and a file is needed: give the path of a file",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
}


def in_words(error: OSError) -> str:
    """Say in one line what an error of the operating system is about, and what to do."""
    number = error.errno if error.errno in ADVICE else _number_in(str(error))
    advice = ADVICE.get(number) if number else None
    place = f"{error.filename}: " if error.filename else f"{error}: "
    return f"{place}{advice}" if advice else str(error)


def _number_in(text: str) -> int | None:
    """An error that was told in the text of another one."""
    return next((number for number in ADVICE if os.strerror(number) in text), None)
