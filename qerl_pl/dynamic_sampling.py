"""Dynamic sampling: groups whose rewards are all equal are replaced by further ones (DAPO)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from qerl_pl.evaluation import Evaluation
from qerl_pl.types import Prompt


@dataclass(frozen=True)
class DynamicSampling:
    """Sample further prompts until every group of the batch has a signal (arXiv 2503.14476, section 3.2).

    A refill is sampled with the noise of the rollout that it belongs to, from prompts that are a function of the run's
    seed and the rollout index. Nothing is carried from one rollout to the next, so a resume has nothing to restore.

    Args:
        max_refills: how often further prompts may be sampled for one rollout.
        when_short: what to do if the batch is not full then: stop with an "error", or train on the "smaller" batch.

    Raises:
        ValueError: ``max_refills`` is less than 1.
    """

    max_refills: int = 8
    when_short: Literal["error", "smaller"] = "smaller"

    def __post_init__(self) -> None:
        if self.max_refills < 1:
            raise ValueError(f"max_refills is {self.max_refills}; expected at least 1 (null: no dynamic sampling)")

    def fill(
        self,
        evaluation: Evaluation,
        more_prompts: Iterator[Prompt],
        sample: Callable[[Sequence[Prompt], int], Evaluation],
        *,
        batch_size: int,
    ) -> tuple[Evaluation, int]:
        """Sample until ``batch_size`` groups have a signal, the cap is reached, or the prompts run out.

        Args:
            evaluation: the batch as it was sampled first.
            more_prompts: further prompts.
            sample: samples and scores prompts; the second argument counts the refills from 1.
            batch_size: groups wanted, P.

        Returns:
            Everything that was sampled, and the number of refills.
        """
        for refill in range(1, self.max_refills + 1):
            found = int(evaluation.signal.sum())
            if found >= batch_size:
                return evaluation, refill - 1
            # As many as the share of groups with signal so far asks for, at most a whole batch.
            size = math.ceil((batch_size - found) * len(evaluation.signal) / found) if found else batch_size
            prompts = list(islice(more_prompts, min(size, batch_size)))
            if not prompts:
                return evaluation, refill - 1
            evaluation += sample(prompts, refill)
        return evaluation, self.max_refills

    def choose(self, evaluation: Evaluation, *, batch_size: int) -> Evaluation:
        """The first ``batch_size`` groups with signal. Where none has one, one group: a batch cannot be empty.

        Raises:
            RuntimeError: there are fewer and ``when_short`` is "error".
        """
        chosen = evaluation.signal.nonzero().flatten()[:batch_size]
        if len(chosen) < batch_size and self.when_short == "error":
            raise RuntimeError(
                f"dynamic sampling found {len(chosen)} groups with differing rewards among {len(evaluation.signal)}, "
                f"and a batch needs {batch_size}: the problems are too easy or too hard for the policy; change the "
                "data, raise model.dynamic_sampling.max_refills, or set when_short to smaller"
            )
        return evaluation.select(chosen if len(chosen) else torch.arange(1))
