"""The rollout loop: sync the engine, sample, score, compare within groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.advantages import Baseline, group_advantages, has_signal
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rewards.base import RewardTable, WeightedReward, score_rewards
from qerl_pl.rollout.base import RolloutEngine, Sampling
from qerl_pl.rollout.collate import collate
from qerl_pl.stopwatch import Stopwatch
from qerl_pl.types import Completion, Experience, Prompt


@dataclass(frozen=True)
class Evaluation:
    """Sampled and scored completions. P prompts, G completions each, B = P * G rows ordered by prompt."""

    prompts: tuple[Prompt, ...]
    """[B] the prompt of each row."""
    completions: tuple[Completion, ...]
    """[B] with their text."""
    table: RewardTable
    """[B] rewards."""
    prompt_texts: tuple[str, ...]
    """[B] the prompts decoded, special tokens included."""

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready record a row."""
        return [
            {
                "prompt": self.prompt_texts[row],
                "completion": completion.text,
                "answer": self.prompts[row].answer,
                "reward": self.table.total[row].item() if self.table.scored[row] else None,
                "rewards": {
                    name: None if scores[row].isnan() else scores[row].item()
                    for name, scores in self.table.components.items()
                },
                "num_tokens": len(completion.tokens),
                "finished": completion.finished,
            }
            for row, completion in enumerate(self.completions)
        ]


@dataclass(frozen=True)
class Rollout:
    """Scored completions made into training data."""

    evaluation: Evaluation
    experience: Experience
    signal: Tensor
    """[P] bool, True for groups whose rewards differ."""
    num_noisy_norms: int
    """Norm weights that the engine sampled with noise on."""


class RolloutLoop:
    """Makes experience out of prompts.

    The engine's state before each rollout is a function of the adapter and the noise alone, both given to ``sync``
    right before sampling, so a resumed run needs nothing else.

    Args:
        engine: what samples.
        rewards: what completions are worth.
        tokenizer: of the base, to decode completions.
        baseline: what a reward is compared with inside its group.
        filter_truncated: leave completions that were cut off at max_tokens out of the loss (DAPO's overlong filtering).
        max_unscored_share: above this share of rows that no reward could score the run stops.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: Sequence[WeightedReward],
        tokenizer: PreTrainedTokenizerBase,
        *,
        baseline: Baseline = "normalized",
        filter_truncated: bool = False,
        max_unscored_share: float = 0.05,
    ) -> None:
        self.engine = engine
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.baseline: Baseline = baseline
        self.filter_truncated = filter_truncated
        self.max_unscored_share = max_unscored_share
        self.observers: list[Callable[[Rollout], None]] = []
        """Called with each training rollout, before the update, while the engine still holds what it was sampled with.
        An observer may use the engine and leaves it as it found it."""

    def sync(self, adapter: Mapping[str, Tensor], noise: NormNoise) -> int:
        """Make the engine sample from this adapter with this noise; returns how many norms carry noise."""
        self.engine.wake()
        self.engine.load_adapter(adapter)
        return self.engine.set_norm_noise(noise.sigma, noise.seed)

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        adapter: Mapping[str, Tensor],
        noise: NormNoise,
        sampling: Sampling,
        seed: int,
        watch: Stopwatch,
    ) -> Rollout:
        """One rollout of training data.

        Args:
            prompts: [P].
            adapter: the trainer's current adapter.
            noise: of this rollout.
            sampling: how.
            seed: of this rollout's sampling.
            watch: gets the seconds of the phases sync, rollout, reward and, where there are observers, check.

        Raises:
            RuntimeError: too many rows could not be scored.
        """
        with watch.phase("sync"):
            num_noisy_norms = self.sync(adapter, noise)
        evaluation = self.evaluate(prompts, sampling=sampling, seed=seed, watch=watch)
        table = evaluation.table
        unscored = 1 - table.scored.float().mean().item()
        if unscored > self.max_unscored_share:
            raise RuntimeError(
                f"{unscored:.1%} of the completions could not be scored, more than max_unscored_share "
                f"({self.max_unscored_share:.1%}): look at the answers of these prompts, or raise the limit"
            )
        shape = len(prompts), sampling.num_completions
        rewards, scored = table.total.view(shape), table.scored.view(shape)
        finished = torch.tensor([completion.finished for completion in evaluation.completions])
        experience = collate(
            evaluation.prompts,
            evaluation.completions,
            rewards=table.total,
            scored=table.scored,
            advantages=group_advantages(rewards, scored, self.baseline).flatten(),
            in_loss=table.scored & (finished | (not self.filter_truncated)),
        )
        rollout = Rollout(
            evaluation=evaluation,
            experience=experience,
            signal=has_signal(rewards, scored),
            num_noisy_norms=num_noisy_norms,
        )
        for observe in self.observers:
            with watch.phase("check"):
                observe(rollout)
        self.engine.sleep()
        return rollout

    def evaluate(self, prompts: Sequence[Prompt], *, sampling: Sampling, seed: int, watch: Stopwatch) -> Evaluation:
        """Sample from whatever the engine holds and score it."""
        with watch.phase("rollout"):
            groups = self.engine.generate([prompt.tokens for prompt in prompts], sampling, seed)
        with watch.phase("reward"):
            texts = self.tokenizer.batch_decode([list(prompt.tokens) for prompt in prompts], skip_special_tokens=False)
            rows = [
                (prompt, text, completion)
                for prompt, text, group in zip(prompts, texts, groups, strict=True)
                for completion in group
            ]
            decoded = self.tokenizer.batch_decode([list(row[2].tokens) for row in rows], skip_special_tokens=True)
            completions = [replace(row[2], text=text) for row, text in zip(rows, decoded, strict=True)]
            repeated = [row[0] for row in rows]
            table = score_rewards(self.rewards, repeated, completions)
        return Evaluation(tuple(repeated), tuple(completions), table, tuple(row[1] for row in rows))
