"""Test whether the rollout engine sampled some completions with another policy than the current one: without the
adapter, with the adapter of the previous rollout, or without the rollout's noise on norm weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.noise.fp32_norms import weights_replaced
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.evidence import in_shares
from qerl_pl.policy.jumps import logit_gap
from qerl_pl.policy.other_policy import (
    MOST_CERTAIN,
    STRONGEST,
    effect,
    is_first,
    moved,
    next_strength,
    part,
    rounding_scale,
    token_evidence,
)
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.choice import choose
from qerl_pl.rollout.common import PEFT_PREFIX, different, passes, row_of_each_token, trained_norms
from qerl_pl.rollout.measured import Measured
from qerl_pl.rollout.scored import ScoredBatch

WITHOUT_ADAPTER = "without the adapter"
OF_BEFORE = "with the adapter of the rollout before"
WITHOUT_NOISE = "without the noise on the norms"
OTHER_POLICIES = {
    WITHOUT_ADAPTER: "evidence/part_without_adapter",
    OF_BEFORE: "evidence/part_of_rollout_before",
    WITHOUT_NOISE: "evidence/part_without_noise",
}
"""Names of the other policies, and for each the name under which its entry of ``Others.parts`` is logged."""


class Others(NamedTuple):
    """Results of the tests of whether the engine sampled completions with another policy than the current one."""

    evidence: Tensor
    """[len(SHARES) * len(OTHER_POLICIES)] fp64 in nats, log-likelihood ratios over all ranks, one for each share of
    completions in ``policy.evidence.SHARES`` and each other policy: of the hypothesis that this share was sampled with
    this policy, to the hypothesis that all were sampled with the current one; 0 for policies that equal the current
    one."""
    strengths: dict[str, float]
    """Distance by which the next test moves the weights, for each other policy, as a multiple of the difference between
    this policy's weights and the current policy's (``other_policy.next_strength``)."""
    parts: dict[str, float]
    """Fraction of each other policy's effect on log-probabilities that is found in the engine's errors, mean over
    ranks: about 0 if the engine is right, and about 1 if it sampled all tokens with this policy
    (``other_policy.part``)."""


def measure_others(
    policy: Policy,
    batch: ScoredBatch,
    measured: Measured,
    noise: NormNoise,
    before: Mapping[str, Tensor] | None,
    *,
    strengths: Mapping[str, float],
    temperature: float,
    micro_batch_tokens: int,
    max_tokens: int,
) -> Others:
    """Test whether the rollout engine sampled completions with another policy than the current one
    (``OTHER_POLICIES``). Every rank must call this function, because it adds up values of all ranks.

    For each of these policies that differs from the current one, two forward passes are made, with weights moved
    towards this policy and away from it, over the first distinct completions that ``measure_some`` chose. A token that
    several completions have after the same preceding tokens counts once.

    Args:
        measured: what ``measure_some`` returned for this rollout.
        before: the adapter of the previous rollout; None if it is not known.
        strengths: for each policy, the multiple of its distance by which weights are moved (``Others.strengths`` of the
            previous call); a policy without an entry gets ``STRONGEST``.
        max_tokens: limit on the tokens of these completions and their prompts, over all ranks (``choose``).
    """
    places = choose(batch, measured.chosen, max_tokens).firsts
    chosen = [measured.chosen[place] for place in places]
    texts = [(batch.prompts[row].tokens, batch.completions[row].tokens) for row in chosen]
    rows = row_of_each_token([batch.completions[row] for row in chosen])
    of_rows = torch.cat([(measured.rows == place).nonzero()[:, 0] for place in places])
    trainer, sampler = measured.trainer[of_rows], measured.sampler[of_rows]
    counted = torch.tensor(list(chain.from_iterable(is_first(texts)))) & (trainer < math.log(MOST_CERTAIN))
    error, scale = sampler - trainer, rounding_scale(trainer, sampler)
    evidence = {name: error.new_zeros(len(texts)) for name in OTHER_POLICIES}
    # by policy: differences between the moved policies, and between engine and trainer, and ``other_policy.part``
    numbers: dict[str, tuple[float, float, float]] = {}
    for name, other in _others(policy, noise, before).items():
        strength = strengths.get(name, STRONGEST)
        ends = []
        for by in (strength, -strength):
            with _moved(policy, other, noise, by=by):
                ends.append(_logprobs(policy, batch, chosen, temperature, micro_batch_tokens))
        change = effect(*ends, strength=strength)
        evidence[name].index_add_(0, rows, token_evidence(error, change, scale) * counted)
        gaps = (logit_gap(*ends).mean().item(), logit_gap(trainer, sampler).mean().item())
        numbers[name] = (*gaps, part(error[counted], change[counted], scale[counted]))
    tested = torch.tensor([name in numbers for name in OTHER_POLICIES], dtype=torch.float64)
    shares = in_shares(torch.stack([*evidence.values()])).reshape(-1, len(evidence)) * tested  # exactly 0 for others
    of_ranks = ranks.gather_values((shares.flatten().tolist(), numbers))
    total = torch.tensor([values for values, _ in of_ranks], dtype=torch.float64).sum(dim=0)
    following, parts = dict(strengths), dict[str, float]()
    for name in numbers:
        means = torch.tensor([found[name] for _, found in of_ranks if name in found], dtype=torch.float64).mean(dim=0)
        change, gap, parts[name] = means.tolist()
        following[name] = next_strength(strengths.get(name, STRONGEST), change, gap)
    return Others(total, following, parts)


def _others(
    policy: Policy, noise: NormNoise, before: Mapping[str, Tensor] | None
) -> dict[str, Mapping[str, Tensor] | None]:
    """Return the adapter of each of ``OTHER_POLICIES`` that differs from the current policy, by name. None stands for
    the current adapter without noise."""
    current = policy.adapter_state()
    base = {name: _base_value(policy, name, tensor) for name, tensor in current.items()}
    found: dict[str, Mapping[str, Tensor] | None] = {}
    for name, other in ((WITHOUT_ADAPTER, base), (OF_BEFORE, before or current)):
        if different(current, {key: tensor.to(current[key].device) for key, tensor in other.items()}):
            found[name] = other
    return found | ({WITHOUT_NOISE: None} if noise.sigma > 0 else {})


def _base_value(policy: Policy, name: str, tensor: Tensor) -> Tensor:
    """Return the value of a trained tensor with which the model computes the same as the base: 0 for LoRA's B, the
    base's weight for a norm, and the tensor itself for LoRA's A."""
    if ".lora_" in name:
        return torch.zeros_like(tensor) if ".lora_B" in name else tensor
    norm: Any = policy.causal_lm.get_submodule(name.removeprefix(PEFT_PREFIX).removesuffix(".weight"))
    return norm.original_module.get_parameter("weight").detach()


@contextmanager
def _moved(policy: Policy, other: Mapping[str, Tensor] | None, noise: NormNoise, *, by: float) -> Iterator[None]:
    """Within the context, put the model into evaluation mode and move its weights from the current policy towards
    another one, by ``by`` times the distance between the two. The current policy has ``noise`` on norm weights. The
    other policy has the adapter ``other`` and the same noise or, if ``other`` is None, the current adapter and no
    noise."""
    current = policy.adapter_state()
    adapter = current if other is None else moved(current, other, by=by)
    norms: dict[str, Tensor] = {}
    if noise.sigma > 0:
        clean = policy.norm_weights() | trained_norms(adapter)
        norms = noisy_norms(clean, noise, dtype=noise.kept_in(policy.dtype))
        norms = moved(norms, clean, by=by) if other is None else norms
    with policy.evaluating(), policy.with_adapter(adapter), weights_replaced(policy.norm_modules(), norms):
        yield


@torch.no_grad()
def _logprobs(policy: Policy, batch: ScoredBatch, chosen: Sequence[int], temperature: float, limit: int) -> Tensor:
    """Compute log-probabilities with the model's current weights, [N] fp64 in nats, of the tokens of the completions
    ``chosen``, in micro-batches of up to ``limit`` tokens."""
    prompts, completions = [batch.prompts[row].tokens for row in chosen], [batch.completions[row] for row in chosen]
    logprobs = dict[int, Tensor]()
    for inputs in passes(prompts, completions, limit, policy.causal_lm.device):
        stats = policy.token_stats(inputs.tokens, inputs.mask, temperature=temperature, routes=inputs.routes)
        found = stats.logprobs[inputs.mask].double().cpu().split(inputs.lengths)
        logprobs.update(zip(inputs.rows, found, strict=True))
    return torch.cat([logprobs[row] for row in range(len(chosen))])
