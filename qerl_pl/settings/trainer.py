"""Check the YAML section ``trainer`` for what does not work here, before Lightning's Trainer is built."""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qerl_pl.common.checks import require_at_least

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

EPOCHS = "the length of a run is trainer.max_steps, in optimizer steps"
CHECKPOINTS = "qerl_pl.checkpoint.SafeCheckpointIO"
"""Class path of the plugin that writes and reads a run's checkpoints."""
MOST_STEPS = 2**31 - 1
UNUSABLE = {
    "accumulate_grad_batches": (1, "model.micro_batch_tokens sets the size of the passes of an optimizer step"),
    "gradient_clip_val": (None, "set model.max_grad_norm"),
    "gradient_clip_algorithm": (None, "set model.max_grad_norm"),
    "max_epochs": (-1, EPOCHS),
    "min_epochs": (None, EPOCHS),
    "overfit_batches": (0.0, "for a short trial lower trainer.max_steps and the number of problems of the data source"),
    "fast_dev_run": (False, "for a short trial lower trainer.max_steps and model.sampling.max_tokens"),
    "reload_dataloaders_every_n_epochs": (0, "the loader has no epochs"),
    "sync_batchnorm": (False, "the supported models have no batch norm"),
    "use_distributed_sampler": (True, "the data module divides prompts among ranks itself"),
    "enable_checkpointing": (True, "a run without checkpoints cannot be resumed"),
    "check_val_every_n_epoch": (None, "trainer.val_check_interval counts RL iterations, whatever the epoch"),
    "inference_mode": (False, "backward cannot use tensors that a validation makes in inference mode"),
    "model_registry": (None, "`python -m qerl_pl export --push` uploads a policy"),
    "barebones": (False, "a run without checkpoints cannot be resumed"),
}
"""Settings of Lightning's Trainer that have only one usable value, each with this value and with advice on what to do
instead."""


def check_trainer(trainer: Mapping[str, Any], *, command: str) -> None:
    """Raise ValueError for a setting in the YAML section ``trainer`` that has no effect, or with which ``command``
    (fit, validate, test or predict) would end in a traceback of Lightning."""
    for name, (usable, instead) in UNUSABLE.items():
        value = trainer.get(name, usable)
        if value is not None and value != usable:
            raise ValueError(f"trainer.{name} is {value}; leave it at {json.dumps(usable)}: {instead}")
    plugins = trainer.get("plugins", [{"class_path": CHECKPOINTS}])
    plugin_list = plugins if isinstance(plugins, list) else [plugins]
    if not any(getattr(plugin, "get", {}.get)("class_path") == CHECKPOINTS for plugin in plugin_list):
        raise ValueError(
            f"trainer.plugins is {str(plugins)[:80]}, without {CHECKPOINTS}, by which checkpoints are written and read "
            "whole and safely; add further plugins by `plugins+:`"
        )
    check_devices(trainer)
    _check_hardware(trainer)
    needed = {"validate": "limit_val_batches", "fit": "limit_train_batches"}.get(command, f"limit_{command}_batches")
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        limit = trainer.get(name)
        if limit is not None and (not limit >= 0 or (isinstance(limit, float) and limit > 1)):
            raise ValueError(f"trainer.{name} is {limit}; expected a number of batches, or a share up to 1.0")
        if limit == 0 and name == needed:
            raise ValueError(f"trainer.{name} is 0, so {command} would do nothing; expected more, or leave it out")
    sanity = trainer.get("num_sanity_val_steps")
    if sanity is not None and sanity < -1:
        raise ValueError(f"trainer.num_sanity_val_steps is {sanity}; expected 0 (none) or more batches, or -1 for all")
    if command == "fit":
        _check_length(trainer)


