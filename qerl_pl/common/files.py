"""Read files and replace them atomically; express file sizes and errors of the operating system in words."""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from qerl_pl.common.checks import shortened

UNITS = ("B", "kB", "MB", "GB", "TB")
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
    errno.EPIPE: "the program that reads it has ended",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
}


def read_lines(path: Path, *, errors: str = "strict") -> list[str]:
    """Read the lines of a UTF-8 text file; ``errors`` says, as for ``open``, what happens with bytes that are not
    UTF-8."""
    # splitlines would also split at characters such as U+2028, which a JSON string of a completion may contain
    lines = path.read_text(encoding="utf-8", errors=errors).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def searched(path: str | Path) -> str:
    """Return the text by which an error message names a path that was not found. After a relative path, the text has
    the folder in which it was searched for, the working directory."""
    return str(path) if Path(path).expanduser().is_absolute() else f"{path} (searched in {Path.cwd()})"


def check_readable(path: Path) -> None:
    """Raise OSError if a file cannot be opened. It is called before safetensors opens a file, because safetensors would
    say that a file does not exist if this user may not read it."""
    path.open("rb").close()


def traceback_file(error: BaseException) -> str:
    """Write an error's traceback to a temporary file. Returns the file's path or, if there is no folder to write to,
    words that say so."""
    with suppress(OSError), NamedTemporaryFile("w", prefix="qerl-", suffix=".log", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
        return file.name
    return "there is no folder for it"


def replaceable(path: Path) -> Path:
    """Return the path of the file that writing to ``path`` would replace, after following symbolic links. Raises
    OSError if it exists and is not a regular file."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file, and would be replaced: give the path of a file", str(path))
    return target


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file atomically, and create its folder. The context yields a path in the same folder, to which the
    caller writes. This file is renamed to ``path`` when its bytes are on the disk, and removed after an error. So a
    full disk, a killed process or a power failure leaves the old file unchanged. Raises OSError if ``path`` is no
    regular file. If the operating system's error does not say to which file it belongs, it gets the name ``path``."""
    target = replaceable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically (``replacing``), and create its folder."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def allow_reading(path: Path) -> None:
    """Give a file the permissions of a new file; safetensors writes files that only their owner may read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def in_bytes(count: float) -> str:
    """Format a number of bytes with three significant digits in the largest fitting decimal unit (``226 kB``)."""
    for unit in UNITS[:-1]:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"


def in_words(error: OSError) -> str:
    """Return one line that names the file to which an operating system's error belongs, and says what to do."""
    # errors of libraries have only the system's text, such as "No space left on device"
    texts = [number for number in ADVICE if os.strerror(number) in str(error)]
    numbers = [error.errno] if error.errno in ADVICE else texts
    if not numbers:
        return str(error)
    advice = ADVICE[numbers[0]]
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename or "")
    return f"{shortened(name, MOST_LETTERS)}: {advice}" if name else f"{error}; {advice}"
