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
from qerl_pl.policy.shaken import with_rounding
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


MARGIN = 4.0
"""Multiple of the trainer's own rounding errors above which an engine is wrong; right ones differ by about one."""
MOST = 4 * MARGIN
"""Largest multiple that one token counts as, so that no single token decides."""


class Gap(NamedTuple):
    """Difference of the log-probabilities of engine and trainer, means over tokens."""

    nats: float
    """|engine - trainer|."""
    rounding: float
    """Root mean square change of the trainer's value by other rounding errors, in nats."""
    excess: float
    """|engine - trainer| as a multiple of the rounding errors at the same token."""
    change: float = math.nan
    """|change| by the probe adapter in the trainer's value, in nats; nan in a comparison without one."""

    def is_wrong(self, tolerance: float) -> bool:
        """Return whether no right engine differs so much, given the nats that are right in any case; NaN is wrong."""
        return not (self.nats <= tolerance or self.excess <= MARGIN)


def gap_of(engine: Tensor, trainer: Tensor, rounding: Tensor, change: float = math.nan) -> Gap:
    """Compare N log-probabilities of an engine with the trainer's, [N] nats each, given the root mean square changes of
    the trainer's by other rounding errors and the mean change by the probe adapter."""
    difference, usual = (engine - trainer).abs(), rounding.mean()
    # an error that is small by chance, or because the token is certain, says little about the errors of an engine
    multiples = difference / (rounding + 0.1 * usual).clamp(min=1e-12)
    return Gap(difference.mean().item(), usual.item(), multiples.clamp(max=MOST).mean().item(), change)


def own_text(rows: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Join rows of tokens, repeated if they are too few, to a sequence of this many tokens."""
    return list(islice(cycle(chain.from_iterable(rows)), num_tokens))


def wrong_ones(gaps: Mapping[str, Gap], tolerance: float) -> list[str]:
    """Select the differences between engine and trainer that show a fault."""
    return [what for what, gap in gaps.items() if gap.is_wrong(tolerance)]


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
    dtype: torch.dtype,
    *,
    tokens: list[int],
    seed: int,
    strength: float | None,
    scores: bool,
) -> dict[str, Gap]:
    """Compare log-probabilities of engine and trainer; returns the differences by check.

    ``oracle`` is the engine of the trainer's model with the same noise, ``dtype`` the coarser one of engine and
    trainer, and ``tokens`` the text that is scored (with ``scores``) and whose prefixes are the prompts of the samples.
    No samples are compared with a ``strength`` of 0 or None; after a comparison of samples both engines have another
    adapter than the policy's. ``seed``, of probe adapter and rounding errors, must differ from the previous check's,
    whose prefixes may still be cached.
    """
    engine, gaps = loop.engine, {}
    oracle.load_adapter(policy.adapter_state())
    for what, adapter in ((WITH_ADAPTER, True), (WITHOUT_ADAPTER, False)) if scores else ():
        scored = torch.tensor(engine.score([tokens], adapter=adapter)[0])
        trainers, rounding = with_rounding(
            lambda copies, adapter=adapter: torch.tensor(oracle.score([tokens] * copies, adapter=adapter)),
            policy.causal_lm,
            dtype,
            seed=seed,
        )
        gaps[what] = gap_of(scored, trainers, rounding)
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

    The prefixes differ in length by two tokens: a stale prefix cache changes most the first tokens after a cached block
    (of 16 tokens or more).
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
    trainers, rounding = with_rounding(score, policy.causal_lm, dtype, seed=seed)
    engines = torch.tensor([completion.logprobs[0] for completion in completions])
    return gap_of(engines, trainers, rounding, (usual - trainers).abs().mean().item())
