"""A study does all commands of a run (training and evaluations) in one process. The results are the same as in separate
processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl_pl.study import process, state
from qerl_pl.study.study_file import Command
from tests.integration.conftest import SHORT, UNCHECKED
from tests.program import ROOT, Program

TOY = ["-c", "tests/integration/toy.yaml", *UNCHECKED, *SHORT]


def commands(base: str, folder: Path, *more: str) -> list[Command]:
    """Make the commands for a training and for two evaluations of its policy."""
    common = [*TOY, "--model.base", base, *more]
    found = [Command("fit", ["fit", *common, "--run_dir", str(folder), "--ckpt_path", "last"])]
    for name, num, max_tokens in (("many", 3, 4), ("long", 1, 40)):
        sampling = json.dumps({"num_completions": num, "max_tokens": max_tokens, "temperature": 1.0})
        words = [*common, "--model.val_sampling", sampling, "--run_dir", str(folder / "evaluations" / name)]
        found.append(Command(name, ["test", *words, "--ckpt_path", str(folder / "checkpoints" / "last.ckpt")]))
    return found


def execute(words: list[str]) -> int:
    """Run the command line ``python -m MODULE ARGUMENTS`` in a fork of a process that has already done the imports,
    which saves time. Returns the exit status."""
    assert words[:2] == [sys.executable, "-m"]
    return Program(words[3:], script=words[2]).wait()


def result(folder: Path, name: str) -> dict[str, Any]:
    """Read the results of an evaluation."""
    (path,) = (folder / "evaluations" / name).rglob("test.json")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "qerl_pl.rollout.hf.TransformersEngine",
        pytest.param("qerl_pl.rollout.vllm.VLLMEngine", marks=[pytest.mark.long, pytest.mark.vllm]),
    ],
)
def test_an_evaluation_after_a_training_equals_one_in_a_process_of_its_own(base, tmp_path, engine):
    together = commands(base, tmp_path, "--model.engine", engine)
    assert execute(process.words_of(tmp_path, together)) == 0
    done = json.loads((tmp_path / state.STATE).read_text())["done"]
    assert list(done) == ["fit", "many", "long"]
    assert all(seconds > 0 for seconds in done.values())

    apart = tmp_path / "apart"
    words = [str(apart / "evaluations") if "evaluations" in word else word for word in together[1].arguments]
    assert execute(process.words_of(apart, [Command("many", words)])) == 0
    assert result(tmp_path, "many") == result(apart, "")


@pytest.mark.gpu
@pytest.mark.vllm
def test_on_a_gpu_each_command_plans_the_memory_of_an_engine_of_its_own(base, tmp_path):
    more = ("--model.engine", "qerl_pl.rollout.vllm.VLLMEngine", "--model.dtype", "bfloat16")
    together = commands(base, tmp_path, *more)
    # not by ``execute``: no fork can use CUDA once the process that it comes from has
    words = process.words_of(tmp_path, together)
    assert subprocess.run(words, cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode == 0
    assert all("memory plan: " in state.log_of(tmp_path, name).read_text() for name, _ in together)


def test_a_command_that_fails_ends_the_process_and_is_not_recorded(base, tmp_path):
    fit, *_ = commands(base, tmp_path)
    wrong = Command("reach", ["test", *TOY, "--model.base", str(tmp_path / "nowhere")])
    assert execute(process.words_of(tmp_path, [wrong, fit])) == 1
    assert "nowhere" in state.log_of(tmp_path, "reach").read_text()
    assert not (tmp_path / state.STATE).exists()
    assert not (tmp_path / "checkpoints").exists()
