"""Help and mistakes in options are answered before anything slow is imported."""

from __future__ import annotations

import subprocess
import sys

from qerl_pl.__main__ import COMMANDS
from qerl_pl.tools.options import PARSERS

PROGRAM = """
import sys
from qerl_pl.__main__ import main
for command in {commands}:
    for arguments in (["--help"], ["--no-such-option"]):
        try:
            main([command, *arguments])
            raise AssertionError(command)
        except SystemExit as stop:
            assert stop.code == (0 if arguments == ["--help"] else 2), (command, stop.code)
slow = {{"torch", "transformers", "lightning", "datasets", "vllm", "matplotlib"}} & sys.modules.keys()
assert not slow, slow
"""


def test_they_are_answered_without_slow_imports():
    assert PARSERS.keys() <= COMMANDS.keys()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=list(PARSERS))], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(PARSERS)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(PARSERS)
    assert all("--help` lists the options" in line for line in errors)
