"""A trainer that holds much memory gets the same verdicts as one that holds little."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
held = bytearray(b"1") * (1200 * 2**20)  # resident: more than a worker may use itself
from qerl_pl.rewards.math import MathAnswer
from qerl_pl.common.types import Completion, Prompt
completion = Completion((1,), (0.0,), True, text=r"<answer>\\frac{2}{4}</answer>")
reward = MathAnswer()
print("SCORE", reward([Prompt((1,), r"\\frac{1}{2}")], [completion]))
"""


@pytest.mark.slow
def test_memory_of_the_parent_is_not_held_against_a_row():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert "SCORE [1.0]" in done.stdout
