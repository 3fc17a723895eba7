"""Which tokens Clip-Cov and KL-Cov hold back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from qerl_pl.common.types import Experience
from qerl_pl.objective import LossInputs, Objective
from qerl_pl.objective.entropy_control import CovarianceControl
from qerl_pl.settings.model import check_run_length
from qerl_pl.training.passes import Batch, UpdateSettings
from qerl_pl.training.terms import held_back
from tests.reference import covariance as reference

ROWS, WIDTH, PROMPT, GROUP = 6, 12, 3, 2


@pytest.fixture
def batch(policy) -> Batch:
    """Rows of different lengths, one of them left out of the loss, under a policy with random weights."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT + 2, WIDTH + 1, (ROWS,), generator=generator)
    position = torch.arange(WIDTH)
    sampled = (position >= PROMPT) & (position < lengths.unsqueeze(1))
    mask = sampled.clone()
    mask[1] = False
    experience = Experience(
        tokens=torch.randint(0, 250, (ROWS, WIDTH), generator=generator),
        lengths=lengths,
        sampled=sampled,
        mask=mask,
        sampler_logprobs=torch.zeros(ROWS, WIDTH),
        scored=torch.ones(ROWS, dtype=torch.bool),
        advantages=torch.tensor([2.0, -2.0, 1.0, -1.0, 0.0, 3.0]),
    )
    batch = Batch(policy, experience, UpdateSettings(group_size=GROUP, max_tokens=9, micro_batch_tokens=100))
    batch.old = torch.where(sampled, -3 * torch.rand(ROWS, WIDTH, generator=generator), 0.0)
    return batch


def rows_of(values: torch.Tensor, mask: torch.Tensor) -> list[list]:
    return [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]


@pytest.mark.parametrize("share", [1e-4, 0.1, 0.5, 1.0])
def test_kl_cov_takes_the_tokens_of_the_largest_covariance(batch, share):
    mask = batch.experience.mask
    held, found = held_back(batch, CovarianceControl("kl", share=share))
    values = reference.covariances(rows_of(batch.old.double(), mask), batch.experience.advantages.tolist())
    expected = reference.largest(values, share)
    assert rows_of(held, mask) == expected
    assert not held[~mask].any()
    assert float(found) == pytest.approx(sum(map(sum, expected)) / int(mask.sum()))


@pytest.mark.parametrize("share", [1e-4, 0.1, 1.0])
def test_clip_cov_draws_its_number_of_tokens_between_the_bounds(batch, share):
    mask, control = batch.experience.mask, CovarianceControl("clip", share=share, low=0.1, high=2.0)
    values = reference.covariances(rows_of(batch.old.double(), mask), batch.experience.advantages.tolist())
    inside = [[0.1 < value < 2.0 for value in row] for row in values]
    draws = []
    for seed in range(20):
        batch.settings = replace(batch.settings, seed=seed)
        draws.append(held_back(batch, control)[0])
    for held in draws:
        chosen = rows_of(held, mask)
        for row, candidates in zip(chosen, inside, strict=True):
            assert all(not one or candidate for one, candidate in zip(row, candidates, strict=True))
        assert int(held.sum()) == min(max(1, int(share * int(mask.sum()))), sum(map(sum, inside)))
    assert torch.equal(draws[-1], held_back(batch, control)[0]), "a function of the seed"
    assert share == 1 or any(not torch.equal(draws[0], other) for other in draws[1:])


def test_no_token_between_the_bounds_holds_none_back(batch):
    held, share = held_back(batch, CovarianceControl(low=100.0, high=math.inf))
    assert (int(held.sum()), float(share)) == (0, 0.0)


def test_the_penalty_is_the_distance_from_the_old_policy_at_its_tokens_alone():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(2, 4, generator=generator).double()
    logprobs = (old + 0.3 * torch.randn(2, 4, generator=generator).double()).requires_grad_()
    mask = torch.ones(2, 4, dtype=torch.bool)
    penalized = torch.tensor([[True, False, False, True], [False, False, True, False]])
    objective = Objective(covariance=CovarianceControl("kl", coefficient=0.7))
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        advantages=torch.zeros(2).double(),
        mask=mask,
        kept=mask,
        counted=mask,
        divisor=torch.tensor(8.0),
        policy_divisor=torch.tensor(8.0),
        penalized=penalized,
    )
    loss, _, _ = objective.resolve().loss(inputs)
    loss.backward()
    change = (logprobs - old).detach()
    assert loss.item() == pytest.approx(0.7 * sum(math.exp(x) - 1 - x for x in change[penalized].tolist()) / 8)
    torch.testing.assert_close(logprobs.grad, torch.where(penalized, 0.7 * change.expm1() / 8, 0.0))


def test_a_penalty_that_is_always_zero_is_refused():
    usual = {
        "max_steps": 4,
        "warmup_steps": 0,
        "batch_size": 4,
        "objective": Objective(covariance=CovarianceControl("kl")),
    }
    with pytest.raises(ValueError, match="one optimizer step, in which the penalty is 0"):
        check_run_length(updates_per_rollout=1, mini_batches=1, **usual)
    check_run_length(updates_per_rollout=1, mini_batches=2, **usual)


@pytest.mark.parametrize(
    "wrong", [{"share": 0.0}, {"share": math.nan}, {"low": 5.0}, {"high": math.nan}, {"coefficient": 0.0}], ids=str
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"model\.objective\.covariance"):
        CovarianceControl(**wrong)
