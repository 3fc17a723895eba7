"""Tests that docs/real_models.md and docs/real_completions.md are what the script writes from the recorded lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from docs.real_models import OF_COMPLETIONS, PAGE, PICTURE, completions_page, groups, page, paired, read

PROBLEMS = 60


def validation(rollouts: int, strict: str, lenient: str | None = None) -> dict[str, Any]:
    """Make a record of a validation as tests/bench/bench_real_runs.py writes it."""
    lenient = lenient or strict
    shares = {name: text.count("1") / len(text) for name, text in (("strict", strict), ("lenient", lenient))}
    return {
        "rollouts": rollouts,
        "problems": len(strict),
        **shares,
        "completion_tokens": 200.0,
        "truncated_share": 0.1,
        "verdicts": {"strict": strict, "lenient": lenient},
    }


def run(
    arm: str, seed: int, *, task: str = "gsm8k_verl", rollouts: int = 116, alarm: str | None = None
) -> dict[str, Any]:
    """Make a record of a run with random verdicts."""
    generator = np.random.default_rng([seed, *arm.encode()])

    def verdicts(share: float) -> str:
        return "".join("01"[int(each)] for each in generator.random(PROBLEMS) < share)

    names = ("strict", "lenient", "entropy", "gap", "completion_tokens", "step_s", "rollout_s", "train_s")
    names += ("rollout_tokens_per_s", "host_bytes")
    return {
        "name": "real_runs/model-0.5b",
        "shape": {"task": task, "arm": arm, "seed": seed, "rollouts": rollouts, "config": []},
        "finished": alarm is None,
        "bits_per_weight": 6.5,
        "steps": 12,
        "curves": {name: generator.random(12).tolist() for name in names},
        "validations": [validation(0, verdicts(0.2), verdicts(0.4)), validation(rollouts, verdicts(0.6))],
        "alarm": alarm,
        "warnings": [],
        "run_s": 600.0,
        "start_s": [50.0],
        "validation_s": [9.0, 9.0],
        "median_step_s": 4.0,
        "memory_gib": {"planned": 13.0, "driver": None, "torch": None},
        "jobs": 5,
        "device": "a GPU",
        "commit": "abc",
    }


@pytest.fixture
def lines() -> list[dict]:
    arms = ("bf16", "nvfp4", "nvfp4_aqn")
    short = [run(arm, seed, task=task) for arm in arms for seed in (0, 1, 2) for task in ("gsm8k_verl", "gsm8k_boxed")]
    return [*short, run("nvfp4", 3, rollouts=600)]


def test_pages_are_what_the_script_makes_of_the_results():
    lines = read()
    assert PAGE.read_text() == page(lines)
    assert OF_COMPLETIONS.read_text() == completions_page(lines)
    assert PICTURE.exists() == bool(groups(lines))


def test_differences_pair_runs_of_equal_seed_and_length():
    one, other = run("nvfp4", 0), run("bf16", 0)
    one["validations"][-1] = validation(116, "1101")
    other["validations"][-1] = validation(116, "1000")
    [[seeds, points, over_problems, over_seeds]] = paired([one, run("nvfp4", 1)], [other], "strict", -1)
    assert (seeds, points, over_seeds) == ("1", "+50.0", "")
    low, high = stats.ttest_1samp([0, 100, 0, 100], 0).confidence_interval()
    assert over_problems == f"{low:+.1f} to {high:+.1f}"
    other["validations"][-1] = validation(100, "1000")
    assert paired([one], [other], "strict", -1) == [], "a run that was cut is not compared with a whole one"
    assert paired([one], [], "strict", -1) == []
    assert paired([run("nvfp4", 0)], [run("nvfp4", 0)], "lenient", 0) == [["1", "+0.0", "", ""]]


def test_alarms_and_runs_that_were_cut_are_seen(lines):
    assert "| model-0.5b | gsm8k_verl | bf16 | 3 | 116 |" in page(lines)
    assert len(groups(lines)["model-0.5b", "gsm8k_verl", "nvfp4"]) == 3, "a long run is apart"
    assert ("model-0.5b", "gsm8k_verl", "nvfp4") in groups(lines, is_long=True)
    lines.append(run("bf16", 4, alarm="stopped: the engine"))
    lines[-1]["validations"].pop()
    [row] = [row for row in page(lines).splitlines() if row.startswith("| model-0.5b | gsm8k_verl | bf16 | 3 of 4 ")]
    assert "| 116 |" in row
    assert row.endswith(" 1 |")
