"""The whole chain on a small scale: make a policy; start a study, kill it and continue it; analyse it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.study import state
from qerl_pl.study.readouts import pass_at_k
from qerl_pl.study.study_file import commands_of, read_study
from tests.integration.conftest import differences, load_last, scalars
from tests.program import Program

SETTINGS: dict[str, Any] = {
    "trainer": {"max_steps": 4, "val_check_interval": 2, "enable_checkpointing": True},
    "model": {
        "dtype": "float32",
        "engine": {"class_path": "qerl_pl.rollout.hf.TransformersEngine"},
        "rewards": [{"name": "accuracy", "weight": 1.0, "reward": "tests.integration.toy.low_tokens"}],
        "sampling": {"num_completions": 4, "max_tokens": 10},
        "lora": {"rank": 4, "alpha": 8},
        "warmup_steps": 1,
    },
    "data": {"source": {"init_args": {"operations": [2, 3], "num_train": 40, "num_validation": 6}}, "batch_size": 4},
}
NOISE = {
    "trainer": {
        "callbacks+": [
            {
                "class_path": "callbacks.aqn.AdaptiveQuantizationNoise",
                "init_args": {"sigma_start": 0.1, "sigma_end": 0.01, "num_stages": 3},
            }
        ]
    }
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_policy_is_made_and_a_killed_study_of_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    base = tmp_path / "policy"
    small = "--size toy --steps 3 --batch-size 2 --operations 2 2 --measure-problems 1 --reach-problems 1 --samples 1"
    assert command(["pretrain", "--output", str(base), *small.split(), "--device", "cpu", "--workers", "0"]) == 0

    path, arguments = tmp_path / "study.yaml", ["study", str(tmp_path / "study.yaml"), "--output"]
    content: dict[str, Any] = {
        "config": ["configs/word_problems.yaml"],
        "settings": SETTINGS | {"model": SETTINGS["model"] | {"base": str(base)}},
        "arms": {"plain": {}, "aqn": NOISE},
        "seeds": [0, 1],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    killed = read_study(path, tmp_path / "killed")
    process = Program([*arguments, str(killed.output), "--jobs", "2"], script="qerl_pl")
    first = killed.runs()[0].folder / "completions"
    while len(list(first.glob("train-*.jsonl"))) < 2:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9
    assert command([*arguments, str(killed.output), "--jobs", "2"]) == 0
    assert all(state.is_finished(killed, run) for run in killed.runs())

    evaluations = {"reach": {"model": {"val_sampling": {"num_completions": 2, "max_tokens": 8}}}}
    straight = replace(killed, output=tmp_path / "straight", evaluations=evaluations)
    for one, other in zip(straight.runs()[:2], killed.runs()[:2], strict=True):
        state.write_files(straight, one)
        for part in commands_of(straight, one)[: 2 if one.arm == "aqn" else 1]:
            process = Program(part.arguments)
            output, _ = process.communicate()
            assert process.returncode == 0, output
        left, right = load_last(one.folder), load_last(other.folder)
        assert left["global_step"] == right["global_step"] == 4
        assert differences(left["state_dict"], right["state_dict"]) == []
        assert differences(scalars(one.folder), scalars(other.folder)) == []
    assert set(pass_at_k(straight.runs()[1], "reach")) == {1, 2}

    assert command([*arguments, str(killed.output), "--analyse"]) == 0
    text = (killed.output / "analysis" / "analysis.md").read_text()
    assert "4 of 4 runs are finished" in text
    for readout in ("area under reward", "entropy at equal reward", "gap", "seconds per step"):
        assert f"| {readout} |" in text
