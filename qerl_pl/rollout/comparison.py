"""Compare log-probabilities that a rollout engine reports with those that the trainer computes: for the tokens of a
given text, and for tokens that the engine samples with a random adapter (the probe adapter).

Correct implementations differ by rounding errors. The trainer estimates their size on the same tokens: it computes
log-probabilities again with random rounding errors added (``policy.shaken``).
"""

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
LAST = 2 * NUM_PROMPTS - 1  # tokens of the text that the shortest prefix leaves out

WITH_ADAPTER = "scores with the adapter"
WITHOUT_ADAPTER = "scores without the adapter"
PROBE = "samples after another adapter was loaded (it is not used, or cached prefixes are those of an older policy)"


MARGIN = 4.0
"""Difference between engine and trainer, as a multiple of the trainer's rounding errors, above which an engine counts
as wrong, if the difference also exceeds a tolerance in nats. For correct engines, this multiple is about 1."""
MOST = 4 * MARGIN
"""Upper limit of the difference at one token, as a multiple of the rounding errors there. Larger differences are
lowered to this limit, so that no single token decides the mean."""


class Gap(NamedTuple):
    """Difference between rollout engine and trainer in the log-probabilities of the same tokens; means over tokens."""

    nats: float
    """Absolute difference |engine - trainer| in nats."""
    rounding: float
    """Root mean square change of the trainer's log-probability by random rounding errors, in nats."""
    excess: float
    """Absolute difference |engine - trainer| as a multiple of the rounding errors at the token, at most ``MOST``."""
    change: float = math.nan
    """Absolute change of the trainer's log-probability by the probe adapter, in nats; nan without a probe adapter."""

    def is_wrong(self, tolerance: float) -> bool:
        """Return whether engine and trainer differ by more than a correct engine can: the difference is NaN, or it is
        more than ``tolerance`` nats and also more than ``MARGIN`` times what rounding errors cause."""
        return not (self.nats <= tolerance or self.excess <= MARGIN)


def gap_of(engine: Tensor, trainer: Tensor, rounding: Tensor, change: float = math.nan) -> Gap:
    """Compare the log-probabilities of N tokens by a rollout engine with those by the trainer, [N] each in nats;
    returns the means over tokens of |engine - trainer|, in nats and as a multiple of the token's rounding errors.
    ``rounding`` [N] is, for each token, the root mean square change of the trainer's log-probability by random rounding
    errors, in nats. ``change`` is the mean absolute change of the trainer's log-probabilities by the probe adapter
    (``probe.py``), if there is one."""
    difference, usual = (engine - trainer).abs(), rounding.mean()
    # At some tokens the trainer's rounding error, by which the difference is divided, is tiny by chance or because the
    # token is nearly certain, but the engine's error is not. A tenth of the mean rounding error is added, so that the
    # quotient stays small at these tokens.
    multiples = difference / (rounding + 0.1 * usual).clamp(min=1e-12)
    return Gap(difference.mean().item(), usual.item(), multiples.clamp(max=MOST).mean().item(), change)


def own_text(rows: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Make the text on which engine and trainer are compared from rows of tokens of the run (prompts with or without
    completions): concatenate all rows in reverse order, so that the first row comes last, and return the last
    ``num_tokens`` tokens. If the rows have fewer tokens in all, they are repeated."""
    backwards = cycle(chain.from_iterable(map(reversed, rows)))
    return list(islice(backwards, num_tokens))[::-1]


def wrong_ones(gaps: Mapping[str, Gap], tolerance: float) -> list[str]:
    """Return the names of the comparisons in which the engine's difference from the trainer is a fault."""
    return [what for what, gap in gaps.items() if gap.is_wrong(tolerance)]


@contextmanager
def trainers_engine(policy: Policy, noise: NormNoise, *, max_model_len: int) -> Iterator[TransformersEngine]:
    """Yield a rollout engine that uses the trainer's own model, with the given noise on norm weights: the reference
    with which another engine is compared."""
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
    """Compare log-probabilities of the rollout engine of ``loop`` with those of ``oracle``, an engine that uses the
    trainer's model with the same noise on norm weights. Returns a ``Gap`` for each comparison, by its name.

    - If ``scores``, both engines compute the log-probabilities of the text ``tokens``, with the policy's adapter and
      without.
    - If ``strength`` is neither 0 nor None, then both get a probe adapter of this strength (``probe_gap``).

    Differences are measured relative to rounding errors of ``dtype``, the less precise of the two engines' dtypes.
    ``seed`` determines the probe adapter, and the random errors that are added in the trainer's model to estimate its
    rounding errors. It must differ from the seed of the previous check, because the engine may still have cached keys
    and values that were computed with the previous probe adapter.
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
    """Load a random adapter (probe adapter) into both engines, let ``engine`` sample one token after each of several
    prefixes of ``tokens``, and compare the log-probabilities of these tokens. Both must have the policy's adapter
    before the call, and have the probe adapter after it.

    The lengths of the prefixes differ by two tokens. So some prefixes end soon after the end of a block of the prefix
    cache (which has 16 tokens or more), where a cache that still holds keys and values of an older adapter changes
    log-probabilities most.
    """
    prompts = [tokens[:-shorter] for shorter in range(1, min(LAST + 1, len(tokens)), 2)]
    adapter = probe_adapter(policy, strength=strength, seed=seed)
    engine.generate(prompts[:1], ONE_TOKEN, 0)  # prefixes cached here must not be used below
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
