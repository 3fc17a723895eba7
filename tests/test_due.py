"""Which rollouts get the checks that take long."""

from __future__ import annotations

import pytest

from qerl_pl.common.checks import EARLY, is_due


@pytest.mark.parametrize("every", [1, 3, 8])
def test_the_first_rollouts_and_then_every_so_many(every):
    due = [index for index in range(40) if is_due(index, every)]
    assert due == sorted({*range(EARLY), *range(0, 40, every)})
