"""Every constant of the checks and of the memory plan is in the table, and what the table says of one is true."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.rollout_evidence import GAP_FLOOR
from qerl_pl.results.curves import Curve
from tests.bench.limits import CONSTANTS, NOT_READ, SCANNED, limits_table, measured_again
from tests.bench.noted import canary_share, jumps, longest_run, pass_overhead
from tests.integration.conftest import ROOT


def numbers_of(path: Path) -> set[str]:
    """Names of a module's constants whose values have numbers and no texts."""
    constants: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        values = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
        numeric = any(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if numeric and not any(isinstance(value, str) for value in values):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            constants |= {name for name in names if name.isupper() and not name.startswith("_")}
    return constants


def test_every_number_of_the_checks_and_the_plan_is_read_or_has_a_reason():
    files = [path for folder in SCANNED for path in (ROOT / folder).rglob("*.py")]
    constants = set().union(*(numbers_of(path) for path in files))
    read = {constant.name.split(",")[0].removeprefix("1 / ") for constant in CONSTANTS}
    assert {"TOLERANCE", "MAX_GAP", "HEADROOM"} <= constants
    assert constants - read - NOT_READ.keys() == set(), "add these to ROWS or REASONS"
    assert NOT_READ.keys() - constants == set(), "these are gone"


def line(**readings: Any) -> dict[str, Any]:
    about = {"name": "real_checks/small", "shape": {"every": 1}, "format": "bf16", "dtype": "bfloat16", "seed": 0}
    alarm = {"outcome": "silent", "rollout": None, "said": ""}
    return {**about, "noise": False, "alarm": alarm, "probe_strength": [0.25], **readings}


def row(text: str, name: str) -> list[str]:
    [found] = [part for part in text.splitlines() if part.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_the_margin_is_that_of_the_worst_seed_and_an_exceeded_limit_is_said():
    lines = [line(probe_excess=[1.0, 1.6], evidence={"gap": [0.01, 0.02]}), line(probe_excess=[1.2, 2.0])]
    text = limits_table(lines)
    assert row(text, "MARGIN")[-2:] == ["2", "x 2"]
    assert row(text, "MAX_GAP")[-2:] == ["0.02", "x 15"]
    assert row(text, "STRENGTHS, largest")[-2:] == ["0.25", "x 16"]
    assert row(text, "max_ratio")[-2:] == ["-", "not read"]
    assert row(text, "1 (a right engine's excess)")[-1] == "1 to 1.2 of it"
    far = limits_table([line(probe_excess=[1.0, 5.0], canary_share=[0.1, 1.25])])
    assert row(far, "MARGIN")[-1] == "x 0.8 alone"
    assert row(far, "TOLERANCE and MARGIN")[-1] == "x 0.8 (EXCEEDED)"


def test_a_model_in_two_formats_has_two_columns():
    text = limits_table([line(gap_max=[1.0, 2.0]), line(gap_max=[1.0, 3.0]) | {"format": "nvfp4"}])
    assert row(text, "MAX_LOG_RATIO")[-3:] == ["2", "3", "x 6.7"]


def test_costs_are_those_that_the_benchmarks_measured_again():
    def rung(level: str, seconds: float) -> dict[str, Any]:
        return {"name": f"rungs/fused-{level}", "shape": {"model": "7B"}, "median_s": seconds}

    constant = {"name": "constants/BLOCK_S", "today": 3e-6, "measured": 6e-6}
    text = measured_again([constant, rung("none", 1.0), rung("blocks", 1.31), rung("offload", 1.31 * 1.07)])
    assert row(text, "BLOCK_S")[1:] == ["3e-06", "6e-06", "2.00 of it"]
    assert row(text, "FUSED_WHOLE, 7B")[2:] == ["0.31", "1.00 of it"]
    assert row(text, "OFFLOAD, 7B")[2:] == ["0.07", "1.00 of it"]


def test_the_overhead_of_passes_is_found_in_the_times_of_updates():
    tokens, passes = [900.0, 5000.0, 3000.0, 7000.0, 1000.0], [1.0, 2.0, 1.0, 3.0, 1.0]
    seconds = [1e-3 * (token + 600 * count) for token, count in zip(tokens, passes, strict=True)]
    seconds[0] = 60.0  # the first compiles
    fit = pass_overhead({"pass_tokens": tokens, "passes": passes, "train_s": seconds})
    assert fit == pytest.approx({"overhead_tokens": 600, "s_per_token": 1e-3, "error": 0}, abs=1e-9)
    alike = pass_overhead({"pass_tokens": [8.0] * 5, "passes": [1.0] * 5, "train_s": [1.0] * 5})
    assert alike["overhead_tokens"] is None


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


def test_of_the_canarys_two_limits_the_one_that_is_farther_away_counts():
    gap, excess = Curve([0, 1], [0.01, 0.04], [0.0] * 2), Curve([0, 1], [8.0, 2.0], [0.0] * 2)
    curves = {"canary/probe_gap": gap, "canary/probe_excess": excess}
    assert canary_share(curves, "probe", torch.bfloat16) == pytest.approx([0.5, 0.5])
    assert canary_share(curves, "score", torch.bfloat16) == []


def test_the_longest_run_is_of_neighbours():
    assert longest_run([True, False, True, True, False]) == 2
    assert longest_run([]) == 0
