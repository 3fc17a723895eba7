"""Log the policy's entropy: mean, quantiles and histogram."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common.loggers import decades, log_histogram
from qerl_pl.common.metrics import Pooled, over_ranks, quantile
from qerl_pl.module import QeRLModule

SMALLEST = 1e-8  # nats; the resolution of fp32 entropies


class EntropyLogger(Callback):
    """Logs the entropy of the trained policy over the sampled tokens, in nats, at the sampling temperature.

    It is taken over the completions of the update; with dynamic sampling, over those of the groups that were kept.

    Args:
        quantiles: quantiles over tokens, in [0, 1]; 0.9 is logged as ``policy/entropy_p90``.
        histogram_every: rollouts from one histogram of decimal logarithms to the next, ``policy/log10_entropy``
            (TensorBoard and Weights & Biases); 0 logs none.

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
        if histogram_every < 0:
            raise ValueError(f"histogram_every is {histogram_every}; expected 0 (none are logged) or more")
        self.quantiles = quantiles
        self.histogram_every = histogram_every
        self._metric = Pooled(self._statistics)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        update, index = outputs["update"], outputs["rollout_index"]
        statistics = over_ranks(self._metric, update.entropy[update.experience.sampled])
        entropy = statistics.pop("values")
        if not len(entropy):
            return
        pl_module.log_dict({f"policy/entropy{name}": value for name, value in statistics.items()})
        if self.histogram_every and index % self.histogram_every == 0 and trainer.is_global_zero:
            finite = entropy[entropy.isfinite()]
            log_histogram(trainer.loggers, "policy/log10_entropy", decades(finite, smallest=SMALLEST), step=index)

    def _statistics(self, entropy: Tensor) -> dict[str, Tensor]:
        """Statistics of the entropies of T tokens by suffix of the logged name, and the entropies [T] as "values"."""
        if not len(entropy):
            return {"values": entropy}
        ordered = entropy.sort().values
        quantiles = {f"_p{q * 100:g}": quantile(ordered, q) for q in self.quantiles}
        return {"values": entropy, "": entropy.mean(), **quantiles}