def _check_length(trainer: Mapping[str, Any]) -> None:
    _check_time(trainer.get("max_time"))
    steps = trainer.get("max_steps")
    if steps is not None and steps > MOST_STEPS:
        raise ValueError(f"trainer.max_steps is {steps}; expected at most {MOST_STEPS}")
    if steps is None or steps < 1:
        raise ValueError(f"trainer.max_steps is {steps}; expected the length of the run, at least 1 optimizer step")
    every = trainer.get("val_check_interval")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(
            f"trainer.val_check_interval is {every}; expected a whole number of RL iterations, at least 1 (shares of "
            "an epoch mean nothing here: the loader has no end)"
        )
    least = trainer.get("min_steps")
    if least is not None and not 0 <= least <= steps:
        raise ValueError(f"trainer.min_steps is {least}; expected 0 to trainer.max_steps ({steps})")
    require_at_least(1, section="trainer.", log_every_n_steps=trainer.get("log_every_n_steps"))


def _check_time(max_time: Any) -> None:
    if max_time is None:
        return
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        seconds = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError, OverflowError) as error:
        raise ValueError(f"trainer.max_time is {max_time!r}; expected days:hours:minutes:seconds") from error
    if seconds is not None and seconds <= 0:
        raise ValueError(
            f"trainer.max_time is {max_time!r}, which would end the run before its first step; expected more than 0"
        )


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Raise ValueError if ``devices`` or ``num_nodes`` is below 1 or not a number."""
    devices, nodes = trainer.get("devices"), trainer.get("num_nodes")
    words = devices.split(",") if isinstance(devices, str) else [str(devices)] if isinstance(devices, int) else []
    are_numbers = all(word.strip().lstrip("-").isdigit() for word in words)
    too_few = are_numbers and len(words) == 1 and int(words[0]) < 1 and int(words[0]) != -1
    if devices != "auto" and (devices == [] or not are_numbers or too_few):
        raise ValueError(f"trainer.devices is {devices}; expected a number of devices, at least 1, or auto")
    require_at_least(1, section="trainer.", num_nodes=nodes)


def check_processes(trainer: "Trainer") -> None:
    """Raise ValueError if SLURM or torchrun has started fewer processes than the run of ``trainer`` has ranks, or if
    this process is one too many: Lightning would train on fewer devices, or a whole run in every process."""
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment | TorchElasticEnvironment):
        return
    wanted, started = trainer.num_devices * trainer.num_nodes, environment.world_size()
    by_slurm = isinstance(environment, SLURMEnvironment)  # whose variables a process without srun has, too
    if started == wanted or (by_slurm and started > wanted > rank_zero_only.rank):
        return
    starter, script = ("SLURM", "slurm.sh") if by_slurm else ("torchrun", "torchrun.sh")
    instead = ", or unset SLURM_NTASKS, so that one process starts the others of its machine" if by_slurm else ""
    raise ValueError(
        f"trainer.devices x trainer.num_nodes is {wanted}, but the number of processes that {starter} starts is "
        f"{started}; set trainer.devices to the processes of a machine, or start one process per device, as "
        f"docs/launch/{script} does{instead}"
    )


def _check_hardware(trainer: Mapping[str, Any]) -> None:
    import torch  # imported here, because `score` shows its help without torch

    accelerator, devices = trainer.get("accelerator") or "auto", trainer.get("devices")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(accelerator, str) and accelerator not in ("auto", "cpu"):
        if accelerator not in ("gpu", "cuda"):
            raise ValueError(f"trainer.accelerator is {accelerator!r}; expected auto, cpu or gpu (CUDA)")
        if not num_gpus:
            raise ValueError(
                f"trainer.accelerator is {accelerator!r} and this machine has no CUDA GPU; use auto or cpu"
            )
    has_gpu = num_gpus and accelerator != "cpu"
    most, kind = (num_gpus, "GPUs") if has_gpu else (len(os.sched_getaffinity(0)), "CPU cores")
    if str(devices).isdigit() and int(str(devices)) > most and (has_gpu or accelerator in ("auto", "cpu")):
        raise ValueError(f"trainer.devices is {devices} and this machine has {most} {kind}; expected at most {most}")
