"""Functions about the process: how the user called this program, its arguments and environment variables, the exception
by which a signal ends it, and the parser of commands' options."""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


def called_as(command: str) -> str:
    """Return the text by which a user calls a command, in the form that was used for this process: ``qerl COMMAND`` or
    ``python -m qerl_pl COMMAND``."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"


class Stopped(SystemExit):
    """Exception that a signal handler raises when a signal asks the program to end, with exit status 128 plus the
    signal's number. A separate class lets ``rewards.guard`` distinguish it from a SystemExit that a reward function
    raises."""


@contextmanager
def restored_arguments() -> Iterator[None]:
    """Restore ``sys.argv`` at the end of the context, because ``cli.training.main``, called within it, replaces
    ``sys.argv``."""
    arguments = list(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Collect no garbage inside the context, and leave all objects that exist at its end out of garbage collections.

    Importing torch, Lightning and transformers makes half a million objects, which stay until the process ends.
    Looking at them again and again takes a quarter of the imports' time, and half a second in each later collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise Triton reports them as leaked
    finally:
        if was_enabled:
            gc.enable()


def quoted_from_environment(error: Exception) -> str:
    """Return text to append to an error message: the environment variables whose values the message quotes, e.g. "
    (environment: RANK=x)"; "" if there are none."""
    # packages that read environment variables raise errors that quote only the value and not the variable's name
    told = {name: value for name, value in os.environ.items() if value and repr(value) in str(error)}
    return f" (environment: {', '.join(f'{name}={value}' for name, value in told.items())})" if told else ""


def use_expandable_segments() -> None:
    """Let torch use expandable segments of GPU memory, unless the environment configures its allocator."""
    # Without expandable segments, passes of different sizes fragment the allocator's cache: a run that was planned at
    # 75 of 79 GiB ran out of memory while 9 GiB were free in pieces that were too small. torch reads the variable when
    # it first allocates GPU memory.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's options that prints an error as one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and how to list the options, and end the program with status 2."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists the options\n")
