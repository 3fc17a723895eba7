"""Advice on errors of the operating system, such as a full disk."""

from __future__ import annotations

import errno
import os

MOST_LETTERS = 300  # of a path in a message
ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and start again; what was written before is whole",
    errno.EFBIG: "a file may not become this large here: raise the limit (ulimit -f) and start again; what was "
    "written before is whole",
    errno.EDQUOT: "the disk quota is used up: free some space and start again; what was written before is whole",
    errno.EROFS: "it is on a file system that can only be read: give another folder",
    errno.EACCES: "this user may not use it: give another folder, or change its permissions",
    errno.EPERM: "this user may not use it: give another folder, or change its permissions",
    errno.ENOTDIR: "a part of its path is a file and not a folder: give another path",
    errno.EEXIST: "a file is where a folder is needed: give another path, or move it away",
    errno.EISDIR: "it is a folder and a file is needed: give the path of a file",
    errno.ENOENT: "there is no such file or folder: check the path",
    errno.ENAMETOOLONG: "the name is too long: give a shorter path",
    errno.ELOOP: "its symbolic links refer to each other: give another path",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
}


def in_words(error: OSError) -> str:
    """Return one line for the user that names the file of an operating-system error and says what to do about the
    error."""
    number = error.errno if error.errno in ADVICE else _number_in(str(error))
    advice = ADVICE.get(number) if number else None
    if not advice:
        return str(error)
    name = str(error.filename or "")
    shown = name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}..."
    return f"{shown}: {advice}" if name else f"{error}; {advice}"


def _number_in(text: str) -> int | None:
    """Return the errno in ``ADVICE`` whose text by the operating system, such as "No space left on device", occurs in
    the message of an error; None if none does."""
    return next((number for number in ADVICE if os.strerror(number) in text), None)
