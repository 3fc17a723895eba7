"""Rollout loop: give the engine the current adapter, sample, score, and compute advantages within groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Experience, Prompt
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.objective.advantages import AdvantageFunction, Baseline, batch_std, group_advantages
from qerl_pl.quant.experts import Routing
from qerl_pl.rewards.base import WeightedReward, score_rewards
from qerl_pl.rewards.calling import Progress
from qerl_pl.rollout.base import RolloutEngine, Sampling, check_groups, checked_routes
from qerl_pl.rollout.common import with_due_seeds
from qerl_pl.rollout.decode import check_ends, completion_texts
from qerl_pl.rollout.dynamic_sampling import DynamicSampling
from qerl_pl.rollout.scored import ScoredBatch, collate


@dataclass(frozen=True)
class Rollout:
    """Result of one rollout: all scored completions, and the training data made from them."""

    sampled: ScoredBatch
    """All completions that this rank sampled."""
    chosen: ScoredBatch
    """Completions that this rank trains on: all of ``sampled`` or, with dynamic sampling, the groups that dynamic
    sampling assigned to this rank."""
    places: list[int]
    """Index of each group (the completions of one prompt) of ``chosen`` among the groups that all ranks train on."""
    experience: Experience
    """The rows of ``chosen`` as tensors."""
    num_refills: int
    """Number of times that dynamic sampling sampled further prompts."""
    num_dropped: int
    """Number of groups that this rank sampled, minus the number that it trains on. The sum over the ranks is the number
    of groups that dynamic sampling dropped."""
    num_noisy_norms: int
    """Number of norms whose weights had noise during sampling."""


@dataclass(eq=False)
class RolloutLoop:
    """Loop that samples completions of prompts, scores them by reward functions and turns them into tensors for
    training.

    Before each rollout, ``sync`` sets the engine's adapter and the noise on its norm weights. The engine has no other
    state that affects sampling, so a resumed run does not have to restore any. Speculative decoding is an exception:
    ``callbacks/draft_guard.py`` restores the counts that decide how many tokens are drafted.

    Args:
        engine: rollout engine.
        rewards: reward functions with their weights.
        tokenizer: tokenizer of the base, which decodes completions.
        baseline: rule by which advantages are computed from the rewards of a group.
        filter_truncated: leave completions that were cut off at max_tokens out of the loss (DAPO's overlong filtering).
        dynamic_sampling: settings by which groups whose advantages are all 0 are replaced; None keeps such groups.
        max_unscored_share: stop the run if a larger share of completions has no score, because a reward with a weight
            other than 0 could not score them.
    """

    engine: RolloutEngine
    rewards: Sequence[WeightedReward]
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    baseline: Baseline | AdvantageFunction = "normalized"
    filter_truncated: bool = False
    dynamic_sampling: DynamicSampling | None = None
    max_unscored_share: float = 0.05
    progress: Progress = field(default=Progress(), init=False)
    """Progress of the run, such as the number of steps, which reward functions may read; the LightningModule sets it
    before each rollout."""
    end_tokens: Sequence[int] = field(default=(), init=False)
    """Tokens that end a completion; the LightningModule sets them when the engine starts."""
    routing: Routing | None = field(default=None, init=False)
    """Sizes of a mixture-of-experts model, if training uses the experts that the engine chose for each token, so that
    the engine must return these experts with each completion; else None. The LightningModule sets it when the engine
    starts."""
    observers: list[Callable[[Rollout], None]] = field(default_factory=list, init=False)
    """Functions that are called with each training rollout before the update, while the engine is awake and holds the
    adapter and noise of the rollout. They may use the engine, but must leave its adapter and noise unchanged."""

    def sync(self, adapter: Mapping[str, Tensor], noise: NormNoise) -> int:
        """Wake the engine, give it ``adapter``, and replace the noise on its norm weights by ``noise``; returns the
        number of norms that have noise, as read back from the engine."""
        self.engine.wake()
        self.engine.load_adapter(adapter)
        return self.engine.set_norm_noise(noise)

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        more_prompts: Iterator[Prompt],
        adapter: Mapping[str, Tensor],
        noise: NormNoise,
        sampling: Sampling,
        seed: int,
        watch: Stopwatch,
    ) -> Rollout:
        """Sample the completions of one training step, score them by the rewards, and return them with the tensors to
        train on. Every rank must call this method with prompts of its own, as many as the other ranks have. ``seed``
        and ``more_prompts``, from which dynamic sampling takes further prompts, must be equal on all ranks. ``watch``
        measures the seconds of the phases "sync", "rollout", "reward", "wait" (for slower ranks) and, if there are
        observers, "check".

        Raises CheckFailed if a larger share of completions than ``max_unscored_share`` could not be scored, if dynamic
        sampling did not fill the batch and its setting ``when_short`` is "error", or if the engine's report of whether
        a completion is finished contradicts the completion's tokens.
        """
        with watch.phase("sync"):
            num_noisy_norms = self.sync(adapter, noise)
        # The batch and the prompts that dynamic sampling adds can have the same seed, because the engine derives each
        # completion's seed from this seed and the prompt.
        settings = {"sampling": sampling, "seed": derive_seed(seed, "refill"), "baseline": self.baseline}
        sample = partial(self.sample_and_score, **settings, watch=watch)
        num_refills, num_dropped, in_loss = 0, 0, True
        if self.dynamic_sampling is not None:
            sampled, num_refills = self.dynamic_sampling.fill(prompts, more_prompts, sample, watch)
            with watch.phase("wait"):
                same_noise = len(set(ranks.gather_values(noise if noise.sigma > 0 else None))) == 1
                batch_size = len(prompts) * ranks.num_ranks()
                with_signal, places = self.dynamic_sampling.choose(sampled, batch_size=batch_size, may_move=same_noise)
            # A batch must not be empty: a rank without groups to train on keeps one, and leaves it out of the loss.
            in_loss, chosen = with_signal is not None, with_signal or sampled.select(torch.arange(1))
            num_dropped = sampled.num_groups - len(places)
            places = places or [0]
        else:
            sampled = chosen = sample(prompts)
            places = list(ranks.own_places(len(prompts)))
        with watch.phase("wait"):
            unscored = 1 - ranks.gather(sampled.table.scored.float()).mean().item()
            if unscored > self.max_unscored_share:
                reasons = ranks.gather_values(sampled.table.common_reason())
                raise CheckFailed(
                    f"{unscored:.1%} of the completions could not be scored, more than max_unscored_share "
                    f"({self.max_unscored_share:.1%}); the most frequent reason: {next(filter(None, reasons))}. Look "
                    "at the answers of these prompts, or raise the limit"
                )
        experience = self._experience(chosen, in_loss=in_loss)
        rollout = Rollout(sampled, chosen, places, experience, num_refills, num_dropped, num_noisy_norms)
        for observe in self.observers:
            with watch.phase("check"):
                observe(rollout)
        self.engine.sleep()
        return rollout

    def sample_and_score(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        seed: int,
        watch: Stopwatch,
        baseline: Baseline | AdvantageFunction = "centered",
    ) -> ScoredBatch:
        """Sample completions of prompts with the engine's current adapter and noise, and score them by the rewards.
        ``baseline`` is the rule of advantages by which ``ScoredBatch.has_signal`` is computed; "centered" also works
        for groups of one completion."""
        seeds: int | list[int] = seed
        if any(prompt.copy for prompt in prompts):
            seeds = [derive_seed(seed, "copy", prompt.copy) if prompt.copy else seed for prompt in prompts]
        with watch.phase("rollout"):
            tokens = [prompt.tokens for prompt in prompts]
            groups = self.engine.generate(tokens, sampling, seeds)
            engine = type(self.engine).__name__
            check_groups(groups, prompts, sampling, engine=engine)
            ends = {"end_tokens": self.end_tokens, "tokenizer": self.tokenizer}
            check_ends(groups, prompts, sampling, **ends, engine=engine)
            groups = with_due_seeds(groups, tokens, seeds)
            if self.routing:
                groups = checked_routes(groups, tokens, self.routing, engine=engine)
        with watch.phase("reward"):
            texts = self.tokenizer.batch_decode([list(prompt.tokens) for prompt in prompts], skip_special_tokens=False)
            size = sampling.num_completions
            completions = [completion for group in groups for completion in group]
            decoded = completion_texts(self.tokenizer, completions, stop=sampling.stop)
            completions = [replace(row, text=text) for row, text in zip(completions, decoded, strict=True)]
            repeated = [prompt for prompt in prompts for _ in range(size)]
            table = score_rewards(self.rewards, repeated, completions, seed=seed, progress=self.progress)
        return ScoredBatch.of(
            repeated,
            [text for text in texts for _ in range(size)],
            completions,
            table,
            size,
            filter_truncated=self.filter_truncated,
            baseline=baseline,
            metric=None if self.dynamic_sampling is None else self.dynamic_sampling.metric,
        )

    def _experience(self, chosen: ScoredBatch, *, in_loss: bool) -> Experience:
        std_of_batch = None
        if self.baseline == "batch_normalized":
            std_of_batch = batch_std(ranks.gather(chosen.rewards[chosen.scored & in_loss]))
        return collate(
            chosen.prompts,
            chosen.completions,
            scored=chosen.table.scored,
            advantages=group_advantages(
                chosen.rewards, chosen.scored, self.baseline, std_of_batch=std_of_batch
            ).flatten(),
            in_loss=chosen.in_loss & in_loss,
        )
