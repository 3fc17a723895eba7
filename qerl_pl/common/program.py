"""The parser of commands' options, and the way in which the user calls this program, for messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def called_as(command: str) -> str:
    """Return how to call a command of this program: ``qerl COMMAND`` if the user started the program as ``qerl``, and
    ``python -m qerl_pl COMMAND`` otherwise."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's options that prints an error as one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and how to list the options, and end the program with status 2."""
        self.exit(2, f"error: {message}; `{self.prog} --help` lists the options\n")
