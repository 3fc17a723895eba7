"""Execute the commands of a study's run one after another in one process, so that its imports are done once.

``python -m qerl_pl.study.process FOLDER COMMANDS``: the run's folder, and the commands as a JSON list of pairs of name
and arguments. The output of each goes to its log. The run's state says which commands have succeeded, and how long they
took. The exit status is that of the first command that failed, else 0.
"""

from __future__ import annotations

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
    """Make the words of the command line that executes a run's commands."""
    return [sys.executable, "-m", __name__, str(folder), json.dumps(commands)]


def main(argv: Sequence[str]) -> int:
    """Execute the commands; returns the exit status."""
    folder, commands = Path(argv[0]), [Command(*each) for each in json.loads(argv[1])]
    began = time.monotonic()
    for command in commands:
        _write_to(state.log_of(folder, command.name))
        status = program(command.arguments)
        if status:
            return status
        state.succeeded(folder, command.name, time.monotonic() - began)
        began = time.monotonic()
    return 0


def _write_to(log: Path) -> None:
    """Append all output of this process to a file from now on, also that of libraries written in C."""
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
