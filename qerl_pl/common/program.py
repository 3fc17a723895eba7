"""The parser of commands' options, arguments and environment of the process, how the user calls this program, and the
exception with which a signal ends it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


def called_as(command: str) -> str:
    """Return how to call a command: ``qerl COMMAND`` if the user started the program so, or else ``python -m ...``."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"


class Stopped(SystemExit):
    """Raised where the program is when a signal asks it to end; the status is 128 plus the signal's number.

    ``rewards.guard`` tells it by its type from a reward that asks the program to exit.
    """


@contextmanager
def restored_arguments() -> Iterator[None]:
    """Restore ``sys.argv`` at the end of the context, because ``cli.training.main`` replaces it."""
    arguments = list(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


def quoted_from_environment(error: Exception) -> str:
    """Return the variables of the environment whose values an error quotes, e.g. " (environment: RANK=x)"."""
    # packages read variables and raise errors that have the value alone
    told = {name: value for name, value in os.environ.items() if value and repr(value) in str(error)}
    return f" (environment: {', '.join(f'{name}={value}' for name, value in told.items())})" if told else ""


def use_expandable_segments() -> None:
    """Let torch allocate GPU memory in expandable segments, unless the environment has settings of its allocator."""
    # Passes of different sizes otherwise leave the cache in pieces: a run that was planned at 75 of 79 GiB ran out of
    # memory with 9 GiB in pieces. torch reads the variable when it first allocates GPU memory.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's options that prints an error as one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and how to list the options, and end the program with status 2."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists the options\n")
