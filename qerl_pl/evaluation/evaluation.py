"""Evaluate a policy on held-out prompts: sample and score, cache finished batches, and average over all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.metrics import Mean, Pooled, Stopwatch
from qerl_pl.common.types import Prompt
from qerl_pl.evaluation.cache import EvaluationCache
from qerl_pl.evaluation.pass_at_k import accuracy
from qerl_pl.rewards.base import have_weight
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.loop import RolloutLoop


class Evaluation:
    """One evaluation of a policy: a pass over held-out prompts, which collects one record per completion.

    Args:
        loop: samples and scores completions with the policy, which its engine holds.
        sampling: settings with which completions are sampled.
        seed: seed of sampling, which is the same for every batch of prompts.
        cache: cache of finished batches, to resume an interrupted evaluation; None: nothing is stored.
        device: device on which means are computed; the process group's collectives must run there.
    """

    def __init__(
        self, loop: RolloutLoop, sampling: Sampling, *, seed: int, cache: EvaluationCache | None, device: torch.device
    ) -> None:
        self._loop, self._sampling, self._seed, self._cache = loop, sampling, seed, cache
        self._rows: list[dict[str, Any]] = []
        rewarded = have_weight(loop.rewards)
        names = [*(term.name for term in loop.rewards), *(name for name in OF_ROWS if name != "reward" or rewarded)]
        self._means = {name: Mean().to(device) for name in names}
        self._pass_at_k = Pooled(self._mean_pass_at_k).to(device)
        self._add([])  # defines the means also on a rank that gets no prompts

    def score(self, prompts: list[Prompt]) -> list[dict[str, Any]]:
        """Return one record per completion of a batch of prompts, from the cache or newly sampled and scored."""
        num_rows = len(prompts) * self._sampling.num_completions
        rows = None if self._cache is None else self._cache.read(prompts, num_rows=num_rows)
        if rows is None:
            watch = Stopwatch()
            rows = self._loop.sample_and_score(prompts, sampling=self._sampling, seed=self._seed, watch=watch).rows()
            if self._cache is not None:
                self._cache.write(prompts, rows)
        self._add(rows)
        return rows

    def records(self) -> list[dict[str, Any]]:
        """Gather the records of all ranks, ordered as the prompts are. Every rank must call this method."""
        return ranks.gather_groups(self._rows, self._sampling.num_completions)

    def means(self) -> dict[str, Tensor]:
        """Average what was recorded of the completions of all ranks; returns scalars [] fp64 by name, and an empty dict
        if there are no completions. Every rank must call this method.

        The scalars are the mean of every reward (by its name) and of the weighted sum (``reward``), the mean length,
        the share of truncated completions, and the share of completions without a score. With several completions per
        problem there is also pass@k. For pass@k, a completion counts as right if the first reward in ``model.rewards``
        gives it 1, and as wrong if it has no score.
        """
        means = {name: metric.compute() for name, metric in self._means.items()}
        means |= self._pass_at_k.compute() if self._loop.rewards else {}
        return {} if means["completion_tokens"].isnan() else means

    def _mean_pass_at_k(self, num_right: Tensor) -> dict[str, Tensor]:
        values = accuracy(num_right, self._sampling.num_completions)
        return {name: value.mean() for name, value in values.items() if name.startswith("pass@")}

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        for name, metric in self._means.items():
            of_row = OF_ROWS.get(name, lambda row, name=name: row["rewards"][name] or 0.0)
            values = [of_row(row) for row in rows]
            metric.update(torch.tensor(values, dtype=torch.float64, device=metric.device))
        if not self._loop.rewards:
            return
        right = [row["rewards"][self._loop.rewards[0].name] == 1 for row in rows]
        self._pass_at_k.update(torch.tensor(right).view(-1, self._sampling.num_completions).sum(dim=1))


def warn_if_not_counted(rows: list[dict[str, Any]], name: str) -> None:
    """Warn if the first reward, whose ``name`` is given, gave completions of an evaluation more than 1, or positive
    values but never 1: a completion counts as right only if this reward is exactly 1."""
    values = [row["rewards"][name] or 0.0 for row in rows]
    if 1 not in values and any(value > 0 for value in values):
        fault, counts = "positive values and never 1", "are 0"
    elif any(value > 1 for value in values):
        fault, counts = "some completions more than 1", "count these completions as wrong"
    else:
        return
    rank_zero_warn(
        f"the reward {name}, the first of model.rewards, gives {fault}. Training is not affected, but pass@k and the "
        f"accuracy that `test` prints {counts}, because a completion counts as right in them only if this reward gives "
        "it 1; to measure them, list a reward first that gives right completions 1 (weight 0: it is only logged)"
    )


OF_ROWS: dict[str, Callable[[dict[str, Any]], float]] = {
    "reward": lambda row: row["reward"] or 0.0,
    "unscored_share": lambda row: float(row["reward"] is None),
    "truncated_share": lambda row: float(not row["finished"]),
    "completion_tokens": lambda row: float(row["num_tokens"]),
}
"""Functions that compute, from the record of a completion, the values that every evaluation averages, by name. Without
a reward that has a weight, "reward" is left out."""
