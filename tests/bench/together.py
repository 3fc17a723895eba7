"""Start several benchmarks together, and let them measure in turn: python -m tests.bench.together 'A ...' 'B ...'

An engine takes minutes to start, most of it on the host, and seconds to measure. Each argument is a module of
tests/bench and its arguments; variables of its environment may stand before it, as in a shell. When every program is
ready to measure, or has ended, the programs take turns, so none is measured while another one computes. The programs
that wait keep their GPU memory, so all of them have to fit into it together.
"""

import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback

from tests.bench.harness import child_environment, parser_with

VARIABLE = "BENCH_TOGETHER"


def is_together() -> bool:
    """Return whether ``run_together`` has started this program, so that it shares the GPU with others."""
    return VARIABLE in os.environ


@contextmanager
def turn() -> Iterator[None]:
    """Wait until all programs of ``run_together`` are ready to measure and no other one is measuring; the context is
    this program's turn. A program that was started alone does not wait."""
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
    """Makes a training run wait for its turn once the engines of all ranks have started; the turn lasts until the end
    of training."""

    def __init__(self) -> None:
        self._turn = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, _batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            pl_module.start_engine()
            trainer.strategy.barrier()
            if trainer.is_global_zero:
                self._turn.enter_context(turn())
            trainer.strategy.barrier()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._turn.close()


def program(command: str) -> tuple[list[str], dict[str, str]]:
    """Parse ``NAME=value ... module arguments``; returns the command line that runs this module of tests/bench, and the
    environment variables."""
    words = shlex.split(command)
    named = list(takewhile(lambda word: "=" in word, words))
    line = [sys.executable, "-m", f"tests.bench.{words[len(named)]}", *words[len(named) + 1 :]]
    return line, dict(word.split("=", 1) for word in named)


def run_together(
    programs: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], *, stdout: TextIO | None = None
) -> None:
    """Start all programs, let them measure once all are ready, and wait for their end; if one failed, exit with a
    message that names it.

    Args:
        programs: name -> command line, and environment variables in addition to the present ones.
        stdout: stream for what the programs print; None: this process's own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = child_environment() | {VARIABLE: name}
        started = {
            key: subprocess.Popen(line, env={**environment, **variables}, stdout=stdout)
            for key, (line, variables) in programs.items()
        }
        while any(process.poll() is None for process in started.values()):
            ended = sum(process.poll() is not None for process in started.values())
            if len(list(folder.glob("ready-*"))) + ended >= len(started):
                (folder / "go").touch()
            time.sleep(0.1)
    failed = [key for key, process in started.items() if process.returncode]
    if failed:
        raise SystemExit(f"failed: {failed}")


def main(argv: list[str] | None = None) -> None:
    """Run the commands."""
    parser = parser_with(__doc__)
    parser.add_argument("commands", nargs="+", metavar="'bench_rollout --sizes 7B'")
    run_together({command: program(command) for command in parser.parse_args(argv).commands})


if __name__ == "__main__":
    main()
