"""Lay out TensorBoard's Custom Scalars tab, the most important curves first."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override


def lines(*tags: str) -> list[str | list[str]]:
    """Describe a chart with one line for each of these scalars, or patterns of scalars."""
    return ["Multiline", [f"^{tag}$" for tag in tags]]


LAYOUT = {  # title of a group -> title of a chart -> what it shows
    "Reward and accuracy": {
        "reward": lines("train/reward", "val/reward"),
        "accuracy (held out)": lines("val/accuracy"),
        "groups with a signal, truncated, unscored": lines(
            "rollout/groups_with_signal", "rollout/truncated_share", "rollout/unscored_share"
        ),
    },
    "Entropy": {
        "entropy (nats per token)": lines("policy/entropy", "policy/entropy_p90"),
        "noise sigma": lines("aqn/sigma", "aqn/sigma_realized"),
    },
    "Sampler against trainer": {
        "gap (nats per token)": lines("gap/mean_abs", "gap/p99"),
        "gap by cause (nats per token)": lines("ledger/.*/mean_abs"),
        "canary (nats per token)": lines("canary/score_gap"),
    },
    "Update": {
        "norm of the gradient": lines("train/grad_norm"),
        "clipped shares": lines("policy/clipped_.*_share"),
        "learning rate": lines("lr-.*"),
    },
    "Cost": {
        "tokens per completion": lines("rollout/completion_tokens", "rollout/completion_tokens_max"),
        "seconds per phase": lines("time/.*_s"),
        "tokens per second": lines("throughput/.*"),
        "memory (GiB)": lines("memory/.*_gib"),
    },
}


class Dashboard(Callback):
    """Pins the curves that matter first in TensorBoard's Custom Scalars tab: reward, accuracy, entropy, gap.

    The Time Series tab has all curves by name. Weights & Biases and MLflow define such pages on their servers, so
    nothing is written to those loggers.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.dashboard.Dashboard
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(LAYOUT)
