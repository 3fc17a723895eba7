"""The checks measure values of completions with the trainer's model. Equal rows are computed only once, and the values
are those of the policy."""

from dataclasses import replace

import pytest
import torch

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.evidence import ALTERNATIVES, SHARES
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.margins import keyed_noise, row_keys, token_keys
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rewards.base import RewardTable
from qerl_pl.rollout.common import request_seeds, with_due_seeds
from qerl_pl.rollout.measured import Measured, measure_some
from qerl_pl.rollout.scored import ScoredBatch

PROMPT = (8, 9, 10)


@pytest.fixture(scope="module")
def policy(checkpoints) -> Policy:
    return load_policy(checkpoints["dense"], dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=0)


def batch_of(completions: list[tuple[int, ...]], logprob: float = -1.0) -> ScoredBatch:
    rows = tuple(Completion(tokens, (logprob,) * len(tokens), finished=True) for tokens in completions)
    size = len(rows)
    table = RewardTable(torch.zeros(size), torch.ones(size, dtype=torch.bool), {}, {})
    return ScoredBatch.of((Prompt(PROMPT, ""),) * size, ("",) * size, rows, table, size)


def measured(
    policy: Policy, batch: ScoredBatch, *, max_tokens: int, other_rounding: bool = False, temperature: float = 1.0
) -> Measured:
    limits = {"max_model_len": 64, "micro_batch_tokens": 16}
    found = measure_some(
        policy,
        batch,
        NormNoise(),
        temperature=temperature,
        **limits,
        max_tokens=max_tokens,
        seed=1,
        other_rounding=other_rounding,
    )
    assert found.evidence.shape == (len(SHARES) * len(ALTERNATIVES),)
    return found


def test_equal_rows_cost_nothing_and_have_the_policys_log_probabilities(policy):
    rows = [(11, 12, 5)] * 6 + [(13, 5)] * 2
    found = measured(policy, batch_of(rows), max_tokens=len(PROMPT) * 2 + 3 + 2)  # of the two different ones
    kinds = [tuple(found.trainer[found.rows == row].tolist()) for row in range(int(found.rows.max()) + 1)]
    assert len(kinds) >= 2
    assert len(set(kinds)) <= 2
    for tokens in set(rows):
        logits = policy.causal_lm(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        own = logits.log_softmax(1).gather(1, torch.tensor([tokens]).T)[:, 0].detach()
        of_row = next((kind for kind in kinds if len(kind) == len(tokens)), None)
        if of_row is not None:
            torch.testing.assert_close(torch.tensor(of_row), own, rtol=0, atol=1e-5)


def test_evidence_counts_equal_rows_as_often_as_they_are(policy):
    one, two = (measured(policy, batch_of([(11, 12, 5)] * count), max_tokens=1000) for count in (1, 2))
    torch.testing.assert_close(two.evidence, 2 * one.evidence)
    assert len(two.sampler) == 2 * len(one.sampler)


def test_other_rounding_errors_change_log_probabilities_a_little(policy):
    batch = batch_of([(11, 12, 13, 14, 5)])
    assert len(measured(policy, batch, max_tokens=1000).shaken) == 0
    found = measured(policy, batch, max_tokens=1000, other_rounding=True)
    change = (found.shaken - found.trainer).abs().max()
    assert 0 < change < 1e-3


def by_keyed_noise(policy: Policy, seeds: list[int], *, num_tokens: int) -> list[tuple[int, ...]]:
    """Sample a completion of ``PROMPT`` for each seed: each token is the largest sum of a logit at temperature 0.7 and
    the Gumbel noise that ``keyed_noise`` gives for seed and position."""
    tokens = torch.tensor([PROMPT] * len(seeds))
    for position in range(len(PROMPT) - 1, len(PROMPT) - 1 + num_tokens):
        logits = policy.causal_lm(tokens).logits[:, -1].detach().float() / 0.7
        keys = row_keys(torch.tensor(seeds), torch.full((len(seeds),), position))
        noise = keyed_noise(keys, token_keys(logits.shape[1]))
        tokens = torch.cat([tokens, (logits + noise).argmax(1)[:, None]], dim=1)
    return [tuple(row) for row in tokens[:, len(PROMPT) :].tolist()]


@pytest.mark.parametrize("wrong", [0, 1, 16])
def test_completions_that_their_seeds_do_not_give_are_evidence_of_other_draws(policy, wrong):
    seeds = [3, 2**62, *range(5, 19)]
    completions = by_keyed_noise(policy, seeds, num_tokens=8)
    batch = batch_of(completions)
    due = [seed + (place < wrong) for place, seed in enumerate(seeds)]
    rows = tuple(replace(row, seed=seed) for row, seed in zip(batch.completions, due, strict=True))
    found = measured(policy, replace(batch, completions=rows), max_tokens=1000, temperature=0.7)
    assert found.draws.shape == (len(SHARES),)
    if wrong:
        assert found.draws.max() > 10 * wrong**0.5
        assert found.margins.max() > 2
    else:
        assert found.draws.max() < 0
        assert found.margins.max() < 1e-4


def test_completions_without_seeds_are_no_evidence_of_other_draws(policy):
    found = measured(policy, batch_of([(11, 12, 5)]), max_tokens=1000)
    assert found.draws.abs().max() < 1e-12
    assert len(found.margins) == 0


def test_due_seeds_are_those_of_the_requests_whatever_an_engine_reports():
    prompts, due = [(1, 2), (3,)], request_seeds([(1, 2), (3,)], 2, 7)
    row = Completion((5,), (-1.0,), finished=True)
    unkeyed = [[row, row], [row, row]]
    assert with_due_seeds(unkeyed, prompts, 7) == unkeyed
    chosen = [[replace(row, seed=9), replace(row, seed=8)], [row, replace(row, seed=1)]]
    assert [found.seed for group in with_due_seeds(chosen, prompts, 7) for found in group] == due
