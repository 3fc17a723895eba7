"""The command line by which this program's commands are called, for messages."""

from __future__ import annotations

import sys
from pathlib import Path


def called_as(command: str) -> str:
    """Return how to call a command of this program: ``qerl COMMAND`` if the user started the program as ``qerl``, and
    ``python -m qerl_pl COMMAND`` otherwise."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"
