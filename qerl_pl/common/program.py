"""Find out, for messages, whether the user calls this program as ``qerl`` or as ``python -m qerl_pl``."""

from __future__ import annotations

import sys
from pathlib import Path


def called_as(command: str) -> str:
    """Return how to call a command of this program: ``qerl COMMAND`` if the user started the program as ``qerl``, and
    ``python -m qerl_pl COMMAND`` otherwise."""
    return f"qerl {command}" if Path(sys.argv[0]).name == "qerl" else f"python -m qerl_pl {command}"
