"""Evaluations: the table's numbers, unscored completions, going on after an interruption."""

from __future__ import annotations

import pytest

from callbacks.evaluation import summarize
from qerl_pl.common.types import Prompt
from qerl_pl.evaluation.cache import EvaluationCache
from qerl_pl.evaluation.evaluation import never_right


def row(score: float | None, *, finished: bool = True) -> dict:
    return {"rewards": {"answer": score}, "reward": score, "finished": finished, "num_tokens": 10}


def test_accuracies_are_over_problems_and_unscored_counts_as_wrong():
    rows = [row(1.0), row(0.0), row(1.0), row(1.0), row(None), row(0.0, finished=False)]
    summary = summarize(rows, n=2, name="answer", level=0.95)
    assert summary["num_problems"] == 3
    assert summary["accuracy"]["avg@2"]["mean"] == pytest.approx(0.5)
    assert summary["accuracy"]["pass@2"]["mean"] == pytest.approx(2 / 3)
    assert summary["accuracy"]["avg@2"]["low"] <= 0.5 <= summary["accuracy"]["avg@2"]["high"]
    assert summary["unscored_share"] == pytest.approx(1 / 6)
    assert summary["truncated_share"] == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="no whole number of problems"):
        summarize(rows[:5], n=2, name="answer", level=0.95)


def test_finished_batches_are_found_again_by_the_same_policy_alone(tmp_path):
    prompts, rows = [Prompt((1, 2), "3")], [{"completion": "\u00e9", "reward": 1.0}]
    EvaluationCache(tmp_path, {"adapter": 1}).write(prompts, rows)
    assert EvaluationCache(tmp_path, {"adapter": 1}).read(prompts, num_rows=1) == rows
    assert EvaluationCache(tmp_path, {"adapter": 2}).read(prompts, num_rows=1) is None
    assert EvaluationCache(tmp_path, {"adapter": 1}).read([Prompt((1, 2), "4")], num_rows=1) is None


@pytest.mark.parametrize("damaged", [b"", b'{"completion": "', b"{}\n{}\n", b"\xff\n"])
def test_a_batch_whose_file_is_damaged_is_not_finished(tmp_path, damaged):
    prompts, rows = [Prompt((1, 2), "3")], [{"completion": "\u2028", "reward": 1.0}]
    cache = EvaluationCache(tmp_path, {})
    cache.write(prompts, rows)
    [file] = tmp_path.glob("*/*.jsonl")
    file.write_bytes(damaged)
    assert cache.read(prompts, num_rows=1) is None
    cache.write(prompts, rows)
    assert cache.read(prompts, num_rows=1) == rows


def test_a_reward_that_cannot_say_what_is_right_is_recognised_and_the_summary_names_it():
    def rows(*values: float | None) -> list[dict]:
        return [{"rewards": {"own": value}, "reward": value, "finished": True, "num_tokens": 1} for value in values]

    assert never_right(rows(0.9, 0.0, None), "own")
    assert never_right(rows(2.0, 0.0), "own")
    assert not never_right(rows(1.0, 0.5), "own")
    assert not never_right(rows(0.0, None), "own")
    assert not never_right([], "own")
    assert summarize(rows(1.0, 0.0), n=1, name="own", level=0.95)["right"] == "own = 1"
