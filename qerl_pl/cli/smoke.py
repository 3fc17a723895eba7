"""Shorten a run to a smoke test (``fit --smoke``), which executes every part of a configuration at a small size."""

import itertools
import os
from pathlib import Path
from typing import NamedTuple

import torch
from jsonargparse import Namespace

MOST_TOKENS = 64  # of a completion
MOST_COMPLETIONS = 4  # per prompt
VALIDATION_PROMPTS = 4
HELP = (
    "try the configuration: two small rollouts (three where there is noise), each with a validation and a checkpoint, "
    f"completions of at most {MOST_TOKENS} tokens, in its own folder next to run_dir; vLLM does not compile, which "
    "`doctor --warm` tries, and memory is not tested, which `plan` predicts"
)


class WholeRun(NamedTuple):
    """Batch size and longest sequence of the run whose configuration a smoke test (a short trial run) tries. The caller
    checks that these fit the model and the data, because the smoke test itself uses smaller ones."""

    batch_size: int
    """Prompts per rollout."""
    longest: int
    """Most tokens of a prompt and its completion together."""


def shorten(config: Namespace) -> WholeRun:
    """Change the parsed configuration of ``fit``, in place, into that of a smoke test; returns its sizes before."""
    trainer, model, data = config.trainer, config.model, config.data
    completions = [sampling.max_tokens for sampling in filter(None, (model.sampling, model.val_sampling))]
    whole = WholeRun(data.batch_size, data.max_prompt_tokens + max(completions))
    noisy = [
        callback.init_args for callback in trainer.callbacks or () if "num_stages" in callback.get("init_args", {})
    ]
    for settings in noisy:
        settings.num_stages = 3
    steps = max(1, model.updates_per_rollout) * max(1, model.mini_batches)
    trainer.max_steps = steps * (3 if noisy else 2)
    trainer.val_check_interval = 1
    model.warmup_steps = min(model.warmup_steps, 1)
    model.objective.filter_truncated = False  # all completions may be truncated
    for sampling in filter(None, (model.sampling, model.val_sampling)):
        sampling.max_tokens = min(sampling.max_tokens, MOST_TOKENS)
        sampling.num_completions = min(sampling.num_completions, MOST_COMPLETIONS)
    if model.dynamic_sampling is not None:
        model.dynamic_sampling.max_refills = 1
        model.dynamic_sampling.when_short = "smaller"
    for term in model.rewards:
        if isinstance(term.reward, Namespace) and term.reward.class_path.endswith(".SoftOverlong"):
            term.reward.init_args.max_tokens = None
            term.reward.init_args.buffer = min(term.reward.init_args.buffer, model.sampling.max_tokens)
    if "enforce_eager" in model.engine.get("init_args", {}):
        model.engine.init_args.enforce_eager = True  # CUDA graphs and compilation take most of vLLM's start
    ranks = _num_devices(trainer) * trainer.num_nodes
    data.batch_size = _few(data.batch_size, ranks, max(1, model.mini_batches))
    data.val_limit = min(data.val_limit or VALIDATION_PROMPTS, max(VALIDATION_PROMPTS, ranks))
    config.run_dir = trainer.default_root_dir = free_folder(f"{config.run_dir}-smoke")
    config.ckpt_path = None
    return whole


def free_folder(folder: str) -> str:
    """Return the first of the folders FOLDER, FOLDER-2, FOLDER-3, ... that does not exist or is empty."""
    names = itertools.chain([folder], (f"{folder}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name).exists() or (Path(name).is_dir() and not os.listdir(name)))


def _few(batch_size: int, *shared_by: int) -> int:
    """Return the batch size, in prompts per rollout, of a smoke test: the smallest divisor of ``batch_size`` that is at
    least two and a multiple of each number in ``shared_by``, which are the numbers of ranks and of mini-batches among
    which a batch is divided. If there is no such divisor, the result is ``batch_size``."""
    parts = (size for size in range(2, batch_size) if batch_size % size == 0)
    return next((size for size in parts if not any(size % number for number in shared_by)), batch_size)


def _num_devices(trainer: Namespace) -> int:
    devices = trainer.devices
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdigit():
        return max(1, int(devices))
    return max(1, torch.cuda.device_count() if trainer.accelerator != "cpu" else 1)
