"""A run that was killed and resumed equals a run that was not interrupted."""

import logging
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

from callbacks.graceful_stop import GracefulStop
from qerl_pl.checkpoint import read_checkpoint
from qerl_pl.results.curves import read_curves
from tests.bench import bench_resume
from tests.integration.conftest import (
    IN_BACKGROUND,
    SHORT,
    UNCHECKED,
    VLLM,
    assert_same_run,
    launch,
    load_last,
    scalars,
)


def rollouts_seen(run_dir: Path) -> int:
    return len(list((run_dir / "completions").glob("train-*.jsonl")))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(540)
@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.long)])  # each costs the start of a process
def test_killed_at_random_points_and_resumed_equals_the_straight_run(bases, tmp_path, most):
    steps = ("--trainer.max_steps", "8", "--trainer.callbacks.num_stages", "3", *VLLM)
    straight = launch("fit", bases["nvfp4"], tmp_path / "straight", *steps)
    output, _ = straight.communicate()
    assert straight.returncode == 0, output

    draw, kills, run_dir = random.Random(0), 0, tmp_path / "killed"
    while True:
        before = rollouts_seen(run_dir)
        how = () if kills % 2 else IN_BACKGROUND  # checkpoints
        process = launch("fit", bases["nvfp4"], run_dir, *steps, *how, "--ckpt_path", "last")
        if kills < most:
            while rollouts_seen(run_dir) <= before and process.poll() is None:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.6))  # a step with its checkpoint, log and validation takes about as long
            process.kill()
            kills += process.wait() == -9
            continue
        output, _ = process.communicate()
        assert process.returncode == 0, output
        break
    assert kills == most
    assert_same_run(tmp_path / "straight", run_dir)

    state = load_last(run_dir)["state_dict"]
    assert any(tensor.abs().max() > 0 for name, tensor in state.items() if "lora_B" in name), "nothing was trained"
    curves = read_curves(run_dir)
    quiet = [gap for gap, sigma in zip(curves["gap/max"].values, curves["aqn/sigma"].values, strict=True) if sigma == 0]
    assert len(quiet) >= 3
    assert max(quiet) < 1e-4, "sampler and trainer disagree in fp32 without noise"
    assert max(curves["gap/max"].values) > 1e-4, "noise did not reach the sampler"
    assert set(curves["aqn/noisy_norms"].values) == {0.0, 4.0}


@pytest.mark.long
@pytest.mark.timeout(540)
def test_killed_in_every_phase_of_a_step_and_resumed_equals_the_straight_run(bases, tmp_path):
    updates = ("--model.updates_per_rollout", "2", "--model.mini_batches", "2", "--trainer.max_steps", "24")
    updates += ("--model.micro_batch_tokens", "120", "--data.val_batch_size", "4")  # 2 batches of a validation
    straight = launch("fit", bases["nvfp4"], tmp_path / "straight", *updates)
    output, _ = straight.communicate()
    assert straight.returncode == 0, output
    kills = (("rollout", 4), ("scored", 8), ("validation", 12), ("update", 14), ("saving", 20))
    for phase, step in kills:
        killed = ("--trainer.callbacks+=tests.integration.toy.Killed", f"--trainer.callbacks.phase={phase}")
        killed += (f"--trainer.callbacks.at={step}", "--ckpt_path", "last")
        process = launch("fit", bases["nvfp4"], tmp_path / "killed", *updates, *killed)
        output, _ = process.communicate()
        assert process.returncode == -9, f"{phase}: {output}"
    process = launch("fit", bases["nvfp4"], tmp_path / "killed", *updates, "--ckpt_path", "last")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.gpu
@pytest.mark.vllm
def test_on_a_gpu_a_deterministic_run_that_was_killed_equals_the_straight_run_too(tmp_path, capfd):
    bench_resume.main(["--size", "tiny", "--completion", "64", "--folder", str(tmp_path), "--kills", "update"])
    assert "resume/equal-bits" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("at", "how"), [pytest.param(0, (), marks=pytest.mark.long), (5, IN_BACKGROUND)])
