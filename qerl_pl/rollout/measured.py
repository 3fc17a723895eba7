"""Score some of a rollout's completions with the trainer's model, to find a faulty engine."""

from typing import NamedTuple

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.evidence import in_shares
from qerl_pl.policy.margins import draw_evidence, is_audited
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.shaken import shaken
from qerl_pl.rollout.choice import choose
from qerl_pl.rollout.common import passes, row_of_each_token
from qerl_pl.rollout.comparison import trainers_engine
from qerl_pl.rollout.scored import ScoredBatch


class Measured(NamedTuple):
    """Result of ``measure_some``: log-probabilities of the N tokens of some completions by trainer and rollout engine,
    and log-likelihood ratios for the tests of whether the engine sampled them from the distribution it reports."""

    trainer: Tensor
    """[N] fp64 in nats, log-probabilities that the trainer computed."""
    sampler: Tensor
    """[N] fp64 in nats, log-probabilities that the engine reported."""
    shaken: Tensor
    """[N] fp64 in nats, log-probabilities that the trainer computed with random rounding errors added; empty unless
    ``measure_some`` was called with ``other_rounding``."""
    rows: Tensor
    """[N] int64, for each token the position of its completion in ``chosen``."""
    evidence: Tensor
    """[len(SHARES) * K] fp64 in nats, log-likelihood ratios over the completions of all ranks, one for each share of
    completions in ``policy.evidence.SHARES`` and each of K other ways of sampling: of the hypothesis that this share
    was sampled in this way, to the hypothesis that all were sampled from the reported distribution."""
    chosen: list[int]
    """Indices of the chosen completions in this rank's batch."""
    margins: Tensor
    """[M] fp32 in nats, margins of those tokens of the distinct chosen completions that have a probability of at most
    about 0.97 (``is_audited``): how far each token's sum of logit and Gumbel noise is below the largest
    (``policy.margins``); empty if the trainer cannot compute the engine's random numbers."""
    draws: Tensor
    """[len(SHARES)] fp64 in nats, log-likelihood ratios over all ranks, one for each of ``policy.evidence.SHARES``: of
    the hypothesis that in this share of the completions, tokens were chosen by other random numbers than those that
    follow from the completions' seeds, to the hypothesis that all were chosen by those
    (``policy.margins.draw_evidence``); 0 without margins."""


def measure_some(
    policy: Policy,
    batch: ScoredBatch,
    noise: NormNoise,
    *,
    temperature: float,
    max_model_len: int,
    micro_batch_tokens: int,
    max_tokens: int,
    seed: int,
    other_rounding: bool = False,
) -> Measured:
    """Choose some of this rank's completions at random, and compute with the trainer's model the log-probabilities of
    their tokens, under the policy with the rollout's noise on norm weights and under other ways of sampling
    (``evidence.ALTERNATIVES``), and, if completions have seeds, the margins of their tokens (``policy.margins``). Every
    rank must call this function, because it adds up values of all ranks.

    ``max_tokens`` limits the tokens of the distinct chosen completions and their prompts, over all ranks (``choose``);
    equal rows are computed once. If ``other_rounding``, log-probabilities are computed a second time, with random
    rounding errors added (``policy.shaken``).
    """
    generator = torch.Generator().manual_seed(seed)
    choice = choose(batch, torch.randperm(len(batch.completions), generator=generator).tolist(), max_tokens)
    distinct = [choice.rows[place] for place in choice.firsts]
    prompts, firsts = [batch.prompts[row].tokens for row in distinct], [batch.completions[row] for row in distinct]
    keys = [first.seed for first in firsts if first.seed is not None]
    seeds = torch.tensor(keys, dtype=torch.int64) if len(keys) == len(firsts) else None
    logprobs_of, margins_of, shaken_of = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    device = policy.causal_lm.device
    with trainers_engine(policy, noise, max_model_len=max_model_len) as oracle, oracle.sampled_as() as sampled_as:
        for part in passes(prompts, firsts, micro_batch_tokens, device):
            inputs, how = (part.tokens, part.mask), {"temperature": temperature, "routes": part.routes}
            seeds_of_rows = None if seeds is None else seeds[part.rows].to(device)
            logprobs, margins = sampled_as(*inputs, **how, seeds=seeds_of_rows)
            logprobs_of.update(zip(part.rows, logprobs.double().cpu().split(part.lengths), strict=True))
            margins_of.update(zip(part.rows, margins.cpu().split(part.lengths), strict=True))
            if other_rounding:
                with shaken(policy.causal_lm, policy.dtype, seed=seed):
                    logprobs, _ = sampled_as(*inputs, **how)
                shaken_of.update(zip(part.rows, logprobs[:, 0].double().cpu().split(part.lengths), strict=True))
    chosen = [batch.completions[row] for row in choice.rows]
    sampler = torch.tensor([value for row in chosen for value in row.logprobs], dtype=torch.float64)
    rows = row_of_each_token(chosen)
    reported = sampler.new_zeros(len(chosen)).index_add(0, rows, sampler)
    under_others = torch.stack([logprobs_of[place][:, 1:].sum(dim=0) for place in choice.which])  # [rows, K]
    trainer = torch.cat([logprobs_of[place][:, 0] for place in choice.which])
    others = torch.cat([shaken_of[place] for place in choice.which]) if other_rounding else sampler[:0]
    # margins count once for each distinct row
    own, margins = (torch.cat([of[place] for place in range(len(firsts))]) for of in (logprobs_of, margins_of))
    audited = is_audited(own[:, 0]) & (seeds is not None)
    of_tokens = audited * draw_evidence(margins, own[:, 0])
    drawn = own.new_zeros(len(firsts)).index_add(0, row_of_each_token(firsts), of_tokens)
    evidence, draws = (
        torch.tensor(ranks.gather_values(in_shares(values).tolist()), dtype=torch.float64).sum(dim=0)
        for values in ((under_others - reported.unsqueeze(1)).T, drawn[None])
    )
    return Measured(trainer, sampler, others, rows, evidence, choice.rows, margins[audited], draws)
