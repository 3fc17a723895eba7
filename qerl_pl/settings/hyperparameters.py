"""Settings of a run as a flat table, which loggers show next to the results of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

Value = bool | int | float | str
REACHED = ("val/accuracy", "val/reward", "train/reward", "policy/entropy", "gap/mean_abs")
"""Logged metrics whose last values TensorBoard's HParams tab shows next to the settings."""
LEFT_OUT = ("run_dir", "ckpt_path", "config", "trainer.logger", "trainer.default_root_dir", "trainer.plugins")


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Value]:
    """Flatten the content of a run's config.yaml to values by dotted key.

    An object is given by the name of its class, without the module, and its arguments: ``model.optimizer: AdamW``,
    ``model.optimizer.lr: 1e-5``, ``trainer.callbacks.SyncCanary.score_every: 10``. Settings that are null, folders and
    loggers are left out. Lists without objects become texts.
    """
    return {
        name: value
        for name, value in _flat("", config)
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in LEFT_OUT)
    }


def log_hyperparameters(loggers: Iterable[Logger], settings: Mapping[str, Value]) -> None:
    """Log a run's settings to TensorBoard's HParams tab, the configuration of W&B and the parameters of MLflow.

    For TensorBoard, Lightning's ``log_hyperparams`` is not used, because it would log a metric with the value -1.
    CSVLogger is skipped, since it would only copy config.yaml to another file.
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
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            settings = item if isinstance(item, Mapping) else {"": item}
            key = settings.get("name") or str(settings.get("class_path", index)).rpartition(".")[2]
            yield from _flat(f"{name}.{key}", {k: v for k, v in settings.items() if k != "name"})
    elif isinstance(value, bool | int | float | str):
        yield name, value
    elif value is not None:
        yield name, str(value)
