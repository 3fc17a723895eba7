"""The protocol of rewards, and the weighted sum of several rewards."""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.guard import RewardError, checked_scores, guarded
from qerl_pl.rewards.turn import assistant_turn
from qerl_pl.rewards.verdict import CAUSES, Cause, Verdict, no_progress


@runtime_checkable
class Judge(Protocol):
    """A reward that also says why. Where a reward has this method, it is called, and ``__call__`` is not."""

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """A verdict a row; ``progress`` is told how many rows just got done."""
        ...


@runtime_checkable
class Limited(Protocol):
    """A reward that depends on the longest completion that may be sampled."""

    def limited_to(self, max_tokens: int) -> Callable[..., Any]:
        """The reward for this limit, in tokens.

        Raises:
            ValueError: it was given another one.
        """
        ...


class Reward(Protocol):
    """Scores completions. A class (settings in its constructor) or a plain function: YAML takes both.

    It is called with two lists, whatever its parameters are named; annotations are not needed.
    """

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """One score a row; ``None`` means unscored: the row is left out of the loss and counted, never taken as 0.

        Args:
            prompts: [B] the prompt of each row, repeated for the rows of a group: ``text``, ``messages``, ``tokens``,
                ``answer``, and as ``row`` all columns of the row of the data set.
            completions: [B] ``text``, ``tokens``, ``logprobs``, and whether it ``finished``.
        """
        ...


@dataclass(frozen=True)
class WeightedReward:
    """One term of the sum: YAML writes it as ``{name: answer, weight: 1.0, reward: CLASS_OR_FUNCTION}``.

    Args:
        name: what the component is logged as.
        reward: what scores it: a function of two lists, prompts and completions, that returns a list with a number, or
            None for unscored, for each completion; or a class with such a ``__call__``.
        weight: its factor in the sum; 0 only logs it, so that a row which it leaves unscored still counts.
        time_limit: seconds that it may take for a batch, after which the run stops; null: no limit. Where it reports
            rows as they get done (a ``judge`` method with ``progress``), seconds from one report to the next.

    Raises:
        ValueError: the name is empty, a number is not finite or negative, or the reward does not take two lists.
    """

    name: str
    reward: Callable[..., Any]
    weight: float = 1.0
    time_limit: float | None = 600.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a reward's name is empty; expected the name to log it under, e.g. 'answer'")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.name!r} is {self.weight}; expected a finite number")
        if self.time_limit is not None and not 0 < self.time_limit < threading.TIMEOUT_MAX:
            raise ValueError(
                f"the time_limit of reward {self.name!r} is {self.time_limit}; expected seconds, more than 0, or null"
            )
        if not isinstance(self.reward, Judge):
            _check_parameters(self.name, self.reward)


class RewardTable(NamedTuple):
    """The scores of one batch."""

    total: Tensor
    """[B] fp32, weighted sum of the components, 0 on unscored rows."""
    scored: Tensor
    """[B] bool, False where a component that has a weight is unscored."""
    components: dict[str, Tensor]
    """Name to [B] fp32, before weighting, NaN where that component is unscored."""
    verdicts: dict[str, tuple[Verdict, ...]]
    """Name to [B] scores with their reasons."""
    only_logged: frozenset[str] = frozenset()
    """Names of the components without a weight."""

    def causes(self) -> dict[Cause, int]:
        """Count the missing scores by cause; causes without any have 0."""
        counts = Counter(verdict.cause for verdicts in self.verdicts.values() for verdict in verdicts)
        return {cause: counts[cause] for cause in CAUSES}

    def common_reason(self) -> str:
        """The reason that most of the missing scores with a weight have; there has to be one."""
        weighted = (verdicts for name, verdicts in self.verdicts.items() if name not in self.only_logged)
        missing = (verdict for verdicts in weighted for verdict in verdicts if verdict.score is None)
        return Counter(verdict.reason for verdict in missing).most_common(1)[0][0]


def ready_rewards(
    rewards: Sequence[WeightedReward], *, max_tokens: int, metric: str | None = None
) -> list[WeightedReward]:
    """The rewards of a run, checked together, and told the longest completion where they depend on it.

    Args:
        rewards: as YAML gives them.
        max_tokens: longest completion that is sampled in training.
        metric: name of one of them that something else refers to; None: nothing does.

    Raises:
        ValueError: there is none, two share a name, none has a weight, ``metric`` names none, or one was given another
            limit than ``max_tokens``.
    """
    _check_names(rewards)
    if all(term.weight == 0 for term in rewards):
        raise ValueError("every reward of model.rewards has weight 0, which only logs; give one a weight")
    names = [term.name for term in rewards]
    if metric is not None and metric not in names:
        raise ValueError(
            f"model.dynamic_sampling.metric is {metric!r}; expected the name of a reward: {', '.join(names)}, or null"
        )
    return [
        replace(term, reward=term.reward.limited_to(max_tokens)) if isinstance(term.reward, Limited) else term
        for term in rewards
    ]


