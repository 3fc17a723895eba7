"""Execute the commands of one run of a study in one process, so that packages are imported only once.

Usage: ``python -m qerl_pl.study.process FOLDER COMMANDS``. FOLDER is the run's folder. COMMANDS is a JSON list of pairs
[NAME, ARGUMENTS]: the command's name within the study, such as "fit", and its list of command-line arguments. Commands
are executed in order. If one fails, the process ends with its exit status, and the commands after it are not executed;
``study.runner`` then starts a new process with the commands that have not succeeded.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.__main__ import main as program
from qerl_pl.common.program import end_by_signals
from qerl_pl.study import state
from qerl_pl.study.study_file import Command


def words_of(folder: Path, commands: Sequence[Command]) -> list[str]:
    """Return the command line, as a list of words, that starts a process which executes the commands of a run."""
    return [sys.executable, "-m", __name__, str(folder), json.dumps(commands)]


def main(argv: Sequence[str]) -> int:
    """Execute the commands of a run of a study (training and evaluations) in order, until one fails; returns the exit
    status of that one, or 0 if all succeed. Each command writes its output to its own log file."""
    folder = Path(argv[0])
    began = time.monotonic()
    for name, arguments in json.loads(argv[1]):
        sys.stdout.flush()
        sys.stderr.flush()
        log = state.log_of(folder, name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            for stream in (1, 2):  # as file descriptors, so that the output of libraries written in C is logged, too
                os.dup2(file.fileno(), stream)
        if status := program(arguments):
            return status
        state.succeeded(folder, name, time.monotonic() - began)
        began = time.monotonic()
    return 0


if __name__ == "__main__":
    end_by_signals()
    sys.exit(main(sys.argv[1:]))
