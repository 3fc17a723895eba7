"""Compare log-probabilities that a rollout engine reports with those that the trainer computes: of a given text, and of
tokens that the engine samples with a random adapter (probe adapter).

Two correct implementations of a model differ by rounding errors, which depend on the model, its dtype and the tokens.
The trainer therefore measures, on the same tokens and with its own model alone, how much log-probabilities change if
rounding errors are drawn anew (``policy.shaken``).
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
"""Multiple of the trainer's rounding errors above which an engine counts as wrong; correct ones differ by about 1."""
MOST = 4 * MARGIN
"""Larger multiples of the rounding errors at a token are lowered to this, so that no single token decides the mean."""


class Gap(NamedTuple):
    """Difference of the log-probabilities of engine and trainer, means over tokens."""

    nats: float
    """|engine - trainer|."""
    rounding: float
    """Root mean square change of the trainer's value if its rounding errors are drawn anew, in nats."""
    excess: float
    """|engine - trainer| as a multiple of the rounding errors at the same token, at most ``MOST``."""
    change: float = math.nan
    """Absolute change of the trainer's value by the probe adapter, in nats; nan without a probe adapter."""

    def is_wrong(self, tolerance: float) -> bool:
        """Return whether the difference is a fault: more than ``tolerance`` nats and more than ``MARGIN`` times the
        rounding errors, or NaN."""
        return not (self.nats <= tolerance or self.excess <= MARGIN)


def gap_of(engine: Tensor, trainer: Tensor, rounding: Tensor, change: float = math.nan) -> Gap:
    """Compare N log-probabilities of an engine with the trainer's, [N] nats each. ``rounding`` [N] is, for each token,
    the root mean square change of the trainer's log-probability if its rounding errors are drawn anew; ``change`` is
    the mean absolute change of the trainer's log-probabilities by the probe adapter."""
    difference, usual = (engine - trainer).abs(), rounding.mean()
    # At some tokens the trainer's rounding error is tiny, by chance or because the token is nearly certain, but the
    # engine's is not. Adding 0.1 ``usual`` keeps the multiples of such tokens from being large.
    multiples = difference / (rounding + 0.1 * usual).clamp(min=1e-12)
    return Gap(difference.mean().item(), usual.item(), multiples.clamp(max=MOST).mean().item(), change)


def own_text(rows: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Return the last ``num_tokens`` tokens of the concatenation of all rows in reverse order, so that the text ends
    with the first row. If all rows together are shorter, the text repeats them."""
    backwards = cycle(chain.from_iterable(map(reversed, rows)))
    return list(islice(backwards, num_tokens))[::-1]


def wrong_ones(gaps: Mapping[str, Gap], tolerance: float) -> list[str]:
    """Return the names of the comparisons in which the engine's difference from the trainer is a fault."""
    return [what for what, gap in gaps.items() if gap.is_wrong(tolerance)]


@contextmanager
def trainers_engine(policy: Policy, noise: NormNoise, *, max_model_len: int) -> Iterator[TransformersEngine]:
    """Yield an engine that samples and scores with the trainer's model and the given noise, as the reference to compare
    a rollout engine with."""
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
    """Compare log-probabilities of the loop's engine with the trainer's; returns the difference for each comparison, by
    its name.

    ``oracle`` is an engine with the trainer's model and the same noise, ``dtype`` the less precise of the two engines'
    dtypes. With ``scores``, the log-probabilities of the text ``tokens`` are compared, with and without the adapter.
    Unless ``strength`` is 0 or None, a random probe adapter of this strength is loaded, and the log-probabilities of
    tokens sampled after prefixes of the text are compared too; both engines then still have the probe adapter. ``seed``
    draws the probe adapter and the rounding errors. It must differ from the seed of the previous check, whose prefixes
    may still be cached.
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
    """Load a probe adapter, sample one token after each of several prefixes of ``tokens``, and compare the
    log-probabilities of these tokens by ``engine`` and by ``oracle``, an engine with the trainer's model. Both must
    have the policy's adapter before the call, and have the probe adapter after it.

    The lengths of the prefixes differ by two tokens, so that some end soon after a cached block (of 16 tokens or more),
    where a stale prefix cache changes log-probabilities most.
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
