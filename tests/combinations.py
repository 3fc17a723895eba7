"""Choose combinations of test parameters."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def first_of(name: str, values: Sequence[Any]) -> Any:
    """Parametrize the fixture ``name`` with values of which all but the first are marked ``long``, for tests of code
    that does not depend on the value."""
    first, *others = values
    return pytest.mark.parametrize(
        name, [first, *(pytest.param(value, marks=pytest.mark.long) for value in others)], indirect=True
    )


def pairwise(*choices: Sequence[Any]) -> list[Any]:
    """List all combinations of the values of several parameters, most of them marked ``long``: every pair of values of
    two parameters also occurs in a combination without the mark."""

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(case), 2))

    cases = [*product(*(range(len(values)) for values in choices))]
    missing, chosen = set().union(*map(pairs, cases)), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return [
        pytest.param(
            *(values[place] for values, place in zip(choices, case, strict=True)),
            marks=[] if case in chosen else pytest.mark.long,
        )
        for case in cases
    ]
