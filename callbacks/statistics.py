"""Log rewards and lengths of the rollouts."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.metrics import Mean, Pooled, over_ranks, total
from qerl_pl.module import QeRLModule


class RolloutStatistics(Callback):
    """Logs rewards (their sum and each one), lengths, truncation, unscored rows by cause, and groups whose rewards
    differ.

    ``rollout/surprisal`` is the mean of -log p of the sampled tokens under the policy that sampled them, in nats. It
    estimates the entropy of the sampling policy, including noise; ``policy/entropy`` is that of the clean policy.

    Numbers that rewards log by TRL's ``log_metric`` are logged as ``reward/NAME``, averaged over calls and ranks.

    The statistics cover the rows of all ranks, including groups that dynamic sampling dropped. One that a rollout does
    not define, such as the mean of a reward that scored no row, is not logged for it.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.statistics.RolloutStatistics
    """

    def __init__(self) -> None:
        self._mean, self._sum = Mean(), total()
        self._rewards = Pooled(reward_statistics)
        self._lengths = Pooled(lambda lengths: {"": lengths.mean(), "_max": lengths.max()})

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = outputs["rollout"]
        table, completions = rollout.sampled.table, rollout.sampled.completions
        logged = {
            f"train/reward{name}": value for name, value in over_ranks(self._rewards, table.total[table.scored]).items()
        }
        for name, scores in table.components.items():
            mean = over_ranks(self._mean, scores[~scores.isnan()])
            logged |= {} if mean.isnan() else {f"train/{name}": mean}
        for cause, count in table.causes().items():
            logged[f"reward/unscored/{cause}"] = over_ranks(self._sum, torch.tensor(float(count)))
        logprobs = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
        logged["rollout/surprisal"] = -over_ranks(self._mean, logprobs)
        lengths = torch.tensor([float(len(completion.tokens)) for completion in completions])
        for name, value in over_ranks(self._lengths, lengths).items():
            logged[f"rollout/completion_tokens{name}"] = value
        finished = torch.tensor([float(completion.finished) for completion in completions])
        logged["rollout/truncated_share"] = over_ranks(self._mean, 1 - finished)
        logged["rollout/unscored_share"] = over_ranks(self._mean, 1 - table.scored.float())
        logged["rollout/groups_with_signal"] = over_ranks(self._mean, rollout.sampled.has_signal.float())
        discarded = torch.tensor(float(len(rollout.sampled.has_signal) - rollout.chosen.num_groups))
        logged["rollout/groups_discarded"] = over_ranks(self._sum, discarded)
        trained = outputs["update"].with_gradient.view(-1, pl_module.sampling.num_completions).any(dim=1)
        logged["rollout/groups_trained"] = over_ranks(self._sum, trained.sum().float().cpu())
        logged["rollout/refills"] = float(rollout.num_refills)
        everywhere = ranks.gather_values(dict(table.metrics))
        for name in sorted({name for metrics in everywhere for name in metrics}):
            values = [value for metrics in everywhere for value in metrics.get(name, ())]
            logged[f"reward/{name}"] = sum(values) / len(values)
        pl_module.log_dict(logged)


def reward_statistics(rewards: Tensor) -> dict[str, Tensor]:
    """Compute mean and unbiased std of N finite rewards in fp64, by suffix of the logged name; of no reward there is no
    mean, of one no std."""
    values = rewards.double()
    statistics = {"": values.mean, "_std": values.std}
    return {
        name: compute() for least, (name, compute) in enumerate(statistics.items(), start=1) if len(values) >= least
    }
