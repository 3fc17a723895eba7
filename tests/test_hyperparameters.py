"""Settings as a table of a logger."""

from __future__ import annotations

from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue] (generated)

from qerl_pl.settings.hyperparameters import REACHED, hyperparameters, log_hyperparameters

CONFIG = {
    "seed_everything": 3,
    "run_dir": "runs/x",
    "trainer": {
        "max_steps": 8,
        "precision": "32-true",
        "val_check_interval": None,
        "logger": {"class_path": "a.TensorBoardLogger", "init_args": {"save_dir": "runs"}},
        "callbacks": [
            {"class_path": "callbacks.aqn.AdaptiveQuantizationNoise", "init_args": {"sigma_start": 0.01}},
            {"class_path": "callbacks.process.CloseEngine"},
        ],
    },
    "model": {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-5, "betas": [0.9, 0.99]}},
        "objective": {"filter_truncated": True},
        "rewards": [{"name": "accuracy", "weight": 1.0, "reward": {"class_path": "a.NumericAnswer"}}],
    },
}
FLAT = {
    "seed_everything": 3,
    "trainer.max_steps": 8,
    "trainer.precision": "32-true",
    "trainer.callbacks.AdaptiveQuantizationNoise.sigma_start": 0.01,
    "model.optimizer": "AdamW",
    "model.optimizer.lr": 1e-5,
    "model.optimizer.betas": "[0.9, 0.99]",
    "model.objective.filter_truncated": True,
    "model.rewards.accuracy.weight": 1.0,
    "model.rewards.accuracy.reward": "NumericAnswer",
}


def test_a_configuration_is_flat_and_classes_are_named():
    assert hyperparameters(CONFIG) == FLAT
    assert hyperparameters({}) == {}


def test_tensorboard_has_them_beside_what_the_run_reached_and_no_metric_of_its_own(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    log_hyperparameters([logger], FLAT)
    logger.log_metrics({"val/accuracy": 0.5}, step=1)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["val/accuracy"]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    result = HParamsPluginData.FromString(content).session_start_info.hparams
    assert result["model.optimizer.lr"].number_value == 1e-5
    assert result["model.optimizer"].string_value == "AdamW"
    assert result["model.objective.filter_truncated"].number_value == 1
    assert len(result) == len(FLAT)
    experiment = HParamsPluginData.FromString(events.summary_metadata["_hparams_/experiment"].plugin_data.content)
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == list(REACHED)
