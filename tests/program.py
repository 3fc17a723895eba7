"""Starts the program in new processes for tests. They are forked from a server process that has already done the
imports, which take ten seconds."""

import faulthandler
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, util
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NoReturn
from unittest.mock import patch

ROOT = Path(__file__).parent.parent


def fork_server() -> None:
    """Start the server process as a fork of this process, which has done the imports. Without this call,
    ``multiprocessing`` starts it as a new process when it is first needed, and it does the imports again."""

    def start(_python: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
        return os.fork() or _serve(arguments[-1], {0, 1, 2, *kept})

    with patch.object(util, "spawnv_passfds", start):
        forkserver.ensure_running()


def _serve(code: str, kept: set[int]) -> NoReturn:
    """Run the code of the fork server of ``multiprocessing`` in this process, a fork of the process of the tests. Close
    all files but those with the numbers ``kept``, and log nothing to pytest's handlers."""
    try:
        faulthandler.disable()
        for logger in map(logging.getLogger, (None, *logging.root.manager.loggerDict)):
            for handler in list(logger.handlers):
                if _is_of_pytest(handler):
                    handler.close()
                    logger.removeHandler(handler)
                elif isinstance(handler, logging.StreamHandler) and _is_of_pytest(handler.stream):
                    handler.setStream(sys.stderr)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                with suppress(OSError):
                    os.close(number)
        exec(code, {})
    finally:
        os._exit(0)


def _is_of_pytest(thing: object) -> bool:
    return type(thing).__module__.startswith("_pytest")


class Program:
    """Runs ``python train.py ARGUMENTS`` in a process that starts when this object is made. The methods are those of
    ``subprocess.Popen``.

    Args:
        arguments: words of the command line.
        environment: all variables of the process; None: those of this process.
        before: function that the process calls first.
        script: "train.py", or "qerl_pl" for the other commands.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
        script: str = "train.py",
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.imports"])
        with NamedTemporaryFile(prefix="program-", suffix=".log", delete=False) as output:
            self._output = Path(output.name)
        variables = dict(os.environ if environment is None else environment)
        self._process = context.Process(target=_run, args=(script, arguments, variables, before, str(self._output)))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Exit status of the process; if a signal killed it, minus the signal's number; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See ``returncode``."""
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until the process has ended; returns the exit status."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def communicate(self) -> tuple[str, None]:
        """Wait until the process has ended; returns what the process and its children wrote to stdout and stderr."""
        self.wait()
        text = self._output.read_text(errors="replace")
        self._output.unlink()
        return text, None


def _run(
    script: str, arguments: list[str], variables: dict[str, str], before: Callable[[], None] | None, output: str
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    if before is not None:
        before()
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
