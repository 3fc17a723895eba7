"""Laws of the entropy bonus that adapts."""

from __future__ import annotations

import math

import pytest

from qerl_pl.objective import Objective
from qerl_pl.objective.entropy_control import EntropyControl


def test_it_acts_below_the_target_alone_and_follows_the_papers_recursion():
    control = EntropyControl(target=0.2, step=0.005)
    coefficient, seen = 0.0, []
    for entropy in (0.5, 0.3, 0.19, 0.1, 0.05, 0.25, 0.2, 0.1):
        seen.append(control.in_force(coefficient, entropy))
        coefficient = control.following(coefficient, entropy)
    # Not below 0 while entropy is high; then 0, step, 2 step; off above the target, which takes one step back.
    assert seen == pytest.approx([0.0, 0.0, 0.0, 0.005, 0.01, 0.0, 0.01, 0.01])


@pytest.mark.parametrize("name", ["target", "step"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"entropy_control.{name} is {value}"):
        EntropyControl(**{name: value})


def test_a_fixed_bonus_beside_it_is_refused():
    with pytest.raises(ValueError, match=r"entropy_coefficient is 0\.1 and entropy_control is set"):
        Objective(entropy_coefficient=0.1, entropy_control=EntropyControl())
