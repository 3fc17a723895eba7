"""What callbacks print and log about rollouts and evaluations."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.completions import CompletionLogger
from callbacks.evaluation import summarize
from callbacks.signal_report import signal_words
from callbacks.statistics import reward_statistics
from qerl_pl.common.types import Prompt
from qerl_pl.evaluation.cache import EvaluationCache
from qerl_pl.evaluation.evaluation import warn_if_not_counted


class TestEvaluation:
    @staticmethod
    def row(score: float | None, *, finished: bool = True) -> dict:
        return {"rewards": {"answer": score}, "reward": score, "finished": finished, "num_tokens": 10}

    def test_accuracies_are_over_problems_and_unscored_counts_as_wrong(self):
        rows = [*map(self.row, (1.0, 0.0, 1.0, 1.0, None)), self.row(0.0, finished=False)]
        summary = summarize(rows, n=2, name="answer")
        assert summary["num_problems"] == 3
        assert summary["right"] == "answer = 1"
        assert summary["accuracy"]["avg@2"]["mean"] == pytest.approx(0.5)
        assert summary["accuracy"]["pass@2"]["mean"] == pytest.approx(2 / 3)
        assert summary["accuracy"]["avg@2"]["low"] <= 0.5 <= summary["accuracy"]["avg@2"]["high"]
        assert summary["unscored_share"] == pytest.approx(1 / 6)
        assert summary["truncated_share"] == pytest.approx(1 / 6)
        with pytest.raises(ValueError, match="no whole number of problems"):
            summarize(rows[:5], n=2, name="answer")

    @pytest.mark.parametrize(
        ("scores", "expected"),
        [
            ((0.9, 0.0, None), "positive values and never 1. Training is not affected, .* are 0"),
            ((2.0, 0.0), "never 1"),
            ((1.5, 1.0), "some completions more than 1. Training is not affected, .* count these completions as wrong"),
            ((1.0, 0.5), None),
            ((0.0, None), None),
            ((), None),
        ],
    )
    def test_a_reward_that_cannot_say_what_is_right_is_recognised(self, recwarn, scores, expected):
        warn_if_not_counted(list(map(self.row, scores)), "answer")
        assert [bool(re.search(expected or "", str(warning.message))) for warning in recwarn] == [True] * bool(expected)

    def test_finished_batches_are_found_again_by_the_same_policy_alone(self, tmp_path):
        prompts, rows = [Prompt((1, 2), "3")], [{"completion": "\u00e9", "reward": 1.0}]
        EvaluationCache(tmp_path, {"adapter": 1}).write(prompts, rows)
        assert EvaluationCache(tmp_path, {"adapter": 1}).read(prompts, num_rows=1) == rows
        assert EvaluationCache(tmp_path, {"adapter": 2}).read(prompts, num_rows=1) is None
        assert EvaluationCache(tmp_path, {"adapter": 1}).read([Prompt((1, 2), "4")], num_rows=1) is None

    @pytest.mark.parametrize("damaged", [b"", b'{"completion": "', b"{}\n{}\n", b"\xff\n"])
    def test_a_batch_whose_file_is_damaged_is_not_finished(self, tmp_path, damaged):
        prompts, rows = [Prompt((1, 2), "3")], [{"completion": "\u2028", "reward": 1.0}]
        cache = EvaluationCache(tmp_path, {})
        cache.write(prompts, rows)
        [file] = tmp_path.glob("*/*.jsonl")
        file.write_bytes(damaged)
        assert cache.read(prompts, num_rows=1) is None
        cache.write(prompts, rows)
        assert cache.read(prompts, num_rows=1) == rows


class TestSignalReport:
    @pytest.mark.parametrize(
        ("with_signal", "unscored", "cut_off", "text"),
        [
            (2, 1, 0, "2 of 6 groups had one: their completions earned different rewards"),
            (
                0,
                0,
                0,
                "none of 6 groups had one: all completions of each prompt earned the same, so nothing was learned from",
            ),
            (0, 24, 0, "none of 6 groups had one: of 24 completions 24 could not be scored, so nothing"),
            (0, 2, 3, "2 could not be scored and 3 were cut off at max_tokens (model.objective.filter_truncated); all"),
            (0, 0, 24, "24 completions 24 were cut off at max_tokens (model.objective.filter_truncated), so nothing"),
        ],
    )
    def test_no_signal_is_told_apart_from_some_and_has_its_cause(self, with_signal, unscored, cut_off, text):
        assert text in signal_words(with_signal, 6, rows=24, unscored=unscored, cut_off=cut_off)


@pytest.mark.parametrize(("rewards", "names"), [([], set()), ([2.0], {""}), ([1.0, 3.0], {"", "_std"})])
def test_only_statistics_that_are_defined_are_logged(rewards, names):
    statistics = reward_statistics(torch.tensor(rewards))
    assert statistics.keys() == names
    assert all(value.isfinite() for value in statistics.values())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rewards_of_any_size_have_the_spread_of_their_definition(scale):
    statistics = reward_statistics(torch.tensor([1.0, 2.0, 6.0]) * scale)
    assert statistics[""].item() == pytest.approx(3 * scale)
    assert statistics["_std"].item() == pytest.approx(7**0.5 * scale)


def test_numbers_of_tokens_are_never_those_of_other_completions(tmp_path):
    """A start from an older checkpoint may store numbers of tokens for fewer rollouts than the one before it."""
    old = tmp_path / "completions" / "train-000010.safetensors"
    old.parent.mkdir()
    old.touch()
    trainer: Any = SimpleNamespace(default_root_dir=str(tmp_path), is_global_zero=True, loggers=[])
    module: Any = SimpleNamespace(sampling=SimpleNamespace(num_completions=1))
    rollout = SimpleNamespace(sampled=SimpleNamespace(rows=lambda: [{"completion": "new"}]))
    logger = CompletionLogger(num_text=0, tokens_every=20)
    logger.on_train_batch_end(trainer, module, {"rollout_index": 10, "rollout": rollout})
    assert "new" in old.with_suffix(".jsonl").read_text()
    assert not old.exists()


def test_a_rollout_that_is_not_written_keeps_no_completions_of_an_earlier_start(tmp_path):
    names = [f"{name}.{kind}" for name in ("train-000003", "train-000004") for kind in ("jsonl", "safetensors")]
    names += ["validate-000003.jsonl", "validate-000004.jsonl"]
    (tmp_path / "completions").mkdir()
    for name in names:
        (tmp_path / "completions" / name).touch()
    trainer: Any = SimpleNamespace(default_root_dir=str(tmp_path), is_global_zero=True, loggers=[])
    CompletionLogger(every=2).on_train_batch_end(trainer, SimpleNamespace(), {"rollout_index": 3})  # pyright: ignore
    left = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert left == ["train-000004.jsonl", "train-000004.safetensors", "validate-000003.jsonl"]
