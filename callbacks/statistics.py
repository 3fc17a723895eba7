"""What the rollouts were worth and how long they were."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from qerl_pl.module import QeRLModule


class RolloutStatistics(Callback):
    """Logs rewards (each component too), lengths, truncation, unscored rows and groups without signal."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = outputs["rollout"]
        table, completions = rollout.evaluation.table, rollout.evaluation.completions
        lengths = torch.tensor([float(len(completion.tokens)) for completion in completions])
        finished = torch.tensor([float(completion.finished) for completion in completions])
        pl_module.log("train/reward", table.total[table.scored].mean(), prog_bar=True)
        pl_module.log("train/reward_std", table.total[table.scored].std())
        for name, scores in table.components.items():
            pl_module.log(f"train/{name}", scores.nanmean())
        pl_module.log_dict(
            {
                "rollout/completion_tokens": lengths.mean(),
                "rollout/completion_tokens_max": lengths.max(),
                "rollout/truncated_share": 1 - finished.mean(),
                "rollout/unscored_share": 1 - table.scored.float().mean(),
                "rollout/groups_with_signal": rollout.evaluation.signal.float().mean(),
                "rollout/groups_discarded": float(len(rollout.evaluation.signal) - len(rollout.chosen.signal)),
                "rollout/refills": float(rollout.num_refills),
            }
        )
