"""On a machine without a loopback interface, vLLM's start fails at once and says so."""

import subprocess
import sys

import pytest

from qerl_pl.rollout.vllm.setup import LOOPBACK_S

CHECK = """
import sys, time
from qerl_pl.rollout.vllm.setup import check_loopback
start = time.perf_counter()
try:
    check_loopback()
except OSError as error:
    print(time.perf_counter() - start)
    sys.exit(str(error))
"""


def without_network(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["unshare", "-n", *command], capture_output=True, text=True)


def test_a_machine_without_one_is_told_so_at_once():
    try:
        possible = without_network("true").returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this user cannot make a network namespace")
    found = without_network(sys.executable, "-c", CHECK)
    assert "cannot connect to itself at 127.0.0.1" in found.stderr
    assert "ip link set lo up" in found.stderr
    assert found.stderr.count("\n") == 1
    assert float(found.stdout) < LOOPBACK_S + 1