def test_ctrl_c_ends_the_step_and_saves_and_going_on_changes_nothing(finished, run, tmp_path, at, how):
    ctrl_c = (*how, "--trainer.callbacks+=tests.integration.toy.CtrlC", f"--trainer.callbacks.at={at}")
    run("fit", tmp_path / "stopped", *ctrl_c)
    assert load_last(tmp_path / "stopped")["global_step"] == at + 1
    torch.manual_seed(99)  # a new process has other global streams
    run("fit", tmp_path / "stopped", "--ckpt_path", "last")
    assert_same_run(finished, tmp_path / "stopped")


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_whole_step(run, tmp_path):
    ctrl_c = (
        "--trainer.callbacks+=tests.integration.toy.CtrlC",
        "--trainer.callbacks.at=3",
        "--trainer.callbacks.times=2",
    )
    with pytest.raises(SystemExit):
        run("fit", tmp_path, *UNCHECKED, *ctrl_c)
    assert load_last(tmp_path)["global_step"] == 2  # the third step was over but not yet on record when the keys came


@pytest.mark.slow
def test_ctrl_c_in_the_last_step_leaves_out_nothing(run, tmp_path):
    steps = ("--trainer.max_steps", "4", *UNCHECKED)  # the last step has its validation only because it is the last
    run("fit", tmp_path / "straight", *steps)
    run(
        "fit",
        tmp_path / "stopped",
        *steps,
        "--trainer.callbacks+=tests.integration.toy.CtrlC",
        "--trainer.callbacks.at=3",
    )
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_validation_stopped_goes_on_as_if_it_had_not(finished, run, tmp_path):
    stopped = "--trainer.callbacks+=tests.integration.toy.StoppedByValidation"
    run("fit", tmp_path / "stopped", stopped, "--trainer.callbacks.at=3")
    assert load_last(tmp_path / "stopped")["global_step"] == 3
    run("fit", tmp_path / "stopped", "--ckpt_path", "last")
    assert_same_run(finished, tmp_path / "stopped")


@pytest.mark.slow
def test_the_checkpoint_of_the_validation_before_the_first_step_goes_on_as_a_new_run(run, tmp_path):
    still = ("--trainer.max_steps", "4", "--model.optimizer.lr", "0", *UNCHECKED)  # the first validation stays the best
    run("fit", tmp_path / "straight", *still)
    best = tmp_path / "straight" / "checkpoints" / "best.ckpt"
    assert read_checkpoint(best, "cpu")["global_step"] == 0
    run("fit", tmp_path / "again", *still, "--ckpt_path", str(best))
    assert scalars(tmp_path / "again") == scalars(tmp_path / "straight")
    assert scalars(tmp_path / "again")["train/loss"][0] == [0, 1, 2, 3]


@pytest.mark.slow
def test_every_start_has_its_own_max_time_and_the_stops_change_nothing(short, run, tmp_path, caplog):
    run_dir, settings = tmp_path / "chain", (*SHORT, "--ckpt_path", "last")
    for step in (1, 2):
        with caplog.at_level(logging.INFO):
            cli = run("fit", run_dir, *settings, "--trainer.max_time", "{milliseconds: 1}")
        assert load_last(run_dir)["global_step"] == step
        assert f"stopped after step {step}; resume with --ckpt_path last" in caplog.text
        [stop] = [callback for callback in cli.trainer.callbacks if isinstance(callback, GracefulStop)]
        assert stop.exit_status == 0
    run("fit", run_dir, *settings)
    assert_same_run(short, run_dir)


@pytest.mark.slow
def test_several_updates_of_mini_batches_and_an_optimizer_of_8_bits_resume_exactly_too(run, tmp_path):
    adam = "--model.optimizer"
    updates = (adam, "bitsandbytes.optim.AdamW8bit", f"{adam}.lr", "1e-2", f"{adam}.min_8bit_size", "1")
    updates += ("--model.updates_per_rollout", "2", "--model.mini_batches", "2", "--trainer.max_steps", "16")
    updates += ("--trainer.limit_val_batches", "0", *UNCHECKED, "--model.lora.train_norms", "true")
    updates += ("--model.lora.dropout", "0.1")  # which draws from torch's global stream
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=2")
    run("fit", tmp_path / "straight", *updates)
    run("fit", tmp_path / "stopped", *updates, *ctrl_c)
    run("fit", tmp_path / "stopped", *updates, "--ckpt_path", "last")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    curves = read_curves(tmp_path / "straight")
    assert curves["policy/kl_old"].values[-1] > 0, "the second update's ratio is not 1"
    [optimizer] = load_last(tmp_path / "straight")["optimizer_states"]
    moments = [state["__bnb_optimizer_quant_state__"]["state1"] for state in optimizer["state"].values()]
    assert {moment.dtype for moment in moments} == {torch.uint8}


