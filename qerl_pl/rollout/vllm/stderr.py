"""Suppress lines that C++ code writes to the standard error stream, on which Python's log levels have no effect."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

STDERR = 2  # file descriptor


@contextmanager
def without_lines(containing: str) -> Iterator[None]:
    """Hold back what the process writes to standard error within this context; at its end write all lines except those
    with a given text.

    Args:
        containing: lines with this text are dropped.
    """
    sys.stderr.flush()
    terminal = os.dup(STDERR)
    with TemporaryFile() as file:
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, STDERR)
            os.close(terminal)
            file.seek(0)
            os.write(STDERR, b"".join(line for line in file if containing.encode() not in line))
