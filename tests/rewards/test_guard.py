"""If a reward raises or returns something wrong, the run ends with an error that names the reward. What a reward
changes in the Python process, such as random states, is undone."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from callbacks.graceful_stop import GracefulStop
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import WeightedReward, score_rewards
from qerl_pl.rewards.guard import RewardError
from qerl_pl.rewards.math import MathAnswer
from qerl_pl.rewards.verdict import Verdict

PROMPTS = [Prompt((1,), "5")] * 3
COMPLETIONS = [Completion((1,), (0.0,), True, "<answer>5</answer>")] * 3


def scored(reward: Callable[..., Any], *, seed: int = 0, **settings: Any) -> list[float]:
    table = score_rewards([WeightedReward("mine", reward, **settings)], PROMPTS, COMPLETIONS, seed=seed)
    return table.components["mine"].tolist()


def raises(prompts, completions):
    return {}["no such key"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, r"failed on a batch of 3 rows: KeyError: 'no such key' \(test_guard.py, line \d+, in raises\)"),
        (lambda prompts, completions: sys.exit(0), r"asked the program to exit on a batch of 3 rows: SystemExit: 0"),
        (lambda prompts, completions: os._exit(7), r"asked the program to exit .* os._exit\(7\)"),
    ],
)
def test_an_exception_or_an_exit_names_the_reward(reward, message):
    with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
        scored(reward)
    assert os._exit.__module__ in ("posix", "nt"), "put back"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_program_while_a_reward_runs(number):
    stop = GracefulStop()
    stop._handle(number, None)
    with pytest.raises(SystemExit) as ended:
        scored(lambda prompts, completions: stop._handle(number, None))
    assert ended.value.code == stop.exit_status == 128 + number


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "returned None; expected a list with a number, or None for unscored, for each of 3 rows"),
        ("123", "returned '123'; expected a list"),
        (1.0, "returned 1.0; expected a list"),
        ([1, 2], "returned 2 scores for 3 rows"),
        ([1, "0.5", 1], r"scored row 1 as '0.5'; expected a finite number \(of 32 bits\) or None"),
        ([[1], [2], [3]], r"scored row 0 as \[1\]"),
        ([1, 1, float("nan")], "scored row 2 as nan"),
        ([1, float("-inf"), 1], "scored row 1 as -inf"),
        ([1, 1e39, 1], r"scored row 1 as 1e\+39"),
        ([1, 1j, 1], "scored row 1 as 1j"),
        (torch.ones(3, 1), r"scored row 0 as \[1.0\]"),
    ],
    ids=repr,
)
def test_what_is_no_score_names_the_reward_and_the_row(found, message):
    with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
        scored(lambda prompts, completions: found)


@pytest.mark.parametrize(
    "found", [(0, 1, 0), torch.tensor([0.0, 1, 0]), np.array([0, 1, 0]), [False, np.float32(1), torch.tensor(0)]]
)
def test_numbers_of_other_kinds_are_scores(found):
    assert scored(lambda prompts, completions: found) == [0.0, 1.0, 0.0]


class Judging:
    """Reward whose method ``judge`` takes 0.15 seconds per row, reports its progress after each row, and returns the
    given verdicts."""

    def __init__(self, *verdicts: Any) -> None:
        self.verdicts = verdicts

    def __call__(self, prompts, completions): ...

    def judge(self, texts, answers, progress):
        for _ in self.verdicts:
            time.sleep(0.15)
            progress(1)
        return list(self.verdicts)


def test_a_judge_that_returns_no_verdicts_is_named():
    with pytest.raises(RewardError, match=r"reward 'mine': judge\(\) returned no list of Verdict"):
        scored(Judging(1.0))


def test_the_clock_starts_again_when_rows_get_done_and_not_at_all_without_a_limit():
    assert scored(Judging(*[Verdict(1.0, "")] * 3), time_limit=0.4) == [1.0] * 3  # 0.45 seconds in all
    assert scored(Judging(*[Verdict(1.0, "")] * 3), time_limit=None) == [1.0] * 3


def sleeps(prompts, completions):
    time.sleep(60)


def sleeps_through_errors(prompts, completions):
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def computes(prompts, completions):
    while True:
        pass


def waits_for_another_process(prompts, completions):
    subprocess.run(["sleep", "60"], check=True)


@pytest.mark.parametrize("reward", [sleeps, sleeps_through_errors, computes, waits_for_another_process])
def test_a_reward_that_takes_too_long_is_stopped(reward):
    begin = time.monotonic()
    with pytest.raises(RewardError, match=r"reward 'mine' took more than 0.2 seconds on a batch of 3 rows"):
        scored(reward, time_limit=0.2)
    assert time.monotonic() - begin < 5


def _double(value: int, results: Any) -> None:
    results.put(2 * value)


def with_processes_and_an_alarm(prompts, completions):
    """Reward that returns what a child process computes, and then sets a handler and a timer for SIGALRM, as
    math-verify does."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_double, args=(21, results))
    child.start()
    found = results.get()
    child.join()
    assert child.exitcode == 0
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    return [float(found)] * len(prompts)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_rewards_may_have_processes_and_alarms_of_their_own():
    before, (timer, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    assert scored(with_processes_and_an_alarm, time_limit=20) == [42.0] * 3
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(timer, abs=0.5), "the alarm went with it"


@pytest.mark.slow
def test_the_verifiers_processes_work_within_the_guard():
    assert scored(MathAnswer(num_workers=1), time_limit=100) == [1.0] * 3


def rearranges_the_process(prompts, completions):
    os.chdir("/")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    sys.setrecursionlimit(5000)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prompts.clear()
    completions.clear()
    return [1.0] * 3


def test_what_a_reward_changes_in_the_process_is_undone():
    def state() -> tuple[Any, ...]:
        streams = torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        settings = torch.is_grad_enabled(), torch.get_default_dtype(), sys.getrecursionlimit()
        return Path.cwd(), *settings, signal.getsignal(signal.SIGTERM), *streams

    before = state()
    assert scored(rearranges_the_process) == [1.0] * 3
    assert state() == before
    assert len(PROMPTS) == len(COMPLETIONS) == 3


def test_what_a_reward_draws_is_a_function_of_the_seed():
    def draws(prompts, completions):
        return [random.random(), torch.rand(()), np.random.rand()]  # noqa: NPY002

    first = scored(draws, seed=1)
    random.random()
    torch.rand(1)
    assert scored(draws, seed=1) == first
    assert scored(draws, seed=2) != first
