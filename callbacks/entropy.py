"""Policy entropy: the curve, its quantiles and its histogram."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from qerl_pl.module import QeRLModule


class EntropyLogger(Callback):
    """Logs the entropy of the trained policy over the sampled tokens, in nats, at the sampling temperature.

    Those are the completions of the update: with dynamic sampling the groups that it kept.

    Args:
        quantiles: logged as ``policy/entropy_p90`` and so on.
        histogram_every: rollouts between two histograms (TensorBoard only); 0 turns them off.

    Raises:
        ValueError: a quantile outside [0, 1].

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.entropy.EntropyLogger
              init_args: {quantiles: [0.1, 0.5, 0.9], histogram_every: 10}
    """

    def __init__(self, quantiles: tuple[float, ...] = (0.5, 0.9, 0.99), histogram_every: int = 1) -> None:
        if bad := [q for q in quantiles if not 0 <= q <= 1]:
            raise ValueError(f"entropy quantiles {bad} are outside [0, 1]")
        self.quantiles = quantiles
        self.histogram_every = histogram_every

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        entropy = outputs["entropy"]  # [T] fp32
        if not len(entropy):
            return
        pl_module.log("policy/entropy", entropy.mean())
        ordered = entropy.sort().values  # torch.quantile takes at most 16 million values
        for q in self.quantiles:
            pl_module.log(f"policy/entropy_p{q * 100:g}", ordered[round(q * (len(ordered) - 1))])
        index = outputs["rollout_index"]
        if self.histogram_every and index % self.histogram_every == 0 and trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_histogram("policy/entropy_histogram", torch.as_tensor(entropy), index)
