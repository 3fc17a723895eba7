"""Execute the commands of a study's run one after another in one process, so that packages are imported only once.

``python -m qerl_pl.study.process FOLDER COMMANDS``: the run's folder, and the commands as a JSON list of pairs of name
and arguments. The exit status is that of the first command that failed, else 0.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.__main__ import main as program
from qerl_pl.study import state
from qerl_pl.study.study_file import Command


def words_of(folder: Path, commands: Sequence[Command]) -> list[str]:
    """Make the command line of the process that executes a run's commands, as a list of words."""
    return [sys.executable, "-m", __name__, str(folder), json.dumps(commands)]


def main(argv: Sequence[str]) -> int:
    """Execute the commands, and write the output of each command to its own log file; returns the exit status."""
    folder = Path(argv[0])
    began = time.monotonic()
    for name, arguments in json.loads(argv[1]):
        sys.stdout.flush()
        sys.stderr.flush()
        log = state.log_of(folder, name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            for stream in (1, 2):  # file descriptors, so that output of libraries written in C goes to the log too
                os.dup2(file.fileno(), stream)
        if status := program(arguments):
            return status
        state.succeeded(folder, name, time.monotonic() - began)
        began = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
