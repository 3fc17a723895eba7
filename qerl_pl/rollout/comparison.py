"""Compare the log-probabilities of a rollout engine with the trainer's: scores, and samples under a probe adapter.

How far two right implementations are apart depends on the model, its dtype and the tokens. The trainer therefore
measures it on the same tokens, with its own model alone (``policy.shaken``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor

from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.shaken import MARGIN, with_rounding
from qerl_pl.rollout.base import RolloutEngine, Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.rollout.probe import probe_adapter

# two completions per prompt, as rollouts have several
ONE_TOKEN = Sampling(num_completions=2, max_tokens=1, temperature=1.0)
NUM_PROMPTS = 16

WITH_ADAPTER = "scores with the adapter"
WITHOUT_ADAPTER = "scores without the adapter"
PROBE = "samples after another adapter was loaded (it is not used, or cached prefixes are those of an older policy)"


class Gap(NamedTuple):
    """Difference of the log-probabilities of two implementations, in nats, means over tokens."""

    nats: float
    """Mean |engine - trainer|."""
    rounding: float
    """Mean over tokens of the root mean square by which other rounding errors change the trainer's own values."""
    change: float = math.inf
    """Mean |change| by the probe adapter in the trainer's values; infinite in a comparison without one."""

    def limit(self, tolerance: float) -> float:
        """Return the largest difference of right implementations; infinite if the rounding errors are so large that
        nothing can be said.

        An engine that ignores the probe adapter differs by all of the change, and one that uses it in part by a part.

        Args:
            tolerance: difference in nats that is right whatever the rounding errors are, unless it is more than half of
                the change.
        """
        right, half = MARGIN * self.rounding, self.change / 2
        return math.inf if right > half else min(max(right, tolerance), half)


def own_text(rows: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Join rows of tokens, repeated if they are too few, to a sequence of this many tokens."""
    return list(islice(cycle(chain.from_iterable(rows)), num_tokens))


def too_far(gaps: Mapping[str, Gap], tolerance: float) -> dict[str, float]:
    """Select the differences between engine and trainer that show a fault; returns the limit that each exceeds, in
    nats."""
    limits = {what: gap.limit(tolerance) for what, gap in gaps.items()}
    return {what: limit for what, limit in limits.items() if not gaps[what].nats <= limit}


@contextmanager
def trainers_engine(policy: Policy, noise: NormNoise, *, max_model_len: int) -> Iterator[TransformersEngine]:
    """Give an engine of the trainer's model, with this noise, to compare another engine with."""
    oracle = TransformersEngine()
    oracle.start(policy, max_model_len=max_model_len)
    try:
        oracle.set_norm_noise(noise)
        yield oracle
    finally:
        oracle.close()


def score_gaps(
    loop: RolloutLoop,
    oracle: TransformersEngine,
    policy: Policy,
    tokens: list[int],
    dtype: torch.dtype,
    *,
    seed: int,
    strength: float | None,
    scores: bool,
) -> dict[str, Gap]:
    """Compare log-probabilities of engine and trainer; returns the differences by check.

    After a comparison of samples, the loop's engine and the oracle have another adapter than the policy's.

    Args:
        loop: rollout loop whose engine holds the policy.
        oracle: engine of the trainer's model, with the same noise.
        policy: the trainer's policy.
        tokens: tokens that are scored, and whose prefixes are the prompts of the samples.
        dtype: dtype whose rounding errors are measured: the coarser one of engine and trainer.
        seed: seed of the probe adapter and of rounding errors; it must differ from the previous check's, whose prefixes
            may still be cached.
        strength: strength of the probe adapter; 0 or None: no samples are compared.
        scores: compare the scores of ``tokens``.
    """
    engine, gaps = loop.engine, {}
    oracle.load_adapter(policy.adapter_state())
    for what, adapter in ((WITH_ADAPTER, True), (WITHOUT_ADAPTER, False)) if scores else ():
        found = torch.tensor(engine.score([tokens], adapter=adapter)[0])
        own, rounding = with_rounding(
            lambda copies, adapter=adapter: torch.tensor(oracle.score([tokens] * copies, adapter=adapter)),
            policy.causal_lm,
            dtype,
            seed=seed,
        )
        gaps[what] = Gap(_mean_gap(found, own), rounding)
    if strength:
        gaps[PROBE] = probe_gap(engine, oracle, policy, tokens, dtype, seed=seed, strength=strength)
    return gaps


def probe_gap(
    engine: RolloutEngine,
    oracle: TransformersEngine,
    policy: Policy,
    tokens: list[int],
    dtype: torch.dtype,
    *,
    seed: int,
    strength: float,
) -> Gap:
    """Sample one token after each of several prefixes of ``tokens`` with a probe adapter; compare its log-probability
    in engine and oracle, which have the policy's adapter before and the probe adapter afterwards.

    The arguments are those of ``score_gaps``. The prefixes differ in length by two tokens: a stale prefix cache changes
    most the first tokens after a cached block (of 16 tokens or more).
    """
    prompts = [tokens[:-shorter] for shorter in range(1, min(2 * NUM_PROMPTS, len(tokens)), 2)]
    adapter = probe_adapter(policy, strength=strength, seed=seed)
    engine.generate(prompts[:1], ONE_TOKEN, 0)  # caches prefixes under the old adapter; must be dropped
    engine.load_adapter(adapter)
    completions = [group[-1] for group in engine.generate(prompts, ONE_TOKEN, 0)]
    lengths, sampled = [len(prompt) for prompt in prompts], [completion.tokens[0] for completion in completions]

    def score(copies: int) -> Tensor:
        return oracle.score_next(tokens, lengths, sampled, copies=copies)

    [usual] = score(1)
    oracle.load_adapter(adapter)
    own, rounding = with_rounding(score, policy.causal_lm, dtype, seed=seed)
    found = torch.tensor([completion.logprobs[0] for completion in completions])
    return Gap(_mean_gap(found, own), rounding, _mean_gap(usual, own))


def _mean_gap(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().mean().item()
