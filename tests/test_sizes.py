"""Sizes are said in the unit that suits them."""

from __future__ import annotations

import pytest

from qerl_pl.common.files import in_bytes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (221_184, "221 kB"),
        (999_499, "999 kB"),
        (999_501, "1 MB"),
        (5_450_000_000, "5.45 GB"),
        (1_500_000_000_000, "1.5 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_fitting_unit(count, said):
    assert in_bytes(count) == said
