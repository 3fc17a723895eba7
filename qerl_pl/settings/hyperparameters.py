"""The settings of a run as a flat table, which loggers show beside what the run reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

Value = bool | int | float | str
REACHED = ("val/accuracy", "val/reward", "train/reward", "policy/entropy", "gap/mean_abs")
"""Curves whose last values stand beside the settings in TensorBoard's HParams tab."""
LEFT_OUT = ("run_dir", "ckpt_path", "config", "trainer.logger", "trainer.default_root_dir", "trainer.plugins")


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Value]:
    """Flatten a configuration.

    A class is named by its class alone and its arguments come below it: ``model.optimizer: AdamW``,
    ``model.optimizer.lr: 1e-5``, ``trainer.callbacks.SyncCanary.score_every: 10``. What is null is left out, and so are
    folders and loggers. Other lists are texts.

    Args:
        config: the content of a run's config.yaml.
    """
    return {
        name: value
        for name, value in _flat("", config)
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in LEFT_OUT)
    }


def log_hyperparameters(loggers: Iterable[Logger], settings: Mapping[str, Value]) -> None:
    """Give a run's settings to its loggers: TensorBoard's HParams tab, the configuration of W&B, parameters of MLflow.

    Lightning's own way would write a metric of -1 into TensorBoard. CSVLogger would only copy them to another file.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            writer = logger.experiment.file_writer
            for summary in hparams(dict(settings), dict.fromkeys(REACHED, 0.0)):
                writer.add_summary(summary)
        elif not isinstance(logger, CSVLogger):
            logger.log_hyperparams(dict(settings))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping) and "class_path" in value:
        if not name.endswith(short := str(value["class_path"]).rpartition(".")[2]):
            yield name, short
        yield from _flat(name, value.get("init_args") or {})
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for at, each in enumerate(value):
            own = each if isinstance(each, Mapping) else {"": each}
            key = own.get("name") or str(own.get("class_path", at)).rpartition(".")[2]
            yield from _flat(f"{name}.{key}", {k: v for k, v in own.items() if k != "name"})
    elif isinstance(value, bool | int | float | str):
        yield name, value
    elif value is not None:
        yield name, str(value)
