"""Idle OpenMP threads of the program go to sleep after a short time instead of spinning, so that other processes can
use the cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# If an earlier test has used vLLM, LD_PRELOAD names libgomp, which would read its variables before qerl_pl is imported.
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LD_PRELOAD")


@pytest.mark.parametrize(
    ("given", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")]
)
def test_threads_soon_sleep_unless_the_user_wants_otherwise(given, found):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    environment["OMP_DISPLAY_ENV"] = "verbose"
    packages = Path(torch.__file__).parents[1]
    libraries = [*packages.glob("torch/lib/libgomp*"), *packages.glob("torch.libs/libgomp*")]
    if not libraries:
        pytest.skip("torch does not use GNU OpenMP here")
    code = f"import qerl_pl, ctypes; ctypes.CDLL({str(libraries[0])!r})"  # the library that importing torch loads
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{found}'" in said
