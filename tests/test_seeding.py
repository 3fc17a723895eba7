"""Laws of the derived seeds."""

import hashlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.common.seeding import derive_seed

SEEDS, PURPOSES, INDICES = st.integers(-(2**63), 2**63), st.text(max_size=8), st.integers(0, 2**40)


@given(seed=SEEDS, purpose=PURPOSES, index=INDICES)
def test_a_seed_is_a_function_of_its_arguments_and_in_the_range_that_generators_take(seed, purpose, index):
    derived = derive_seed(seed, purpose, index)
    assert 0 <= derived < 2**63
    assert derived == derive_seed(seed, purpose, index)
    torch.Generator().manual_seed(derived)


@given(a=st.tuples(SEEDS, PURPOSES, INDICES), b=st.tuples(SEEDS, PURPOSES, INDICES))
def test_different_arguments_give_different_seeds(a, b):
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)


def test_separators_inside_a_purpose_do_not_mix_up_the_arguments():
    arguments = (("a/2", 3), ("a", 23), ("a/2/3", 0), ("a", 2))
    assert len({derive_seed(1, purpose, index) for purpose, index in arguments}) == 4


def test_neighbouring_indices_give_unrelated_seeds():
    seeds = torch.tensor([derive_seed(0, "rollout", index) for index in range(2000)])
    bits = torch.stack([(seeds >> bit) & 1 for bit in range(63)]).double()  # each a fair coin: mean 1/2, std 1/2
    assert (bits.mean(dim=1) - 0.5).abs().max() < 5 * 0.5 / 2000**0.5
    assert torch.corrcoef(bits).fill_diagonal_(0).abs().max() < 5 / 2000**0.5


def test_seeds_do_not_change_between_machines_and_versions():
    digest = hashlib.sha256(b"7/aqn/3").digest()
    assert derive_seed(7, "aqn", 3) == sum(byte << 8 * i for i, byte in enumerate(digest[:8])) // 2
