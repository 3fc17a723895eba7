"""The checks measure values of completions with the trainer's model. Equal rows are computed only once, and the values
are those of the policy."""

import pytest
import torch

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.evidence import ALTERNATIVES, SHARES
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rewards.base import RewardTable
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


def measured(policy: Policy, batch: ScoredBatch, *, max_tokens: int, other_rounding: bool = False) -> Measured:
    limits = {"max_model_len": 64, "micro_batch_tokens": 16}
    found = measure_some(
        policy,
        batch,
        NormNoise(),
        temperature=1.0,
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
