"""What is logged of rewards is a number, or nothing where there is none."""

from __future__ import annotations

import pytest
import torch

from callbacks.statistics import reward_statistics


@pytest.mark.parametrize(("rewards", "names"), [([], set()), ([2.0], {""}), ([1.0, 3.0], {"", "_std"})])
def test_only_what_is_defined_is_logged(rewards, names):
    found = reward_statistics(torch.tensor(rewards))
    assert found.keys() == names
    assert all(value.isfinite() for value in found.values())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rewards_of_any_size_have_the_spread_of_their_definition(scale):
    rewards = torch.tensor([1.0, 2.0, 6.0]) * scale
    found = reward_statistics(rewards)
    assert found[""].item() == pytest.approx(3 * scale)
    assert found["_std"].item() == pytest.approx(7**0.5 * scale)
