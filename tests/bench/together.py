"""Benchmarks that start together and measure one after the other: python -m tests.bench.together 'A ...' 'B ...'

An engine takes minutes to start, most of it on the host, and seconds to measure. Each argument is a module of
tests/bench and its arguments, with variables of its environment before it as in a shell. Where all programs have come
to what they measure, or have ended, they take turns, so none is measured beside another that works; but they hold their
memory meanwhile, and all of it has to fit.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tests.bench.harness import child_environment

VARIABLE = "BENCH_TOGETHER"


def is_together() -> bool:
    """Whether other programs hold memory of the GPU while this one is measured."""
    return VARIABLE in os.environ


@contextmanager
def turn() -> Iterator[None]:
    """Wait until all programs are ready and no other has its turn; a program that was started alone waits for none."""
    if not is_together():
        yield
        return
    folder = Path(os.environ[VARIABLE])
    (folder / f"ready-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Turn(Callback):
    """A training run is ready with its engine, and its turn lasts to its end."""

    def __init__(self) -> None:
        self._turn = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            pl_module._start_engine()
            self._turn.enter_context(turn())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._turn.close()


def start(command: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start ``NAME=value ... module arguments``."""
    words = shlex.split(command)
    named = list(takewhile(lambda word: "=" in word, words))
    module, *arguments = words[len(named) :]
    more = dict(word.split("=", 1) for word in named)
    return subprocess.Popen([sys.executable, "-m", f"tests.bench.{module}", *arguments], env={**environment, **more})


def main(argv: list[str] | None = None) -> None:
    """Start all, let them go when they are ready, wait for them.

    Raises:
        SystemExit: names those that failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", metavar="'bench_rollout --sizes 7B'")
    commands = parser.parse_args(argv).commands
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = child_environment() | {VARIABLE: name}
        programs = {command: start(command, environment) for command in commands}
        while any(program.poll() is None for program in programs.values()):
            ended = sum(program.poll() is not None for program in programs.values())
            if len(list(folder.glob("ready-*"))) + ended >= len(programs):
                (folder / "go").touch()
            time.sleep(0.1)
    failed = [command for command, program in programs.items() if program.returncode]
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
