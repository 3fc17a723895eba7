"""How rows are shared out among micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_pl.rollout.collate import micro_batches

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(60, 300))
def test_every_row_is_in_one_micro_batch_and_none_has_too_many_tokens(lengths, max_tokens):
    rows = torch.tensor(lengths, dtype=torch.int64)
    batches = micro_batches(rows, max_tokens)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    assert all(int(rows[batch].sum()) <= max_tokens for batch in batches)
    assert all(len(batch) for batch in batches)


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(60, 300))
def test_no_two_micro_batches_would_fit_into_one(lengths, max_tokens):
    rows = torch.tensor(lengths, dtype=torch.int64)
    sums = sorted(int(rows[batch].sum()) for batch in micro_batches(rows, max_tokens))
    assert len(sums) < 2 or sums[0] + sums[1] > max_tokens


def test_rows_are_packed_so_padding_is_free():
    assert len(micro_batches(torch.tensor([90, 5, 3, 2]), 100)) == 1


def test_equal_lengths_keep_their_order():
    batches = micro_batches(torch.tensor([10, 10, 10, 10, 10]), 20)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_a_row_that_is_too_long_is_refused_by_its_length():
    with pytest.raises(ValueError, match=r"a row of 7 tokens is longer than micro_batch_tokens \(6\)"):
        micro_batches(torch.tensor([2, 7]), 6)
