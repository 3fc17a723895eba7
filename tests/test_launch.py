"""The job script for SLURM, with commands in place of SLURM's that record how they are called."""

import os
import signal
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "launch" / "slurm.sh"
COMMANDS = {
    "srun": 'trap "exit 138" USR1; echo srun "$@" >> called; if [ -e last ]; then exit 0; fi\n'
    "for _ in $(seq 100); do sleep 0.1; done; exit 1",
    "scontrol": 'echo scontrol "$@" >> called',
}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}


def start(folder):
    """Start the job script in a folder with the commands, and wait until it has called srun."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for name, lines in COMMANDS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{lines}\n")
        path.chmod(0o755)
    (folder / "called").unlink(missing_ok=True)
    environment = os.environ | JOB | {"PATH": f"{folder}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", str(SCRIPT), "-c", "mine.yaml"], cwd=folder, env=environment)
    while not (folder / "called").exists():
        time.sleep(0.02)
    return job


def test_before_its_time_limit_a_job_ends_its_run_and_is_queued_again(tmp_path):
    job = start(tmp_path)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    run, queued = (tmp_path / "called").read_text().splitlines()
    assert run.endswith("train.py fit -c mine.yaml --ckpt_path last --trainer.num_nodes 2 --trainer.devices 8")
    assert queued == "scontrol requeue 4711"

    (tmp_path / "last").touch()  # this run ends by itself
    assert start(tmp_path).wait(20) == 0
    assert len((tmp_path / "called").read_text().splitlines()) == 1
