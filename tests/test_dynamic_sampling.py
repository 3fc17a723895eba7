"""Dynamic sampling keeps groups with signal, in order, and asks for no more than it needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.dynamic_sampling import DynamicSampling
from qerl_pl.evaluation import Evaluation
from qerl_pl.rewards.base import RewardTable
from qerl_pl.types import Completion, Prompt

G = 3


def evaluation(prompts: Sequence[Prompt]) -> Evaluation:
    """Groups of prompts that end in 1 have differing rewards."""
    rewards = [float(prompt.tokens[-1] == 1 and copy == 0) for prompt in prompts for copy in range(G)]
    total = torch.tensor(rewards)
    rows = tuple(prompt for prompt in prompts for _ in range(G))
    completions = tuple(Completion((row,), (0.0,), True, text=str(row)) for row in range(len(rows)))
    table = RewardTable(total, torch.ones(len(rows), dtype=torch.bool), {"answer": total.clone()}, {})
    return Evaluation(rows, tuple("" for _ in rows), completions, table, G)


def prompts(signals: Sequence[bool], start: int = 0) -> list[Prompt]:
    return [Prompt((start + index, int(signal)), str(index)) for index, signal in enumerate(signals)]


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_batch_is_the_first_groups_with_signal_of_what_was_sampled(batch, more, max_refills):
    settings, calls = DynamicSampling(max_refills), []
    size = len(batch)

    def sample(some: Sequence[Prompt], refill: int) -> Evaluation:
        calls.append((refill, len(some)))
        return evaluation(some)

    supply = prompts(more, start=100)
    everything, num_refills = settings.fill(evaluation(prompts(batch)), iter(supply), sample, batch_size=size)
    assert num_refills == len(calls) <= max_refills
    assert [refill for refill, _ in calls] == list(range(1, num_refills + 1))
    assert all(1 <= count <= size for _, count in calls)
    taken = supply[: sum(count for _, count in calls)]
    assert list(everything.prompts[::G]) == prompts(batch) + taken

    chosen = settings.choose(everything, batch_size=size)
    expected = [prompt for prompt in prompts(batch) + taken if prompt.tokens[-1] == 1][:size]
    assert list(chosen.prompts[::G]) == (expected or prompts(batch)[:1])
    if len(expected) < size:
        assert num_refills == max_refills or len(taken) == len(supply), "gave up too early"


def test_a_batch_that_is_full_samples_nothing_more():
    def sample(some: Sequence[Prompt], refill: int) -> Evaluation:
        raise AssertionError("nothing was missing")

    whole = evaluation(prompts([True, True]))
    everything, num_refills = DynamicSampling().fill(whole, iter(()), sample, batch_size=2)
    assert (everything, num_refills) == (whole, 0)


def test_a_short_batch_is_an_error_where_one_is_asked_for():
    short = evaluation(prompts([True, False]))
    assert len(DynamicSampling(when_short="smaller").choose(short, batch_size=2).signal) == 1
    with pytest.raises(RuntimeError, match=r"1 groups with differing rewards among 2.*needs 2"):
        DynamicSampling(when_short="error").choose(short, batch_size=2)


def test_no_refills_make_no_sense():
    with pytest.raises(ValueError, match="max_refills is 0"):
        DynamicSampling(max_refills=0)


def test_selecting_and_adding_keep_rows_with_their_rewards():
    one, other = evaluation(prompts([True, False])), evaluation(prompts([False, True], start=5))
    both = one + other
    assert both.rows() == one.rows() + other.rows()
    assert both.select(torch.tensor([3, 0])).rows() == other.rows()[G:] + one.rows()[:G]
    assert both.signal.tolist() == [True, False, False, True]