def score_rewards(
    rewards: Sequence[WeightedReward], prompts: Sequence[Prompt], completions: Sequence[Completion], *, seed: int = 0
) -> RewardTable:
    """Score a batch with every component.

    Args:
        rewards: the terms of the sum.
        prompts: [B] the prompt of each row.
        completions: [B] with their text.
        seed: of the global random streams while a reward runs.

    Raises:
        ValueError: there is no reward, two share a name, or prompts and completions differ in number.
        RewardError: a reward failed, took too long, or returned what is no score for each row.
    """
    _check_names(rewards)
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions; expected one prompt a row")

    total = torch.zeros(len(prompts), dtype=torch.float32)
    scored = torch.ones(len(prompts), dtype=torch.bool)
    components, verdicts = {}, {}
    for term in rewards:
        verdicts[term.name] = _verdicts(term, prompts, completions, seed)
        found = [math.nan if verdict.score is None else verdict.score for verdict in verdicts[term.name]]
        scores = torch.tensor(found, dtype=torch.float32)
        present = ~scores.isnan()
        components[term.name] = scores
        if term.weight != 0:
            scored &= present
            total += term.weight * torch.where(present, scores, 0.0)
    only_logged = frozenset(term.name for term in rewards if term.weight == 0)
    return RewardTable(torch.where(scored, total, 0.0), scored, components, verdicts, only_logged)


def check_answers(rewards: Sequence[WeightedReward], prompts: Sequence[Prompt]) -> None:
    """Refuse a data set of whose answers a reward can read none, before anything is sampled.

    Each reward with a ``judge`` method gets the answers themselves as completions. Other rewards are not called.

    Args:
        rewards: the terms of the sum.
        prompts: a few of the data set.

    Raises:
        ValueError: a reward leaves all of them unscored because it cannot read the known answer.
    """
    completions = [
        Completion((), (), True, text=f"\\boxed{{{prompt.answer}}} #### {prompt.answer}") for prompt in prompts
    ]
    for term in rewards:
        if term.weight == 0 or not isinstance(term.reward, Judge) or not prompts:
            continue
        verdicts = _verdicts(term, prompts, completions, seed=0)
        if all(verdict.cause == "known_answer" for verdict in verdicts):
            raise ValueError(
                f"reward {term.name!r} can read none of the first {len(prompts)} answers of the training data, for "
                f"example {prompts[0].answer!r} ({verdicts[0].reason}): give data.source the column that holds the "
                "final answer, or choose a reward for such answers"
            )


def judge_rows(
    reward: Callable[..., Any],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    progress: Callable[[int], object] = no_progress,
    *,
    name: str = "reward",
) -> list[Verdict]:
    """The verdicts of any reward: with reasons where it has some.

    Raises:
        RewardError: it returned something else than a score for each row; the message has its ``name``.
    """
    if isinstance(reward, Judge):
        found = reward.judge(
            list(map(assistant_turn, prompts, completions)), [prompt.answer for prompt in prompts], progress
        )
        if not isinstance(found, list | tuple) or not all(isinstance(each, Verdict) for each in found):
            raise RewardError(f"reward {name!r}: judge() returned no list of Verdict (qerl_pl.rewards.verdict)")
        scores = checked_scores(name, [verdict.score for verdict in found], len(prompts))
        return [verdict._replace(score=score) for verdict, score in zip(found, scores, strict=True)]
    scores = checked_scores(name, reward(list(prompts), list(completions)), len(prompts))
    progress(len(prompts))
    return [
        Verdict(None, "the reward does not say why", "unsaid") if score is None else Verdict(score, "")
        for score in scores
    ]


def _verdicts(
    term: WeightedReward, prompts: Sequence[Prompt], completions: Sequence[Completion], seed: int
) -> tuple[Verdict, ...]:
    own_seed = derive_seed(seed, f"reward {term.name}")
    with guarded(term.name, num_rows=len(prompts), time_limit=term.time_limit, seed=own_seed) as progress:
        return tuple(judge_rows(term.reward, prompts, completions, progress, name=term.name))


def _check_names(rewards: Sequence[WeightedReward]) -> None:
    if not rewards:
        raise ValueError("model.rewards is empty; expected at least one reward")
    repeated = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if repeated:
        raise ValueError(f"several rewards are named {repeated[0]!r}; give each its own name")


def _check_parameters(name: str, reward: Callable[..., Any]) -> None:
    """Refuse what cannot be called with two lists."""
    try:
        parameters = inspect.signature(reward)
    except (TypeError, ValueError):  # of a builtin, say: the first call will tell
        return
    try:
        parameters.bind([], [])
    except TypeError as error:
        raise ValueError(
            f"reward {name!r} takes {parameters}; expected two parameters, the prompts and the completions of a batch, "
            f"as in def reward(prompts, completions) -> list ({error})"
        ) from None
