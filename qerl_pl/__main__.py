"""python -m qerl_pl COMMAND: the commands beside training."""

from __future__ import annotations

import importlib
import sys

from qerl_pl.os_errors import in_words

COMMANDS = {
    "tiny": "make a small warm-started policy for the quickstart and for tests",
    "quantize": "write a 4-bit copy of a checkpoint",
    "plan": "say how much GPU memory a run will take, and what to change if it does not fit",
    "score": "score a file of completions with a reward",
    "export": "write a run's adapter as a PEFT folder",
    "report": "table and curves of a run from its event files",
    "doctor": "say what this machine can run, and why not",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: python -m qerl_pl COMMAND [--help]\n\ncommands:")
        print("\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items()))
        print("\nTraining and evaluation: python train.py --help")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"unknown command {argv[0]!r}; expected one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # Imported on demand: `doctor` has to run where half of the packages are missing.
    try:
        return importlib.import_module(f"qerl_pl.tools.{argv[0]}").main(argv[1:])
    except OSError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