@pytest.mark.slow
def test_settings_of_the_optimizer_are_those_of_the_start_that_goes_on(finished, run, tmp_path, caplog):
    lower = ("--model.optimizer.init_args.lr", "1e-4")
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=3")
    run("fit", tmp_path / "stopped", *UNCHECKED, *ctrl_c)
    with caplog.at_level(logging.INFO):
        run("fit", tmp_path / "stopped", *UNCHECKED, *lower, "--ckpt_path", "last")
    assert "model.optimizer: lr is 0.0001 from here on; the checkpoint had 0.005" in caplog.text
    rates, usual = (read_curves(run_dir)["lr-AdamW"].values for run_dir in (tmp_path / "stopped", finished))
    assert rates[:4] == usual[:4]
    assert rates[4:] == pytest.approx([rate / 50 for rate in usual[4:]])


@pytest.mark.slow
def test_a_scalar_belongs_to_the_step_that_measured_it_and_not_to_later_ones(run, tmp_path):
    # Each rollout has one prompt with two completions of one token. Their rewards are often equal, so many steps have
    # no gradient and measure nothing about the update.
    rare = ("--model.sampling.max_tokens", "1", "--model.sampling.num_completions", "2", "--data.batch_size", "1")
    rare += ("--trainer.limit_val_batches", "0", "--trainer.max_steps", "10", *UNCHECKED)
    run("fit", tmp_path / "straight", *rare)
    curves = read_curves(tmp_path / "straight")
    signal = dict(zip(*curves["rollout/groups_with_signal"][:2], strict=True))
    assert curves["policy/ratio"].steps == [step for step, share in signal.items() if share > 0]
    assert 0 < len(curves["policy/ratio"].steps) < len(signal)
    silent = next(step for step in signal if signal[step] == 0 and max(curves["policy/ratio"].steps) > step > 0)
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", f"--trainer.callbacks.at={silent - 1}")
    run("fit", tmp_path / "stopped", *rare, *ctrl_c)
    run("fit", tmp_path / "stopped", *rare, "--ckpt_path", "last")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.slow
def test_a_start_says_what_it_changes_though_the_runs_own_file_was_edited_or_is_gone(run, short, tmp_path):
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    config, lower = tmp_path / "config.yaml", ("--model.optimizer.init_args.lr", "1e-4")
    config.write_text(config.read_text().replace("lr: 0.005", "lr: 0.0001"))
    more = ("--ckpt_path", "last", "--trainer.limit_val_batches", "0")
    with pytest.warns(UserWarning, match=r"model\.optimizer\.init_args\.lr: 0\.005 -> 0\.0001"):
        run("fit", tmp_path, *lower, *more, "--trainer.max_steps", "5")
    config.unlink()
    with pytest.warns(UserWarning, match=r"trainer\.max_steps: 5 -> 6"):
        run("fit", tmp_path, *lower, *more, "--trainer.max_steps", "6")
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] == 6
    with pytest.raises(ValueError, match="max_steps is 4 and the checkpoint has done 6 optimizer steps"):
        run("fit", tmp_path, *lower, *more, "--trainer.max_steps", "4")


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_end_tokens(run, short, bases, tmp_path):
    base, run_dir = shutil.copytree(bases["nvfp4"], tmp_path / "base"), shutil.copytree(short, tmp_path / "run")
    (base / "generation_config.json").write_text('{"eos_token_id": [7, 256]}')
    with pytest.raises(ValueError, match=r"end_tokens: the run has \[256\], this start has \[7, 256\]"):
        run("fit", run_dir, *SHORT, "--model.base", str(base), "--ckpt_path", "last", "--trainer.max_steps", "5")


@pytest.mark.slow
@pytest.mark.long
def test_dynamic_sampling_drops_groups_without_signal_and_resumes_exactly(run, tmp_path):
    # Groups have two completions of one token, so the rewards of many groups are equal.
    often_equal = ("--model.sampling.max_tokens", "1", "--model.sampling.num_completions", "2")
    dynamic = (*often_equal, "--model.dynamic_sampling.max_refills", "3", "--trainer.max_steps", "5", *UNCHECKED)
    ctrl_c = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=2")
    run("fit", tmp_path / "straight", *dynamic)
    run("fit", tmp_path / "stopped", *dynamic, *ctrl_c)
    run("fit", tmp_path / "stopped", *dynamic, "--ckpt_path", "last")
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    curves = read_curves(tmp_path / "straight")
    assert max(curves["rollout/refills"].values) >= 1
    assert max(curves["rollout/groups_discarded"].values) >= 1
