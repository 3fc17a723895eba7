"""Entry point of all commands: ``qerl COMMAND``, or ``python -m qerl_pl COMMAND`` without installation."""

import importlib
import os
import signal
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from qerl_pl.common.files import in_words
from qerl_pl.common.phases import phase
from qerl_pl.common.program import (
    SIGNALS,
    Stopped,
    called_as,
    discard_output,
    end_at_once,
    end_by_signals,
    ended_at_once,
    kept_for_good,
    open_streams,
    quoted_from_environment,
    use_expandable_segments,
)

TRAINING = {
    "fit": "train a policy",
    "validate": "evaluate a policy on the validation problems",
    "test": "evaluate a policy, with intervals over problems",
    "predict": "write completions of a policy",
}
COMMANDS = {
    "init": "write a small configuration, a reward and problems of your own, to start from",
    "tiny": "make a small fine-tuned policy for the quickstart and for tests",
    "quantize": "write a 4-bit copy of a checkpoint",
    "study": "train several configurations with several seeds each, and compare them",
    "plan": "predict the GPU memory of a run, and what to change if it does not fit",
    "score": "score a file of completions with a reward",
    "export": "write a run's adapter as a PEFT folder, or base and adapter as one model",
    "report": "print a table of a run's results, draw its curves, write a page about it",
    "chat": "talk to the policy of a run and to its base model",
    "doctor": "check what this machine can run, and with -c whether a configuration can run on it",
}
QUICK = ("init",)
"""Commands that import nothing that takes seconds."""
MEANT = {"train": "fit", "eval": "test", "evaluate": "test", "generate": "predict", "new": "init"}
"""Maps names that other programs have for a command, such as ``train``, to this program's name for it, which the error
message for an unknown command suggests."""
CONFIGURATIONS = {"tasks": "tasks", "models": "models", "arms": "arms", "eval": "eval", ".": "alone"}
"""Maps each folder of configuration files in this package to the title under which ``--help`` lists its files."""


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status, which is 128 plus the number of the
    signal that ended it, e.g. 130 after Ctrl-C. If a command of ``COMMANDS`` raises ValueError, its message is printed,
    and the status is 2.

    Args:
        argv: the words of the command line after the program's name; None: those of this process (``sys.argv[1:]``); in
            this case, Ctrl-C, SIGTERM and SIGUSR1 end the process.
    """
    if argv is None:
        open_streams()
        end_by_signals()
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            if argv is None:
                sys.stdout.flush()
    except (KeyboardInterrupt, Stopped) as stop:
        status = int(stop.code or 0) if isinstance(stop, Stopped) else 128 + signal.SIGINT
        print(f"\nstopped by {SIGNALS[signal.Signals(status - 128)]}", file=sys.stderr)
        return status
    except OSError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        if argv is None:
            discard_output()
        return 1
    finally:
        if argv is None:
            end_at_once()


def _run(argv: list[str]) -> int:
    commands = TRAINING | COMMANDS
    if argv and argv[0] in ("--version", "-V", "version"):
        print(importlib.import_module("qerl_pl.tools.doctor").versions())
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, commands))
        print("usage: qerl COMMAND [--help], qerl --version, or python -m qerl_pl COMMAND\n\ncommands:")
        print("\n".join(f"  {name:{width}}  {text}" for name, text in commands.items()))
        print("\nTraining and evaluation take -c TASK -c MODEL -c ARM, files or names of shipped configurations:")
        folder = Path(__file__).parents[1] / "configs"
        for place, what in CONFIGURATIONS.items():
            names = sorted(path.stem for path in (folder / place).glob("*.yaml") if path.stem != "base")
            print(f"  {what:{width}}  {', '.join(names)}")
        return 0 if argv else 2
    if argv[0] not in commands:
        near = get_close_matches(argv[0], [*commands, *MEANT], n=1, cutoff=0.75)
        hint = f"did you mean {MEANT.get(near[0], near[0])}? (there are: " if near else "expected one of ("
        print(f"error: unknown command {argv[0]!r}; {hint}{', '.join(commands)})", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        # Add the current folder to the import path, so that the user's own reward and callback modules there can be
        # imported.
        sys.path.append(str(Path.cwd()))
    use_expandable_segments()
    # Progress bars of libraries would fill a log file. tqdm reads TQDM_DISABLE when it is imported.
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    # A command's module is imported only when the command is called, because `doctor` has to run on machines where
    # packages are missing. Options and configuration files are checked before that import, which takes seconds, so that
    # a user sees a mistake in them at once.
    if argv[0] in (parsers := importlib.import_module("qerl_pl.tools.options").PARSERS):
        parser = parsers[argv[0]]()
        (parser.parse_known_args if argv[0] == "plan" else parser.parse_args)(argv[1:])  # `plan` takes those of `fit`
    if argv[0] in (*TRAINING, "plan"):
        fault = importlib.import_module("qerl_pl.cli.yaml_files").fault_in_files(argv)
        if fault is not None:
            print(f"error: {fault}", file=sys.stderr)
            return 1
    if argv[0] in TRAINING:
        status = _imported("qerl_pl.cli.training", argv[0]).exit_status(argv)
        if isinstance(status, str):
            print(status, file=sys.stderr)
            return 1
        return status
    try:
        return _imported(f"qerl_pl.tools.{argv[0]}", argv[0]).main(argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _imported(module: str, command: str) -> ModuleType:
    """Import the module of a command. If that takes seconds, a line on stderr says so in the meantime.

    Packages read environment variables when they are imported, and raise ValueError for a value that they cannot read.
    The program then exits with a message that names the variable.
    """
    if module in sys.modules:
        return sys.modules[module]
    with (
        ended_at_once(),
        kept_for_good(),
        phase(f"{called_as(command)}: loading packages", at_once=command not in QUICK and "torch" not in sys.modules),
    ):
        try:
            return importlib.import_module(module)
        except ValueError as error:
            sys.exit(f"error: a package cannot be loaded: {str(error)[:300]}{quoted_from_environment(error)}")


if __name__ == "__main__":
    sys.exit(main())
