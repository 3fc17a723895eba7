"""Start commands with bad input: python -m tests.integration.bad_inputs [--number 300] [--first 0].

Every case of ``bad_cases`` calls a command in which one thing is wrong. The command runs in a fork of this process, so
that packages are imported only once, and so that the case can change the environment, privileges and limits of its
process. Each case prints one JSON line with its outcome: ``refused`` (the program ended with a message of at most ten
lines), ``ran`` (it did not fail), ``raw`` (an exception without a message for users, or a crash), ``long`` (a longer
message), ``late`` (refused after a rollout), ``slow`` (refused after more than 10 s of CPU time) or ``timeout``. Every
outcome but ``refused`` is a fault of the program, and if there is one, the exit status is 1.
"""

import argparse
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from qerl_pl.__main__ import COMMANDS
from qerl_pl.__main__ import main as command
from tests.integration.bad_cases import CASES, Bases, Case
from tests.support import drop_privileges

SECONDS = 60
MOST_CPU = 10.0
MOST_LINES = 10


def outcome(case: Case, arguments: list[str]) -> tuple[str, str, float]:
    """Run the program with the command line of a case, in a fork of this process.

    Returns:
        The outcome, such as "refused" (the module's docstring lists all); the program's message; and its CPU time in
        seconds.
    """
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(reading)
            called = _called(case, arguments)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(called, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    killer = threading.Timer(SECONDS, os.kill, (child, 9))
    killer.start()
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status, used = os.wait4(child, 0)
    in_time = killer.is_alive()
    killer.cancel()
    seconds = used.ru_utime + used.ru_stime
    if not content:
        return ("raw", f"the process ended with status {status}", seconds) if in_time else ("timeout", "", seconds)
    word, said = pickle.loads(content)
    return ("slow" if word == "refused" and seconds > MOST_CPU else word), said, seconds


def _called(case: Case, arguments: list[str]) -> tuple[str, str]:
    said = io.StringIO()
    torch.set_num_threads(1)  # the threads of this process are not in its fork
    os.environ.update(case.environment)
    sys.argv = ["qerl_pl", *arguments]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):  # which loggers have, even where sys.stderr is replaced
            os.dup2(nowhere.fileno(), stream)
    if case.unprivileged:
        drop_privileges()
    if case.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_bytes, case.file_bytes))
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()), open(os.devnull) as sys.stdin:
            status = command(arguments)
    except SystemExit as stop:
        status = stop.code
        if isinstance(status, str):
            said.write(status)
    except BaseException as error:
        return "raw", f"{type(error).__name__}: {error}\n{''.join(traceback.format_exc()[-3000:])}"
    text = "".join(line for line in said.getvalue().splitlines(True) if not line.startswith("qerl "))
    if not status:
        return "ran", text
    return ("raw" if "Traceback" in text else "long" if text.count("\n") > MOST_LINES else "refused"), text


def try_cases(numbers: range, bases: Bases, folder: Path) -> list[dict[str, object]]:
    """Return a record for each of the cases with these numbers."""
    records = []
    for number in numbers:
        case, place = CASES[number % len(CASES)], folder / str(number)
        place.mkdir()
        place.chmod(0o777)
        arguments = case.arguments(bases, place)
        before = {*place.glob("*/completions/*")}
        word, said, seconds = outcome(case, arguments)
        if word == "refused" and case.file_bytes is None and {*place.glob("*/completions/*")} - before:
            word = "late"
        said = said.replace(str(place), "CASE").replace(str(bases.folder), "BASES").replace(f"{Path.cwd()}/", "")
        kept = said if word in ("raw", "long") else said[-400:]
        records.append({"case": case.name, "outcome": word, "cpu_s": round(seconds, 1), "said": kept})
        shutil.rmtree(place)
    return records


def main() -> int:
    """Print a line per case, and the number of cases with each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for name in (*(f"qerl_pl.tools.{name}" for name in COMMANDS), "qerl_pl.cli.training", "datamodules.table"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        bases = Bases(folder / "bases")
        bases.folder.mkdir()
        with redirect_stdout(sys.stderr):
            _ = bases.run, bases.nvfp4  # which import all that cases need
        counts: Counter[object] = Counter()
        for number in range(options.first, options.first + options.number):
            with redirect_stdout(sys.stderr):
                [record] = try_cases(range(number, number + 1), bases, folder)
            counts[record["outcome"]] += 1
            print(json.dumps(record), flush=True)
    print(json.dumps(counts))
    return int(set(counts) != {"refused"})


if __name__ == "__main__":
    sys.exit(main())
