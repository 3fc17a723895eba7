"""Settings of the Lightning trainer that would not work in a run of this program are refused by name."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from qerl_pl.settings.trainer import check_processes, check_trainer

GOOD = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "max_epochs": -1, "max_steps": 8, "val_check_interval": 3}


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("max_steps", -5, "at least 1"),
        ("max_steps", 0, "at least 1"),
        ("max_steps", -1, "at least 1"),
        ("max_steps", 10**20, "at most 2147483647"),
        ("devices", 100_000, "expected at most"),
        ("devices", "100000", "expected at most"),
        ("val_check_interval", 0, "RL iterations"),
        ("val_check_interval", 0.5, "RL iterations"),
        ("val_check_interval", -2, "RL iterations"),
        ("devices", 0, "auto"),
        ("devices", -2, "auto"),
        ("devices", "0", "auto"),
        ("devices", "nan", "auto"),
        ("devices", [], "auto"),
        ("num_nodes", 0, "at least 1"),
        ("accumulate_grad_batches", 2, "micro_batch_tokens"),
        ("gradient_clip_val", 1.0, "max_grad_norm"),
        ("accelerator", "tpu", "auto, cpu or gpu"),
        ("limit_train_batches", 0, "would do nothing"),
        ("limit_train_batches", -1, "share"),
        ("limit_train_batches", float("nan"), "share"),
        ("max_epochs", 3, "max_steps"),
        ("fast_dev_run", True, "max_steps"),
        ("overfit_batches", 2, "max_steps"),
        ("log_every_n_steps", 0, "at least 1"),
        ("max_time", "00:00:00:00", "more than 0"),
        ("max_time", {"days": -1}, "more than 0"),
        ("max_time", "an hour", "days:hours:minutes:seconds"),
        ("min_steps", -4, "0 to trainer.max_steps"),
        ("min_steps", 9, "0 to trainer.max_steps"),
        ("num_sanity_val_steps", -5, "0 .none. or more"),
        ("plugins", None, "without qerl_pl.checkpoint.SafeCheckpointIO"),
        ("plugins", [], "without qerl_pl.checkpoint.SafeCheckpointIO"),
        ("plugins", [{"class_path": "lightning.pytorch.plugins.io.TorchCheckpointIO"}], "written and read whole"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_what_to_use(name, value, instead):
    with pytest.raises(ValueError, match=f"trainer.{name} is .*{instead}") as refused:
        check_trainer({**GOOD, name: value}, command="fit")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("changes", [{}, {"devices": "auto"}, {"devices": -1}, {"limit_val_batches": 0}])
def test_settings_that_work_are_taken(changes):
    check_trainer({**GOOD, **changes}, command="fit")


def test_an_evaluation_needs_batches_of_its_own_and_no_steps():
    check_trainer({**GOOD, "max_steps": -1, "limit_train_batches": 0}, command="test")
    with pytest.raises(ValueError, match="limit_test_batches is 0"):
        check_trainer({**GOOD, "limit_test_batches": 0}, command="test")


SLURM = {"SLURM_JOB_NAME": "a", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TORCHRUN = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "rank", "devices", "wrong"),
    [
        ({}, 0, 2, None),  # Lightning starts the second process
        (SLURM | {"SLURM_NTASKS": "1"}, 0, 2, "is 2, but the number of processes that SLURM starts is 1; .*unset"),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, 0, 2, None),
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, 0, 1, None),  # a command without srun
        (SLURM | {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, 1, 1, "is 1, but .* SLURM starts is 2"),
        (TORCHRUN | {"WORLD_SIZE": "2", "RANK": "0"}, 0, 1, "is 1, but .* torchrun starts is 2"),
        (TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1"}, 1, 1, "is 1, but .* torchrun starts is 2; .*torchrun.sh does$"),
    ],
)
def test_processes_that_were_not_started_or_are_too_many_are_refused(monkeypatch, environment, rank, devices, wrong):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    strategy = "ddp" if devices > 1 else "auto"
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_model_summary=False)
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    with nullcontext() if wrong is None else pytest.raises(ValueError, match=wrong):
        check_processes(trainer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_accelerator_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no CUDA GPU; use auto or cpu"):
        check_trainer({**GOOD, "accelerator": "gpu"}, command="fit")


ACTS = {
    *("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "callbacks", "max_steps", "min_steps"),
    *("max_time", "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "num_sanity_val_steps", "log_every_n_steps", "deterministic"),
    *("enable_progress_bar", "enable_model_summary", "benchmark", "profiler"),
    *("detect_anomaly", "plugins", "default_root_dir", "enable_autolog_hparams"),
}
REFUSED = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": "norm",
    "max_epochs": 3,
    "min_epochs": 1,
    "overfit_batches": 2,
    "fast_dev_run": True,
    "reload_dataloaders_every_n_epochs": 1,
    "barebones": True,
    "enable_checkpointing": False,
    "check_val_every_n_epoch": 1,
    "inference_mode": True,
    "model_registry": "x",
    "sync_batchnorm": True,
    "use_distributed_sampler": False,
}


def test_every_setting_of_the_trainer_is_known_to_act_or_is_refused():
    settings = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert settings == ACTS | REFUSED.keys()
    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"trainer.{name} is {value}; leave it"):
            check_trainer({**GOOD, name: value}, command="fit")
