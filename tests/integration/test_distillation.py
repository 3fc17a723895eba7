"""Whole runs whose loss has the divergence from a teacher: without rewards, with a decreasing coefficient of the
divergence, killed and resumed, and with bad settings."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.results.curves import read_curves
from qerl_pl.tools.tiny import make_tiny
from tests.integration.conftest import TOY, UNCHECKED, assert_same_run, launch

TAUGHT = ("--trainer.max_steps", "4", "--model.objective", "{preset: grpo, teacher: {divergence: reverse}}")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("teacher") / "other"
    make_tiny(folder, seed=1, sft_steps=0)
    return "--model.teacher", f"{{base: {folder}}}"


@pytest.mark.slow
def test_a_run_without_rewards_logs_none_and_its_coefficient_falls(run, teacher, tmp_path, capsys):
    falling = ("--model.objective.teacher.rollouts", "3", "--model.rewards", "[]")
    with pytest.warns(UserWarning, match="nothing trains the policy in the last 1 of 4 rollouts"):
        run("fit", tmp_path / "run", *TAUGHT, *UNCHECKED, *falling, *teacher)
    curves = read_curves(tmp_path / "run")
    assert not {"train/reward", "val/reward", "rollout/groups_with_signal"} & curves.keys()
    assert curves["teacher/kl"].steps == [0, 1, 2]
    assert (
        all(0 < value <= 1 for value in curves["teacher/divergence"].values)
        or min(curves["teacher/divergence"].values) > 0
    )
    assert curves["train/grad_norm"].values[3] == 0, "the teacher's term is gone after 3 rollouts"
    assert min(curves["train/grad_norm"].values[:3]) > 0
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    said = capsys.readouterr().out
    shown = [line for line in said.splitlines() if "KL to the teacher" in line]
    assert [line.partition(":")[0] for line in shown] == [f"rollout {number} of 4" for number in (1, 2, 3)]
    assert "the teacher alone trained the policy" in said


@pytest.mark.slow
def test_the_base_before_it_was_quantised_is_a_teacher(run, bases, tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    dense = ("--model.base", str(bases["dense"]), "--model.quantize", "nvfp4", "--model.teacher", "{base: dense}")
    run("fit", tmp_path / "run", *TAUGHT, *UNCHECKED, *dense, "--trainer.limit_val_batches", "0")
    curves = read_curves(tmp_path / "run")
    assert 0 < curves["teacher/divergence"].values[0] < 0.1
    assert curves["teacher/agreement"].values[0] > 0.5


@pytest.mark.long
def test_a_run_with_a_teacher_that_was_killed_ends_bit_for_bit_as_the_straight_one(bases, teacher, tmp_path):
    straight = launch("fit", bases["nvfp4"], tmp_path / "straight", *TAUGHT, *teacher)
    output, _ = straight.communicate()
    assert straight.returncode == 0, output
    killed = ("--trainer.callbacks+=tests.integration.toy.Killed", "--trainer.callbacks.phase=update")
    process = launch("fit", bases["nvfp4"], tmp_path / "killed", *TAUGHT, *teacher, *killed, "--trainer.callbacks.at=2")
    output, _ = process.communicate()
    assert process.returncode == -9, output
    process = launch("fit", bases["nvfp4"], tmp_path / "killed", *TAUGHT, *teacher, "--ckpt_path", "last")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--model.teacher", "{base: dense}"), "model.teacher is given and model.objective.teacher is not; give both"),
        (("--model.objective", "{teacher: {}}"), "model.objective.teacher is given and model.teacher is not"),
        (("--model.rewards", "[]"), "model.rewards is empty; expected at least one reward, or a teacher"),
        ((*TAUGHT, "--model.teacher", "{base: no/where/at/all}"), "model.teacher.base: there is no folder no/where/at"),
        (
            (*TAUGHT, "--model.teacher", "{base: a, base_format: nf4, quantize: nf4}"),
            "model.teacher.base_format is 'nf4'",
        ),
        ((*TAUGHT, "--model.teacher", "{base: dense}"), "model.teacher.base is 'dense' and model.base is"),
        ((*TAUGHT, "--model.teacher", "{base: dense, quantize: nvfp4}"), "leave base_format and quantize out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_contradict_each_other_are_refused(run, tmp_path: Path, capsys, wrong, message):
    with pytest.raises((SystemExit, ValueError)) as stop:
        run("fit", tmp_path / "run", "--trainer.max_steps", "1", *wrong)
    assert message in capsys.readouterr().err + str(stop.value)


def test_a_policy_that_is_its_own_teacher_needs_a_reward(run, bases, tmp_path, capsys):
    own = ("--model.base", str(bases["dense"]), "--model.teacher", "{base: dense}", "--model.rewards", "[]")
    with pytest.raises((SystemExit, ValueError)) as stop:
        run("fit", tmp_path / "run", *TAUGHT, *own)
    assert "model.teacher is the policy's own base" in capsys.readouterr().err + str(stop.value)
    assert command(["doctor", "-c", str(TOY), *TAUGHT, *own, "--run_dir", str(tmp_path / "other")]) == 1
    assert "[no] configuration        model.teacher is the policy's own base" in capsys.readouterr().out


def shortened(teacher: tuple[str, str], folder: Path) -> tuple[str, str]:
    """Copy a teacher to ``folder``, with a configuration of 32 positions."""
    shutil.copytree(yaml.safe_load(teacher[1])["base"], folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return "--model.teacher", f"{{base: {folder}}}"


def test_a_teacher_of_fewer_positions_than_a_row_has_is_refused_by_fit_doctor_and_plan(
    run, bases, teacher, tmp_path, capsys
):
    message = "prompts and completions may reach 70 tokens and the model has 32 positions"
    short = shortened(teacher, tmp_path / "short")
    with pytest.raises((SystemExit, ValueError)) as stop:
        run("fit", tmp_path / "run", *TAUGHT, *short)
    assert message in capsys.readouterr().err + str(stop.value)
    base = ("-c", str(TOY), "--model.base", str(bases["nvfp4"]), *TAUGHT, *short)
    assert command(["doctor", *base, "--run_dir", str(tmp_path / "other")]) == 1
    assert f"[no] configuration        model.teacher.base is {tmp_path / 'short'}: {message}" in capsys.readouterr().out
    assert command(["plan", *base, "--gpu-memory", "8"]) == 2
    assert f"model.teacher.base is {tmp_path / 'short'}: {message}" in capsys.readouterr().err


def test_plan_refuses_a_dense_teacher_of_a_base_in_4_bits_as_fit_does(bases, capsys):
    dense = ("--model.teacher", "{base: dense}", "--model.base", str(bases["nvfp4"]))
    assert command(["plan", "-c", str(TOY), "--gpu-memory", "8", *TAUGHT, *dense]) == 2
    assert "model.teacher.base is 'dense' and model.base is" in capsys.readouterr().err
