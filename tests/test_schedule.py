"""Laws of the noise schedule."""

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.noise.schedule import Decay, stage_of, stage_sigma

DECAYS: tuple[Decay, ...] = get_args(Decay)


def trend(num_stages: int, sigma_start: float, sigma_end: float) -> list[float]:
    """Compute sigma of every stage as the published code of arXiv 2510.11696 does."""
    noisy = num_stages - 1
    return [0.0] + [sigma_start * (sigma_end / sigma_start) ** (i / (noisy - 1)) for i in range(noisy)]


@given(num_stages=st.integers(3, 12), per_stage=st.integers(1, 9))
def test_stages_of_a_run_that_divides_evenly_are_those_of_algorithm_1(num_stages, per_stage):
    num_rollouts = num_stages * per_stage  # the algorithm counts steps from 1: k = floor((step - 1) / floor(M / K))
    stages = [stage_of(index, num_rollouts=num_rollouts, num_stages=num_stages) for index in range(num_rollouts)]
    assert stages == [index // per_stage for index in range(num_rollouts)]


@given(num_stages=st.integers(3, 12), num_rollouts=st.integers(1, 200))
def test_stages_are_in_order_and_differ_by_at_most_one_rollout(num_stages, num_rollouts):
    stages = [stage_of(i, num_rollouts=num_rollouts, num_stages=num_stages) for i in range(num_rollouts)]
    assert stages == sorted(stages)
    sizes = [stages.count(stage) for stage in range(num_stages)]
    assert max(sizes) - min(sizes) <= 1


@given(num_stages=st.integers(3, 12), ratio=st.floats(1e-3, 1.0))
def test_the_exponential_decay_equals_the_published_trend(num_stages, ratio):
    result = [
        stage_sigma(i, num_rollouts=num_stages, num_stages=num_stages, sigma_start=0.01, sigma_end=0.01 * ratio)
        for i in range(num_stages)
    ]
    assert result == pytest.approx(trend(num_stages, 0.01, 0.01 * ratio), rel=1e-12)


def test_the_papers_run_has_the_levels_that_its_text_names():
    result = [stage_sigma(i, num_rollouts=600, sigma_start=1e-2, sigma_end=1e-4) for i in range(600)]
    expected = [0, 1e-2, 5.623e-3, 3.162e-3, 1.778e-3, 1e-3, 5.623e-4, 3.162e-4, 1.778e-4, 1e-4]  # 100^(-i / 8) / 100
    assert result[::60] == pytest.approx(expected, rel=1e-3)
    assert all(result[i] == result[i - i % 60] for i in range(600))


@pytest.mark.parametrize("decay", DECAYS)
@given(num_stages=st.integers(3, 12), num_rollouts=st.integers(12, 200))
def test_every_decay_starts_silent_then_falls_from_start_to_end(decay, num_stages, num_rollouts):
    levels = [
        stage_sigma(i, num_rollouts=num_rollouts, num_stages=num_stages, sigma_start=0.05, sigma_end=5e-4, decay=decay)
        for i in range(num_rollouts)
    ]
    noisy = [level for level in levels if level > 0]
    assert levels[: len(levels) - len(noisy)] == [0.0] * (len(levels) - len(noisy))
    assert noisy == sorted(noisy, reverse=True)
    assert (noisy[0], noisy[-1]) == (0.05, 0.05 if decay == "constant" else 5e-4)
    assert len(set(noisy)) == (1 if decay == "constant" else num_stages - 1)
    assert stage_sigma(4000, num_rollouts=num_rollouts, sigma_start=0.05, sigma_end=5e-4, decay=decay) == noisy[-1]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.6), ("cosine", 0.6), ("exponential", math.sqrt(0.2))])
def test_the_level_halfway(decay, middle):
    result = stage_sigma(2, num_rollouts=4, num_stages=4, sigma_start=1.0, sigma_end=0.2, decay=decay)
    assert result == pytest.approx(middle)


def test_the_logarithmic_decay_is_fast_first_and_slow_later():
    levels = [stage_sigma(i, num_rollouts=10, decay="logarithmic") for i in range(1, 10)]
    falls = [before - after for before, after in pairwise(levels)]
    assert falls == sorted(falls, reverse=True)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"num_stages": 2}, "num_stages is 2"),
        ({"sigma_end": 0.0}, "sigma_end is 0.0"),
        ({"sigma_end": -1.0}, "sigma_end is -1.0"),
        ({"sigma_end": math.nan}, "sigma_end is nan"),
        ({"sigma_end": 1.0}, "swap them"),
        ({"sigma_start": math.nan}, "sigma_start is nan"),
        ({"sigma_start": math.inf}, "sigma_start is inf"),
        ({"index": -1}, "index is -1"),
        ({"num_rollouts": 0}, "num_rollouts is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(bad, named):
    with pytest.raises(ValueError, match=named):
        stage_sigma(**{"index": 0, "num_rollouts": 100, **bad})
