"""Tests of how jumps of a gap are computed from a run's curves."""

from __future__ import annotations

import math

import pytest
import torch

from callbacks.rollout_evidence import GAP_FLOOR
from qerl_pl.results.curves import Curve
from tests.bench.noted import jumps


def test_jumps_are_those_that_the_evidence_would_see():
    floor = GAP_FLOOR[torch.bfloat16]
    values = [10 * floor, 10 * floor, 20 * floor, 10 * floor]
    curve = Curve([0, 1, 2, 3], values, [0.0] * 4)
    ratio, sigmas, share = jumps({"evidence/gap": curve}, "gap", torch.bfloat16)
    assert ratio == pytest.approx(2)
    assert sigmas == pytest.approx(math.log(2) / 0.1)
    assert share == pytest.approx(2 / 3), "a ratio of 3 and 6 deviations would stop"
    noise = Curve([0, 1, 2, 3], [0.0, 0.0, 1e-2, 0.0], [0.0] * 4)
    quiet = jumps({"evidence/gap_of_all": curve, "aqn/sigma": noise}, "gap_of_all", torch.bfloat16)
    assert quiet == pytest.approx([1.0, 0.0, 0.0]), "rollouts with noise are not compared"
