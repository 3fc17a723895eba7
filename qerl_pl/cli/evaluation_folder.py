"""Choose the folder for the results of an evaluation, so that they do not overwrite those of a different evaluation."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.utilities.rank_zero import rank_zero_info

SAME_PROBLEMS = ("batch_size", "max_dropped_share", "show_prompt", "val_batch_size")
"""Settings in the section ``data`` that change neither the problems of an evaluation nor their prompts."""


def evaluation_folder(wanted: Path, now: Mapping[str, Any]) -> Path:
    """Return the folder for the results of an evaluation: the first of the folders ``wanted``, WANTED-2, WANTED-3, ...
    that holds no evaluation, or one with equal settings. ``now`` has the settings of this evaluation, as in its
    config.yaml. If the result is not ``wanted``, a message names the folder and the settings that differ."""
    reason, folder = "", wanted
    for number in itertools.count(2):
        different = _differences(folder, now)
        if not different:
            break
        reason = reason or ", ".join(different)
        folder = wanted.with_name(f"{wanted.name}-{number}")
    if folder != wanted:
        rank_zero_info(f"results go to {folder}, because {wanted} has those of an evaluation with other {reason}")
    return folder


def different_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings of policy, problems, sampling and rewards in which two evaluations' config.yaml differ."""
    old, new = _deciding_settings(before), _deciding_settings(now)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _deciding_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    data, model = config.get("data") or {}, config.get("model") or {}
    settings = {f"data.{name}": value for name, value in data.items() if name not in SAME_PROBLEMS}
    of_model = ("base", "base_format", "quantize", "dtype", "rewards", "val_sampling")
    settings |= {f"model.{name}": model.get(name) for name in of_model}
    settings["model.lora.start"] = (model.get("lora") or {}).get("start")
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        if limit := (config.get("trainer") or {}).get(name):
            settings[f"trainer.{name}"] = limit, data.get("val_batch_size")
    if not model.get("val_sampling"):  # evaluations are greedy, with the max_tokens of training
        settings["model.sampling.max_tokens"] = (model.get("sampling") or {}).get("max_tokens")
    checkpoint = config.get("ckpt_path")  # below, relative to the run's folder, not to the current one
    settings["ckpt_path"] = checkpoint and os.path.relpath(checkpoint, config.get("run_dir") or ".")
    return settings | {"seed_everything": config.get("seed_everything")}


def _differences(folder: Path, now: Mapping[str, Any]) -> list[str]:
    """List the settings in which this evaluation differs from those in a folder or below."""
    names = []
    for path in sorted(folder.rglob("config.yaml")):
        try:
            names += different_settings(yaml.safe_load(path.read_text(encoding="utf-8")), now)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError):
            names.append(f"settings ({path} cannot be read)")
    return list(dict.fromkeys(names))
