"""MPS is used where it can be, and a study runs without it elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_pl.study.gpu_sharing import CONTROL, PIPES, gpus_shared

# records its arguments and input; no service answers, but one can be started
PROGRAM = """#!/bin/sh
said=$(if [ $# = 0 ]; then cat; fi)
echo "$* $said $CUDA_MPS_PIPE_DIRECTORY" >> {log}
[ "$said" != get_server_list ]
"""


def test_without_the_program_runs_take_turns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpus_shared() as variables:
        assert variables == {}
    assert f"{CONTROL} was not found" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which(CONTROL) is not None, reason="without a GPU's driver alone, no context can be made")
def test_a_service_in_which_no_process_can_use_the_gpu_is_ended_and_not_used(tmp_path, monkeypatch, capsys):
    program, log = tmp_path / CONTROL, tmp_path / "log"
    program.write_text(PROGRAM.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    with gpus_shared() as variables:
        assert variables == {}
    asked, started, ended = [line.split() for line in log.read_text().splitlines()]
    assert asked == ["get_server_list"]
    assert started[0] == "-d"
    assert ended == ["quit", started[1]]
    assert not Path(started[1]).exists()
    assert "runs that share a GPU take turns" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"needs {CONTROL}")
def test_processes_compute_with_the_service_which_then_ends():
    code = "import torch; print(torch.ones(8, 8, device='cuda').sum().item())"
    with gpus_shared() as variables:
        assert variables
        environment = {**os.environ, **variables}
        done = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) for _ in "ab"]
        assert [process.communicate()[0].strip() for process in done] == [b"64.0"] * 2
        servers = subprocess.run([CONTROL], input="get_server_list\n", text=True, env=environment, capture_output=True)
        assert servers.returncode == 0
    gone = subprocess.run([CONTROL], input="get_server_list\n", text=True, env=environment, capture_output=True)
    assert gone.returncode != 0
