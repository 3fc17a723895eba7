"""The program's threads sleep while they wait for each other, so that a run can share its cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOWN = "import qerl_pl, os; import torch; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("given", "found"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_unless_the_user_wants_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    environment["OMP_DISPLAY_ENV"] = "verbose"
    done = subprocess.run([sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
    if "OMP_WAIT_POLICY" in done.stderr:  # OpenMP itself says what it took over
        assert f"OMP_WAIT_POLICY = '{found}'" in done.stderr
