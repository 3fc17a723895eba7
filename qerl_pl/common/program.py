"""Functions about the process: how it was called, signals that end it, streams, and the parser of commands' options."""

import argparse
import atexit
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
"""Signals that end the program, with their names in messages. Schedulers can send SIGUSR1 some time before a job's time
limit, as ``sbatch --signal=USR1@600`` does."""


def called_as(command: str) -> str:
    """Return how a user calls a command of this program, for messages, in the form that was used for this process:
    ``qerl COMMAND`` or ``python -m qerl_pl COMMAND``. If ``python`` would be another Python than that of this process,
    because its environment is not activated, its path is written instead, such as ``.venv/bin/python``."""
    if Path(sys.argv[0]).name == "qerl":
        return f"qerl {command}"
    used, found = Path(sys.executable), shutil.which("python")
    if found and Path(found).absolute().parent == used.parent:
        return f"python -m qerl_pl {command}"
    return f"{used.relative_to(Path.cwd()) if used.is_relative_to(Path.cwd()) else used} -m qerl_pl {command}"


class Stopped(SystemExit):
    """Exception by which a signal handler ends the program, with exit status 128 plus the signal's number;
    ``rewards.guard`` distinguishes it from a SystemExit that a reward function raises."""


class _Ending:
    at_once = False
    """Whether the next signal ends the process without cleaning up."""


def end_by_signals() -> None:
    """Let the ``SIGNALS`` end this process, unless it was started with them ignored. The first signal raises
    KeyboardInterrupt (Ctrl-C) or ``Stopped`` (others), so that temporary files are removed; the next one ends the
    process at once."""
    _Ending.at_once = False
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if _Ending.at_once:
        with suppress(OSError):
            os.write(2, f"\nstopped by {SIGNALS[signal.Signals(number)]}\n".encode())
        os._exit(128 + number)
    _Ending.at_once = True
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(128 + number)


def end_at_once() -> None:
    """Let the next signal end the process at once, because code that Python runs at its exit would print a
    traceback."""
    _Ending.at_once = True


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Let the ``SIGNALS`` end the process at once inside the context. Packages that are being imported would print a
    traceback of the exceptions of ``end_by_signals``, ignore them, or raise another error."""
    before, _Ending.at_once = _Ending.at_once, True
    try:
        yield
    finally:
        _Ending.at_once = before


def open_streams() -> None:
    """Open the null device in place of each closed standard stream, because a file that is opened later would get its
    descriptor, and libraries would write their messages into this file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # processes that this one starts need it, too
            setattr(sys, name, stream)


def discard_output() -> None:
    """Discard what could not be written to standard output; otherwise Python prints a traceback of it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def restored_arguments() -> Iterator[None]:
    """Restore ``sys.argv``, which ``cli.training.main`` replaces, at the end of the context."""
    arguments = list(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Turn off Python's garbage collection inside the context, in which commands import their packages, and exclude all
    objects that exist at its end from later collections. Importing torch, Lightning and transformers makes half a
    million objects; examining them would take a quarter of the imports' time, and half a second in each later
    collection."""
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
