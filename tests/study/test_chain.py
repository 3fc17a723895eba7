"""A study, here four runs of 2 arms with 2 seeds, that is killed and started again gives the same results, bit for bit,
as one that was not killed."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_pl.study import state
from qerl_pl.study.readouts import pass_at_k
from qerl_pl.study.study_file import Study, read_study
from qerl_pl.tools.tiny import make_tiny
from tests.integration.conftest import assert_same_run

SETTINGS: dict[str, Any] = {
    "trainer": {"max_steps": 6, "val_check_interval": 2, "enable_checkpointing": True},
    "model": {
        "dtype": "float32",
        "engine": {"class_path": "qerl_pl.rollout.hf.TransformersEngine"},
        "rewards": [{"name": "accuracy", "weight": 1.0, "reward": "tests.integration.toy.low_tokens"}],
        "sampling": {"num_completions": 4, "max_tokens": 10},
        "lora": {"rank": 4, "alpha": 8},
        "warmup_steps": 1,
    },
    "data": {
        "source": {
            "class_path": "datamodules.arithmetic.Arithmetic",
            "init_args": {"num_train": 40, "num_validation": 6},
        },
        "batch_size": 4,
    },
}
NOISE = {
    "class_path": "callbacks.aqn.AdaptiveQuantizationNoise",
    "init_args": {"sigma_start": 0.1, "sigma_end": 0.01, "num_stages": 3},
}


def kill_all(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and its children, with their process groups, as a power failure would: the process is stopped
    first, so that it cannot react to the end of its children. Returns the number of children."""
    os.kill(process.pid, signal.SIGSTOP)  # it starts no more children
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for group in (*map(int, children), process.pid):
        os.killpg(group, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return len(children)


def run(*arguments: str, killed_when: Callable[[], bool] | None = None) -> None:
    """Run a command of the program until it ends. With ``killed_when``, the command is a study that trains up to two
    runs at a time: as soon as ``killed_when`` returns True, the study and these runs are killed."""
    process = subprocess.Popen([sys.executable, "-m", "qerl_pl", *arguments], start_new_session=True)
    try:
        if killed_when is None:
            assert process.wait() == 0, arguments
            return
        while not killed_when():
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        assert kill_all(process) in (1, 2)  # on a busy machine, the other run may have finished
    finally:
        if process.poll() is None:
            kill_all(process)


def finished_study(folder: Path, *, killed: bool) -> Study:
    """Write a small model, do a study of training it, and analyse the study. With ``killed``, the study is killed while
    it trains the second seed, and then started again."""
    make_tiny(folder / "policy", sft_steps=0)
    content: dict[str, Any] = {
        "output": str(folder / "study"),
        "settings": SETTINGS | {"model": SETTINGS["model"] | {"base": str(folder / "policy")}},
        "arms": {"plain": {}, "aqn": {"trainer": {"callbacks+": [NOISE]}}},
        "seeds": [0, 1],
        "evaluations": {"reach": {"model": {"val_sampling": {"num_completions": 2, "max_tokens": 8}}}},
        "jobs": 2,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study = read_study(path)
    before: dict[Path, int] = {}
    if killed:
        first, *_, last = study.runs()
        run("study", str(path), killed_when=lambda: len([*last.folder.glob("completions/train-*.jsonl")]) >= 2)
        assert state.is_finished(study, first)
        assert not state.is_finished(study, last)
        before = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*") if file.is_file()}
    run("study", str(path))
    assert {file: file.stat().st_mtime_ns for file in before} == before, "a finished run is not touched"
    run("study", str(path), "--analyse")
    return study


def readouts_of(study: Study) -> list[dict[str, str]]:
    """Read the analysis's table of values per run, without the durations."""
    with (study.output / "analysis" / "readouts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_study_that_was_killed_equals_one_that_was_not_bit_for_bit(tmp_path: Path) -> None:
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    straight, killed = (finished_study(tmp_path / name, killed=name == "killed") for name in ("straight", "killed"))
    for one, other in zip(straight.runs(), killed.runs(), strict=True):
        assert state.is_finished(killed, other)
        assert_same_run(one.folder, other.folder)
        passed = pass_at_k(one, "reach")
        assert set(passed) == {1, 2}
        assert passed == pass_at_k(other, "reach")
    assert len(readouts_of(straight)) == 4
    assert readouts_of(straight) == readouts_of(killed)
    for study in (straight, killed):
        text = (study.output / "analysis" / "analysis.md").read_text()
        assert "4 of 4 runs are finished" in text
        for readout in ("area under reward", "entropy at equal reward", "gap", "reach: pass@2", "seconds per step"):
            assert f"| {readout} |" in text
