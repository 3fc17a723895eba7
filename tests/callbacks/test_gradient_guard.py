"""The guard compares a step's gradient with those of earlier steps of the same kind: on a mini-batch with a signal,
that is, with rewards that differ within a group, or without one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.gradient_guard import GradientGuard
from qerl_pl.common.checks import CheckFailed


class Steps:
    """Feeds gradient norms to a guard, as a run does."""

    def __init__(self, guard: GradientGuard, folder: Path) -> None:
        self.guard = guard
        self.trainer: Any = SimpleNamespace(default_root_dir=str(folder), global_rank=0, global_step=0)
        loop, settings = SimpleNamespace(observers=[]), SimpleNamespace(mini_batches=1)
        self.module: Any = SimpleNamespace(loop=loop, settings=settings, rollout_index=0, grad_norm=None)
        self.optimizer: Any = None
        guard.on_fit_start(self.trainer, self.module)

    def take(self, *norms: float, has_signal: bool) -> None:
        for norm in norms:
            self.update(norm, groups=[False, has_signal, False])

    def update(self, *norms: float, groups: list[bool]) -> None:
        """Take the optimizer steps on one rollout. ``groups`` says for each of its groups whether it has a signal."""
        chosen = SimpleNamespace(has_signal=torch.tensor(groups), rows=lambda: [{"prompt": "1 + 1"}])
        for observe in self.module.loop.observers:
            observe(SimpleNamespace(chosen=chosen, places=range(len(groups))))
        for norm in norms:
            self.module.grad_norm = torch.tensor(norm)
            self.guard.on_before_optimizer_step(self.trainer, self.module, self.optimizer)
            self.trainer.global_step += 1
        self.module.rollout_index += 1


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(GradientGuard(), tmp_path)


def test_the_first_rewards_that_differ_are_no_alarm(steps):
    """A policy of 1.5 billion parameters earned no reward in its first 19 rollouts on GSM8K. Their gradients, of the KL
    divergence and the entropy alone, had norms of 3e-4, and the first gradient of rewards 0.04."""
    steps.take(*[3.35e-4] * 19, has_signal=False)
    steps.take(0.0419, *[0.1] * 3, has_signal=True)
    steps.take(*[4e-4] * 3, has_signal=False)
    steps.take(*[0.05] * 10, has_signal=True)


@pytest.mark.parametrize("has_signal", [False, True])
def test_a_larger_gradient_than_those_of_the_same_kind_stops_the_run(steps, has_signal):
    steps.take(*[0.5] * 20, has_signal=not has_signal)
    steps.take(*[2e-3] * 10, has_signal=has_signal)
    with pytest.raises(CheckFailed, match=r"rollout 30 is 0\.21, 105 times the usual 0\.002.*rollout_000030_rank_0"):
        steps.take(0.21, has_signal=has_signal)
    assert "1 + 1" in Path(steps.trainer.default_root_dir, "faults", "rollout_000030_rank_0.jsonl").read_text()


@pytest.mark.parametrize("has_signal", [False, True])
def test_a_gradient_that_is_not_finite_stops_the_run_at_once(steps, has_signal):
    with pytest.raises(CheckFailed, match="is nan"):
        steps.take(float("nan"), has_signal=has_signal)


def test_mini_batches_without_a_signal_are_not_compared_with_those_of_the_same_rollout_that_have_one(steps):
    steps.module.settings.mini_batches = 4
    for _ in range(20):
        steps.update(*[1e-4, 0.05, 1e-4, 1e-4] * 2, groups=[False, False, False, True, *[False] * 4])
    steps.update(1e-4, 1e-4, 1e-4, 0.05, groups=[*[False] * 7, True])
    with pytest.raises(CheckFailed, match="200 times the usual"):
        steps.update(0.02, groups=[*[False] * 7, True])


def test_no_gradient_is_no_step(steps):
    steps.take(*[0.0] * 50, has_signal=False)
    steps.take(1e3, has_signal=True)


def test_a_resumed_run_knows_the_norms_before(steps, tmp_path):
    steps.take(*[1e-3] * 10, has_signal=False)
    steps.take(*[0.1] * 10, has_signal=True)
    resumed = Steps(GradientGuard(), tmp_path)
    resumed.guard.load_state_dict(steps.guard.state_dict())
    for has_signal, norm in ((False, 0.11), (True, 11.0)):
        with pytest.raises(CheckFailed, match="110 times the usual"):
            resumed.take(norm, has_signal=has_signal)
    of_an_older_release = {"norms": [0.1] * 10}
    resumed.guard.load_state_dict(of_an_older_release)
    resumed.take(50.0, has_signal=False)
    with pytest.raises(CheckFailed, match="500 times"):
        resumed.take(50.0, has_signal=True)
