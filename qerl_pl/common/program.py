"""Name of the program as its user called it."""

from __future__ import annotations

import sys
from pathlib import Path


def called_as(command: str) -> str:
    """Return how a command was called: ``qerl COMMAND`` where it is installed, or ``python -m qerl_pl COMMAND``."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"
