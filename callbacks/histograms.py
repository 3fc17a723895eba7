"""Log the distribution of the difference between the trainer's and the sampler's log-probabilities."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.common.loggers import decades, log_histogram
from qerl_pl.common.metrics import Pooled, over_ranks
from qerl_pl.module import QeRLModule

SMALLEST_GAP = 1e-8  # in nats; smaller differences of two fp32 log-probabilities are rounding errors


class GapHistograms(Callback):
    """Logs histograms of the gap and of the importance ratio, over the sampled tokens of all ranks.

    ``gap/log10_abs`` shows log10 |log p_trainer - log p_sampler|, the difference being in nats and at least 1e-8.
    ``gap/log10_ratio`` shows log10 (p_trainer / p_sampler). Both are taken before the first update on a rollout, and in
    logarithms because the values span many orders of magnitude. TensorBoard and Weights & Biases get them; other
    loggers take no histograms.

    Args:
        every: logs the histograms every so many rollouts.

    Raises:
        ValueError: ``every`` is less than 1.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.histograms.GapHistograms
              init_args: {every: 10}
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 (leave the callback out to log none)")
        self.every = every
        self._all = Pooled(lambda values: {"": values})

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        update, index = outputs["update"], outputs["rollout_index"]
        if index % self.every:
            return
        experience = update.experience
        log_ratio = over_ranks(self._all, (update.old_logprobs - experience.sampler_logprobs)[experience.sampled])[""]
        if trainer.is_global_zero:
            log_ratio = log_ratio[log_ratio.isfinite()]
            gaps = decades(log_ratio, smallest=SMALLEST_GAP)
            log_histogram(trainer.loggers, "gap/log10_abs", gaps, step=index)
            log_histogram(trainer.loggers, "gap/log10_ratio", log_ratio / math.log(10), step=index)
