"""Log rewards and lengths of the rollouts."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.metrics import Mean, Pooled, over_ranks, total
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.common import all_logprobs


class RolloutStatistics(Callback):
    """Logs statistics of each rollout: rewards (each, and their weighted sum), lengths, share of truncated completions,
    number of completions without a score by cause, and share of groups whose rewards differ.

    ``rollout/surprisal`` is the mean of -log p of the sampled tokens under the policy that sampled them, in nats. It
    estimates the entropy of the sampling policy, including noise; ``policy/entropy`` is the entropy without noise.

    A reward may log numbers by the function ``log_metric``, which it gets as an argument, as in TRL. They are logged as
    ``reward/NAME``, averaged over calls and ranks.

    The statistics cover the completions of all ranks, including groups that dynamic sampling dropped. A statistic that
    a rollout does not define, such as the mean of a reward that scored no completion, is not logged for that rollout.
    """

    def __init__(self) -> None:
        self._mean, self._sum = Mean(), total()
        self._rewards = Pooled(reward_statistics)
        self._lengths = Pooled(lambda lengths: {"": lengths.mean(), "_max": lengths.max()})

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        rollout = outputs["rollout"]
        table, completions = rollout.sampled.table, rollout.sampled.completions

        def mean(values: Tensor) -> Tensor:
            return over_ranks(self._mean, values)

        def number(value: float) -> Tensor:
            return over_ranks(self._sum, torch.tensor(float(value)))

        rewards = over_ranks(self._rewards, table.total[table.scored]) if table.rewarded else {}
        logged = {f"train/reward{name}": value for name, value in rewards.items()}
        means = {name: mean(scores[~scores.isnan()]) for name, scores in table.components.items()}
        logged |= {f"train/{name}": value for name, value in means.items() if not value.isnan()}
        if table.components:
            logged |= {f"reward/unscored/{cause}": number(count) for cause, count in table.causes().items()}
        logged["rollout/surprisal"] = -mean(all_logprobs(completions))
        lengths = torch.tensor([float(len(completion.tokens)) for completion in completions])
        for name, value in over_ranks(self._lengths, lengths).items():
            logged[f"rollout/completion_tokens{name}"] = value
        finished = torch.tensor([float(completion.finished) for completion in completions])
        logged["rollout/truncated_share"] = mean(1 - finished)
        logged["rollout/unscored_share"] = mean(1 - table.scored.float())
        if table.rewarded:
            logged["rollout/groups_with_signal"] = mean(rollout.sampled.has_signal.float())
        logged["rollout/groups_discarded"] = number(rollout.num_dropped)
        trained = outputs["update"].with_gradient.view(-1, pl_module.sampling.num_completions).any(dim=1)
        logged["rollout/groups_trained"] = number(trained.sum().item())
        logged["rollout/refills"] = float(rollout.num_refills)
        everywhere = ranks.gather_values(dict(table.metrics))
        for name in sorted({name for metrics in everywhere for name in metrics}):
            values = [value for metrics in everywhere for value in metrics.get(name, ())]
            logged[f"reward/{name}"] = sum(values) / len(values)
        pl_module.log_dict(logged)


def reward_statistics(rewards: Tensor) -> dict[str, Tensor]:
    """Compute the mean and the unbiased standard deviation of N finite rewards in fp64. Returns scalars by the suffix
    of the metric name under which they are logged: "" for the mean (not if N is 0) and "_std" for the standard
    deviation (not if N is below 2)."""
    values = rewards.double()
    return ({"": values.mean()} if len(values) else {}) | ({"_std": values.std()} if len(values) > 1 else {})
