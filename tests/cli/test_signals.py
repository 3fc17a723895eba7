"""Ctrl-C, SIGTERM and SIGUSR1 end the program in one line, whenever they come."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, signal, sys
import qerl_pl.tools.init
from qerl_pl.__main__ import main

def send(*_, **__):
    signal.raise_signal({number})
    return []

def twice(*_, **__):
    try:
        send()
    finally:
        send()

class Finder:
    def find_spec(self, name, *_):
        if name == "qerl_pl.tools.init":
            try:
                send()
            except BaseException:
                raise RecursionError from None  # as numpy does

signal.signal({number}, {handler})  # tests may run in the background, where SIGINT is ignored
{when}
sys.exit(main())
"""
WHEN = {
    "in the import of a command": "del sys.modules['qerl_pl.tools.init']; sys.meta_path.insert(0, Finder())",
    "in a command": "qerl_pl.tools.init.write_files = send",
    "twice": "qerl_pl.tools.init.write_files = twice",
    "when the work is done": "atexit.register(send)",
}
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}


def ended(folder, number, when, handler):
    code = PROGRAM.format(number=int(number), when=WHEN[when], handler=handler)
    words = [sys.executable, "-c", code, "init", str(folder / "new")]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    return process.returncode, process.stderr


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("when", WHEN)
def test_a_signal_ends_the_program_in_one_line(tmp_path, when, number):
    status = (128 + number, f"\nstopped by {SIGNALS[number]}\n")
    assert ended(tmp_path, number, when, "signal.default_int_handler") == status


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tmp_path, number):
    assert ended(tmp_path, number, "in a command", "signal.SIG_IGN") == (0, "")
