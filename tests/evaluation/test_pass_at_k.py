"""Tests that pass@k equals the share of all choices of k completions that contain a right one, and that its interval
covers the true value as often as stated."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from qerl_pl.evaluation.pass_at_k import pass_at_k, score_interval


@given(st.integers(1, 8), st.data())
def test_it_is_the_share_of_subsets_that_hold_a_right_completion(n, data):
    k = data.draw(st.integers(1, n))
    correct = data.draw(st.integers(0, n))
    outcomes = [1] * correct + [0] * (n - correct)
    subsets = list(combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(torch.tensor([correct]), n, k).item() == pytest.approx(expected, abs=1e-12)


def test_one_of_n_is_the_average_and_large_n_does_not_overflow():
    assert pass_at_k(torch.tensor([0, 3, 4]), 4, 1).tolist() == pytest.approx([0, 0.75, 1])
    assert pass_at_k(torch.tensor([1]), 1024, 512).item() == pytest.approx(0.5)


def test_it_is_computed_where_the_counts_are():
    counts = torch.tensor([0, 3, 4])
    with torch.device("meta"):  # what is made without a device is then elsewhere, as it would be with counts on a GPU
        found = pass_at_k(counts, 4, 2)
    assert found.tolist() == pass_at_k(counts, 4, 2).tolist()


@pytest.mark.parametrize(("correct", "n", "k"), [([1], 2, 3), ([1], 2, 0), ([3], 2, 1), ([-1], 2, 1)])
def test_what_cannot_be_is_refused(correct, n, k):
    with pytest.raises(ValueError, match="expected"):
        pass_at_k(torch.tensor(correct), n, k)


@pytest.mark.parametrize("share", [0.03, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("num_problems", [30, 100])
def test_the_interval_covers_the_mean_about_as_often_as_it_says(num_problems, share):
    values = torch.rand(2000, num_problems, generator=torch.Generator().manual_seed(0)) < share
    intervals = [score_interval(row, 1) for row in values.double()]
    assert 0.92 <= sum(low <= share <= high for low, high in intervals) / len(intervals) <= 0.99


def test_the_interval_is_over_problems_and_not_over_completions():
    generator, n = torch.Generator().manual_seed(0), 8
    chances = 0.05 + 0.9 * torch.rand(1000, 60, generator=generator)  # problems are not equally hard
    right = torch.bernoulli(chances.unsqueeze(2).expand(-1, -1, n), generator=generator).sum(dim=2)
    for k in (1, 2):
        true = (1 - (1 - chances) ** k).mean().item()
        intervals = [score_interval(pass_at_k(row, n, k), n) for row in right.long()]
        assert 0.93 <= sum(low <= true <= high for low, high in intervals) / len(intervals) <= 0.97, k


def test_an_interval_is_wilsons_for_one_completion_and_no_point_where_none_or_all_are_right():
    for right, num_problems in ((0, 30), (30, 30), (1, 2), (17, 60), (1, 1)):
        values = torch.arange(num_problems) < right
        low, high = score_interval(values.double(), 1)
        wilson = binomtest(right, num_problems).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((wilson.low, wilson.high), abs=1e-6)
        assert low < right / num_problems < high or right in (0, num_problems)
        assert high - low > 0.1


def test_problems_that_do_not_differ_count_as_their_completions():
    few, many = (score_interval(torch.full((size,), 0.5), 64 // size) for size in (4, 16))
    assert few == pytest.approx(many)
