"""Laws of the group advantages."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.objective.advantages import Baseline, group_advantages, has_signal, less_penalty
from tests.reference.advantages import advantages as reference
from tests.reference.advantages import batch_std as reference_std

BASELINES: tuple[Baseline, ...] = get_args(Baseline)


@st.composite
def rewards_and_scored(draw) -> tuple[Tensor, Tensor]:
    """Draw rewards [P, G] of P groups of G completions, and which of the completions have a score [P, G]. There are few
    different rewards, so that groups of equal rewards are common; so are groups in which one completion has a score."""
    prompts, completions = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    value = st.sampled_from([0.0, 0.1, 0.2, 0.7, 1.0, -0.5])
    row = st.lists(value, min_size=completions, max_size=completions)
    rewards = torch.tensor(draw(st.lists(row, min_size=prompts, max_size=prompts)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return rewards, torch.rand(rewards.shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.1]))


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=40)
@given(case=rewards_and_scored(), garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
def test_advantages_equal_the_loops_whatever_an_unscored_row_holds(baseline, case, garbage):
    rewards, scored = case
    found = group_advantages(torch.where(scored, rewards, garbage), scored, baseline, eps=1e-4)
    std = reference_std(rewards[scored].tolist())
    for p in range(len(rewards)):
        group = [float(rewards[p, g]) if scored[p, g] else None for g in range(rewards.shape[1])]
        expected = torch.tensor(reference(group, baseline, eps=1e-4, std=std), dtype=torch.float64)
        torch.testing.assert_close(found[p], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=50)
@given(reward=st.floats(-1e3, 1e3, width=32), completions=st.integers(1, 17))
def test_equal_rewards_give_exact_zeros(baseline, eps, reward, completions):
    rewards = torch.full((2, completions), reward)
    found = group_advantages(rewards, torch.ones_like(rewards) > 0, baseline, eps=eps)
    assert torch.equal(found, torch.zeros(2, completions))


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=40)
@given(case=rewards_and_scored())
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_the_rewards(baseline, case):
    rewards, scored = case
    found = group_advantages(rewards, scored, baseline)
    torch.testing.assert_close(found.sum(1), torch.zeros(len(rewards), dtype=torch.float64), rtol=0, atol=1e-12)
    for p in torch.nonzero(has_signal(rewards, scored)).flatten().tolist():
        group, values = rewards[p][scored[p]], found[p][scored[p]]
        assert torch.equal(group.argsort(stable=True), values.argsort(stable=True))


def test_known_answers():
    rewards, scored = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4) > 0
    assert group_advantages(rewards, scored, "centered").tolist() == [[0.75, -0.25, -0.25, -0.25]]
    torch.testing.assert_close(group_advantages(rewards, scored, "leave_one_out"), torch.tensor([[1.0] + 3 * [-1 / 3]]))
    torch.testing.assert_close(  # the unbiased std of 1, 0, 0, 0 is 1/2
        group_advantages(rewards, scored, "normalized", eps=0.0), torch.tensor([[1.5, -0.5, -0.5, -0.5]])
    )


def test_a_group_has_signal_when_two_scored_rewards_differ():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
    scored = torch.tensor([[True, True], [True, True], [True, False], [False, True], [False, False]])
    assert has_signal(rewards, scored).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_scored_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="nan or infinite"):
        group_advantages(torch.tensor([[reward, 1.0]]), torch.ones(1, 2) > 0)


@pytest.mark.parametrize(("rewards", "scored"), [((4,), (4,)), ((2, 2), (2, 1))])
def test_shapes_are_checked(rewards, scored):
    with pytest.raises(ValueError, match=r"expected the same \[P, G\]"):
        has_signal(torch.zeros(rewards), torch.ones(scored) > 0)


@st.composite
def rewards_and_penalties(draw) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rewards, penalties and which completions have a score, all [P, G]. In every second case all rewards of a
    group are equal, so that advantages come from the penalties alone."""
    rewards, scored = draw(rewards_and_scored())
    if draw(st.booleans()):
        rewards = rewards[:, :1].expand_as(rewards)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return rewards, torch.randn(rewards.shape, generator=generator, dtype=torch.float64), scored


@pytest.mark.parametrize("baseline", BASELINES)
@settings(max_examples=40)
@given(case=rewards_and_penalties(), coefficient=st.floats(0, 10))
def test_what_a_penalty_moves_is_linear_in_its_coefficient_and_sums_to_zero(baseline, case, coefficient):
    rewards, penalty, scored = case
    plain = group_advantages(rewards, scored, baseline)
    assert torch.equal(less_penalty(plain, 0 * penalty, scored, baseline), plain)
    moved = less_penalty(plain, coefficient * penalty, scored, baseline) - plain
    once = less_penalty(plain, penalty, scored, baseline) - plain
    torch.testing.assert_close(moved, coefficient * once, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moved.sum(1), torch.zeros(len(rewards), dtype=torch.float64), rtol=0, atol=1e-9)
    assert (moved[~scored] == 0).all()


@pytest.mark.parametrize("baseline", ["centered", "leave_one_out"])
@settings(max_examples=40)
@given(case=rewards_and_penalties())
def test_a_penalty_off_linear_advantages_is_one_off_the_rewards(baseline, case):
    rewards, penalty, scored = case
    found = less_penalty(group_advantages(rewards, scored, baseline), penalty, scored, baseline)
    torch.testing.assert_close(found, group_advantages(rewards - penalty, scored, baseline))


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-7, 1e-3, 1.0])
def test_a_penalty_counts_the_same_whatever_the_spread_of_the_rewards(spread):
    rewards, scored = 0.7 + spread * torch.tensor([[1.0, 0.0, 0.0, 1.0]]).double(), torch.ones(1, 4) > 0
    plain = group_advantages(rewards, scored, "normalized")
    penalty = torch.tensor([[0.0050, 0.0048, 0.0049, 0.0064]]).double()
    moved = less_penalty(plain, penalty, scored, "normalized") - plain
    torch.testing.assert_close(moved, penalty.mean() - penalty)
