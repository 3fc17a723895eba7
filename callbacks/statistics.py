"""What the rollouts were worth and how long they were."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.module import QeRLModule


class RolloutStatistics(Callback):
    """Logs rewards (each component too), lengths, truncation, unscored rows by cause and groups without signal.

    Over the rows of all ranks, those of groups that dynamic sampling dropped included.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.statistics.RolloutStatistics
    """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = outputs["rollout"]
        table, completions = rollout.evaluation.table, rollout.evaluation.completions
        lengths = torch.tensor([len(completion.tokens) for completion in completions])
        finished = torch.tensor([completion.finished for completion in completions])
        columns = (table.total, table.scored, lengths, finished, *table.components.values())
        rows = ranks.gather(torch.stack([column.float() for column in columns], dim=1))
        total, scored, lengths, finished, *components = rows.unbind(dim=1)
        rewards = total[scored.bool()]
        pl_module.log("train/reward", rewards.mean())
        pl_module.log("train/reward_std", rewards.std())
        for name, scores in zip(table.components, components, strict=True):
            pl_module.log(f"train/{name}", scores.nanmean())
        unscored = ranks.gather_values(table.causes())
        for cause in table.causes():
            pl_module.log(f"reward/unscored/{cause}", float(sum(counts[cause] for counts in unscored)))
        signal = ranks.gather(rollout.signal.float())
        discarded = len(signal) - sum(ranks.gather_values(rollout.chosen.num_groups))
        pl_module.log_dict(
            {
                "rollout/completion_tokens": lengths.mean(),
                "rollout/completion_tokens_max": lengths.max(),
                "rollout/truncated_share": 1 - finished.mean(),
                "rollout/unscored_share": 1 - scored.mean(),
                "rollout/groups_with_signal": signal.mean(),
                "rollout/groups_discarded": float(discarded),
                "rollout/refills": float(rollout.num_refills),
            }
        )
