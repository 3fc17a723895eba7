"""Division of rows into micro-batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_pl.common.batching import micro_batches
from qerl_pl.policy.packing import micro_batches_of_groups


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=40), max_tokens=st.integers(60, 300))
def test_every_row_is_in_one_of_as_few_full_micro_batches_as_first_fit_gives(lengths, max_tokens):
    rows = torch.tensor(lengths, dtype=torch.int64)
    batches = micro_batches(rows, max_tokens)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))
    sums = [int(rows[batch].sum()) for batch in batches]
    assert all(0 < tokens <= max_tokens for tokens in sums)
    assert sums == sorted(sums, reverse=True)
    assert len(sums) < 2 or sums[-1] + sums[-2] > max_tokens, "no two would fit into one"


def test_equal_lengths_keep_their_order():
    batches = micro_batches(torch.tensor([10, 10, 10, 10, 10]), 20)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


def test_a_row_that_is_too_long_is_refused_by_its_length():
    with pytest.raises(ValueError, match=r"a row of 7 tokens is longer than micro_batch_tokens \(6\)"):
        micro_batches(torch.tensor([2, 7]), 6)


@settings(deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 40), min_size=1, max_size=9)), max_size=8),
    max_tokens=st.integers(60, 300),
    least_saved=st.floats(0, 1),
)
def test_rows_of_a_group_share_their_prompt_within_the_limit(groups, max_tokens, least_saved):
    rows = [(index, prompt, prompt + own) for index, (prompt, completions) in enumerate(groups) for own in completions]
    group, prompts, lengths = torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(1)
    batches = micro_batches_of_groups(lengths, prompts, group, max_tokens, least_saved=least_saved)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(rows)))
    for batch in batches:
        lengths_of = {int(group[row]): int(prompts[row]) for row in batch}
        whole = int(lengths[batch].sum())
        shared = sum(lengths_of.values()) + whole - int(prompts[batch].sum())
        is_shared = whole - shared >= least_saved * whole  # as in share_prompts
        assert (shared if is_shared else whole) <= max_tokens
    sizes = [sum(completions) + prompt for prompt, completions in groups]
    if least_saved == 0 and all(size <= max_tokens for size in sizes):  # no group is divided
        assert sum(len(set(group[batch].tolist())) for batch in batches) == len(groups)


def test_a_group_that_is_too_long_is_divided():
    lengths, prompts, group = torch.tensor([10, 9, 8, 7]), torch.tensor([4, 4, 4, 4]), torch.zeros(4, dtype=torch.int64)
    assert [batch.tolist() for batch in micro_batches_of_groups(lengths, prompts, group, 16, least_saved=0)] == [
        [0, 1],
        [2, 3],
    ]
    with pytest.raises(ValueError, match="a row of 10 tokens"):
        micro_batches_of_groups(lengths, prompts, group, 9, least_saved=0)


def test_where_sharing_saves_too_little_no_pass_is_longer_than_the_limit():
    lengths, prompts, group = torch.full((8,), 4032), torch.full((8,), 256), torch.zeros(8, dtype=torch.int64)
    shared = micro_batches_of_groups(lengths, prompts, group, 15360, least_saved=0)
    assert [len(batch) for batch in shared] == [4, 4]  # 15 360 tokens each
    alone = micro_batches_of_groups(lengths, prompts, group, 15360, least_saved=1 / 16)
    assert [len(batch) for batch in alone] == [3, 3, 2]  # four rows are 16 128 tokens, 5 % less if shared
