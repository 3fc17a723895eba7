"""Starts and stops of whole runs: signals that stop a run, the lock that keeps a second process out of its folder, and
settings that differ when a run is started again."""

import fcntl
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import train
from qerl_pl.__main__ import main as command
from qerl_pl.results.curves import read_scalars
from tests.integration.conftest import ROOT, SHORT, UNCHECKED, arguments, differences, launch, load_last

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGUSR1]
)
def test_a_signal_ends_the_step_saves_and_is_the_exit_status(run, bases, finished, tmp_path, monkeypatch, number):
    if number == signal.SIGUSR1:  # in a SLURM job, Lightning handles this signal otherwise
        job = {"JOB_ID": 1, "JOB_NAME": "test", "NTASKS": 1, "NTASKS_PER_NODE": 1, "NNODES": 1, "NODELIST": "localhost"}
        for name, value in (job | {"PROCID": 0, "LOCALID": 0, "NODEID": 0}).items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
    callback = "--trainer.callbacks+=tests.integration.toy.CtrlC"
    options = ("--trainer.callbacks.at=2", f"--trainer.callbacks.number={int(number)}")
    base, run_dir = bases["nvfp4"], tmp_path / "run"
    assert train.exit_status(arguments("fit", base, run_dir, *UNCHECKED, callback, *options)) == 128 + number
    assert load_last(run_dir)["global_step"] == 3
    assert train.exit_status(arguments("fit", base, run_dir, *UNCHECKED, "--ckpt_path", "last")) == 0
    assert differences(load_last(run_dir)["state_dict"], load_last(finished)["state_dict"]) == []


@pytest.mark.parametrize("vllm", [False, True])
def test_a_run_whose_gpu_memory_runs_out_ends_with_one_line_and_a_checkpoint(run, bases, tmp_path, vllm):
    callback = ("--trainer.callbacks+=tests.integration.toy.OutOfMemory", "--trainer.callbacks.at=1")
    options = (*UNCHECKED, *callback, f"--trainer.callbacks.vllm={vllm}")
    stopped = str(train.exit_status(arguments("fit", bases["nvfp4"], tmp_path, *options)))
    assert stopped.startswith("error: CUDA ")
    assert "\n" not in stopped
    assert "--ckpt_path last" in stopped
    written = re.search(r"traceback: (\S+)\)$", stopped)
    assert written is not None
    assert "in training_step" in Path(written[1]).read_text()
    Path(written[1]).unlink()
    assert load_last(tmp_path)["global_step"] == 1


