"""Tests of tests/correctness/faults.py: whether a run with a fault counts as stopped, as warned or as neither."""

import warnings

import pytest

from qerl_pl.common.checks import CheckFailed
from tests.correctness import faults

GAP = "the sampler's log-probabilities of rollout 2 differ from the trainer's, 3.4 times the usual"
CHANGE = "the mean length of completions changed from 149 to 38, more than chance explains"


@pytest.mark.parametrize(
    ("heard", "stop", "fault", "outcome"),
    [
        ([GAP], "the tokens are no draws", "a fault", "stopped"),
        ([CHANGE], "the tokens are no draws", "a fault", "stopped"),
        ([GAP], None, "a fault", "warned"),
        ([CHANGE], None, "a fault", "silent"),
        ([CHANGE], None, None, "warned"),
        ([], None, "a fault", "silent"),
    ],
)
def test_a_stop_counts_whatever_was_said_before_and_a_learned_change_only_without_a_fault(
    monkeypatch, heard, stop, fault, outcome
):
    def run(command: list[str]) -> None:
        for words in heard:
            warnings.warn(words, stacklevel=1)
        if stop:
            raise CheckFailed(stop)

    monkeypatch.setattr(faults.train, "main", run)
    result = faults.heard_in(["fit"], fault)
    assert result["outcome"] == outcome
    assert result["said"] == (stop or (heard[0] if outcome == "warned" else ""))


def test_a_run_without_enough_memory_was_not_stopped_by_a_check(monkeypatch):
    def run(command: list[str]) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(faults.train, "main", run)
    result = faults.heard_in(["fit"], "a fault")
    assert result["outcome"] == "failed"
    assert result["outcome"] not in faults.COUNTED
    assert result["said"] == "RuntimeError: CUDA out of memory"


def test_the_reward_of_pretrained_runs_differs_in_a_group_and_cannot_be_learned_by_length():
    rows = [faults.Completion((1,), (0.0,), text=str(place), finished=True) for place in range(1000)]
    rewards = faults.of_chance([], rows)
    assert len(set(rewards)) == len(rows)
    assert 0.45 < sum(rewards) / len(rewards) < 0.55
