"""Tests that pass@k equals the share of all choices of k completions that contain a right one, and that the bootstrap
interval covers the true value as often as stated."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.evaluation.pass_at_k import bootstrap_interval, pass_at_k


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


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        values = (torch.rand(100, generator=generator) < 0.3).double()
        low, high = bootstrap_interval(values)
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 200 <= 0.99
    assert bootstrap_interval(torch.ones(5)) == (1.0, 1.0)