def test_ctrl_c_before_the_first_rollout_ends_the_program_in_one_line(bases, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
    try:
        started = arguments(
            "fit", bases["nvfp4"], tmp_path, "--trainer.callbacks+=tests.integration.toy.CtrlCAtTheStart"
        )
        assert command(started) == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    said = capfd.readouterr().err
    assert said.endswith("\nstopped by Ctrl-C\n")
    assert "KeyboardInterrupt" not in said


@pytest.mark.parametrize(
    ("subcommand", "hook"),
    [
        pytest.param("fit", "on_train_start", marks=pytest.mark.long),
        ("fit", "on_validation_batch_start"),
        pytest.param("test", "on_test_start", marks=pytest.mark.long),
        ("predict", "on_predict_batch_start"),
    ],
)
def test_sigterm_outside_of_training_steps_ends_the_program_at_once(bases, tmp_path, subcommand, hook):
    early = ("--trainer.callbacks+=tests.integration.toy.SigtermEarly", f"--trainer.callbacks.hook={hook}")
    process = launch(subcommand, bases["nvfp4"], tmp_path, *early)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("\nstopped by SIGTERM\n")
    assert list(tmp_path.rglob("*.jsonl")) == []
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_a_folder_in_which_another_process_trains_is_refused(run, tmp_path):
    with (tmp_path / ".lock").open("w") as lock:
        lock.write("process 7 on elsewhere\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="process 7 on elsewhere trains in"):
            run("fit", tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "config.yaml").exists()


def test_changed_settings_are_said_and_the_old_ones_kept(run, short, tmp_path, monkeypatch):
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    more = ("--trainer.limit_val_batches", "0", "--model.sampling.temperature", "0.9", "--ckpt_path", "last")
    old = (tmp_path / "config.yaml").read_text()
    with pytest.warns(
        UserWarning, match=r"model\.sampling\.temperature: 1\.0 -> 0\.9(.|\n)*trainer\.max_steps: 4 -> 5"
    ):
        run("fit", tmp_path, *more, "--trainer.max_steps", "5")
    assert (tmp_path / "config.1.yaml").read_text() == old
    now = (tmp_path / "config.yaml").read_text()
    assert "temperature: 0.9" in now
    monkeypatch.setattr("qerl_pl.common.files.os.replace", Mock(side_effect=OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        run("fit", tmp_path, *more, "--trainer.max_steps", "6")
    assert (tmp_path / "config.yaml").read_text() == now


def test_a_start_of_a_finished_run_says_that_nothing_is_left_and_how_to_train_longer(run, short, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(short, run_dir)
    run("fit", run_dir, *SHORT, "--ckpt_path", "last")
    printed = capsys.readouterr().out
    said = "are done; to train longer, raise trainer.max_steps, the number of optimizer steps, which is 4\n"
    assert printed.count(f"nothing to train: all 4 rollouts of {run_dir} {said}") == 1
    run("fit", run_dir, *SHORT, "--trainer.max_steps", "5", "--ckpt_path", "last")
    printed = capsys.readouterr().out
    assert "rollout 5 of 5" in printed
    assert "nothing to train" not in printed


def test_a_run_that_early_stopping_ends_says_so(run, tmp_path, capsys):
    stops = ("--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks.mode=max")
    values = ("monitor=val/reward", "patience=1", "min_delta=100")
    settings = (*stops, *(f"--trainer.callbacks.{value}" for value in values), "--trainer.val_check_interval", "2")
    run("fit", tmp_path, *UNCHECKED, *settings)
    said = re.findall(r"^stopped after .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(said) == 1
    assert said[0].startswith(
        "stopped after rollout 2 of 8 by EarlyStopping: Monitored metric val/reward did not improve"
    )


def test_a_resumed_run_says_at_its_end_what_is_counted_since_the_resume(run, short, tmp_path, capsys):
    shutil.copytree(short, tmp_path / "run")
    run("fit", tmp_path / "run", *SHORT, "--trainer.max_steps", "5", "--ckpt_path", "last")
    *_, took, signals, rewards = capsys.readouterr().out.splitlines()
    since = "since the resume after rollout 4"
    assert re.match(rf"trained for 0:00:\d\d {since}; `", took)
    assert re.match(rf"signal {since}: \w+ of 4 groups had one: ", signals)
    assert re.match(rf"rewards {since}: low_tokens ", rewards)


def test_several_loggers_follow_the_folder_of_the_run_and_of_its_evaluations(run, bases, tmp_path):
    loggers = tmp_path / "loggers.yaml"
    names = (
        "tests.integration.toy.NamedLogger",
        *(f"lightning.pytorch.loggers.{kind}Logger" for kind in ("TensorBoard", "CSV")),
    )
    listed: list[dict[str, object]] = [{"class_path": name} for name in names]
    listed[-1]["init_args"] = {"name": "", "version": None}  # Lightning's null is a new folder at every start
    loggers.write_text(yaml.safe_dump({"trainer": {"logger": listed}}))
    run_dir, settings = tmp_path / "run", ("-c", str(loggers), *UNCHECKED)
    run("fit", run_dir, *settings, "--trainer.max_steps", "4")
    run("validate", run_dir, *settings, "--ckpt_path", "last")
    folders = {path.parent for path in run_dir.rglob("metrics.csv")}
    assert folders == {path.parent for path in run_dir.rglob("events.out.tfevents.*")}
    assert run_dir in folders
    assert len(folders) == 2
    assert all((folder / "config.yaml").read_text().startswith("# lightning") for folder in folders)
    assert (run_dir / "checkpoints" / "last.ckpt").exists(), "the first logger's folder is not that of checkpoints"
    assert load_last(run_dir)["global_step"] == 4
    before = (run_dir / "metrics.csv").read_text()
    run("fit", run_dir, *settings, "--trainer.max_steps", "6", "--ckpt_path", "last")
    assert (run_dir / "metrics-1.csv").read_text() == before
    assert (run_dir / "metrics.csv").read_text() != before
    assert load_last(run_dir)["global_step"] == 6
    assert len(list((run_dir / "completions").glob("train-*.jsonl"))) == 6
    scalars = [scalar for path in run_dir.glob("events.out.tfevents.*") for scalar in read_scalars(path)[0]]
    assert sorted(scalar.step for scalar in scalars if scalar.tag == "train/reward") == list(range(6)), (
        "it started anew"
    )


def test_commands_with_the_config_yaml_of_a_run_do_not_log_to_its_folder(run, tmp_path):
    run_dir, settings = tmp_path / "run", tmp_path / "loggers.yaml"
    kinds = [{"class_path": f"lightning.pytorch.loggers.{kind}Logger"} for kind in ("TensorBoard", "CSV")]
    below = {**kinds[1], "init_args": {"save_dir": "RUN_DIR/below"}}
    settings.write_text(yaml.safe_dump({"trainer": {"logger": [*kinds, below]}}))
    run("fit", run_dir, "-c", str(settings), *UNCHECKED, "--trainer.max_steps", "4")

    def logged() -> set[str]:
        return {str(path.relative_to(tmp_path)) for kind in ("metrics*", "events*") for path in tmp_path.rglob(kind)}

    first, written = logged(), (run_dir / "metrics.csv").read_text()
    assert {name.rpartition("/")[0] for name in first} == {"run", "run/below"}
    config = ("-c", str(run_dir / "config.yaml"))
    run("validate", run_dir, *config, "--ckpt_path", "last")
    run("fit", tmp_path / "other", *config, "--run_dir", str(tmp_path / "other"))
    folders = {name.rpartition("/")[0] for name in logged() - first}
    assert folders == {
        f"{place}{below}" for place in ("run/validate/arithmetic-last", "other") for below in ("", "/below")
    }
    assert (run_dir / "metrics.csv").read_text() == written


def test_a_logger_with_a_folder_of_its_own_keeps_it_and_the_run_has_its_settings(run, tmp_path, capfd):
    run_dir, settings = tmp_path / "run", tmp_path / "logger.yaml"
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path / "curves")}}
    settings.write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    run("fit", run_dir, "-c", str(settings), *UNCHECKED, *SHORT)
    printed = capfd.readouterr().out
    assert "trained for" in printed
    assert "shows the run" not in printed, "report needs the files of TensorBoard's logger"
    run("validate", run_dir, "-c", str(settings), *UNCHECKED, "--ckpt_path", "last")
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("metrics*.csv")} == {"curves"}
    written = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("config.yaml"))]
    assert written == ["run/config.yaml", "run/validate/arithmetic-last/config.yaml"]
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["logger"]
    assert saved["init_args"]["save_dir"] == str(tmp_path / "curves")
    assert command(["export", "--run", str(run_dir), "--output", str(tmp_path / "adapter")]) == 0
