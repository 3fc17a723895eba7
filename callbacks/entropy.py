"""Log the policy's entropy: mean and quantiles."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common.metrics import Pooled, over_ranks, quantile
from qerl_pl.module import QeRLModule


class EntropyLogger(Callback):
    """Logs the entropy of the trained policy's distribution at the sampled tokens, in nats, at the sampling
    temperature: mean and quantiles over the tokens of all ranks.

    The tokens are those of the completions that the update trains on, so groups that dynamic sampling dropped do not
    count.

    Args:
        quantiles: quantiles over tokens, in [0, 1]; 0.9 is logged as ``policy/entropy_p90``.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.entropy.EntropyLogger
              init_args: {quantiles: [0.1, 0.5, 0.9]}
    """

    def __init__(self, quantiles: tuple[float, ...] = (0.5, 0.9, 0.99)) -> None:
        if bad := [q for q in quantiles if not 0 <= q <= 1]:
            raise ValueError(f"entropy quantiles {bad} are outside [0, 1]")
        self.quantiles = quantiles
        self._metric = Pooled(self._statistics)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        update = outputs["update"]
        statistics = over_ranks(self._metric, update.entropy[update.experience.sampled])
        pl_module.log_dict({f"policy/entropy{name}": value for name, value in statistics.items()})

    def _statistics(self, entropy: Tensor) -> dict[str, Tensor]:
        """Compute mean and quantiles of the entropies [T], in nats, by the suffix of ``policy/entropy`` under which
        they are logged, such as "" and "_p90"; empty if T is 0."""
        if not len(entropy):
            return {}
        ordered = entropy.sort().values
        quantiles = {f"_p{q * 100:g}": quantile(ordered, q) for q in self.quantiles}
        return {"": entropy.mean(), **quantiles}
