"""Protocols of reward functions, and the weighted sum of several rewards. A row is one prompt with one completion; a
batch has B rows. A verdict is a score with its reason."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from qerl_pl.common.checks import LARGEST
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.calling import Progress, call, check_columns, takes_objects
from qerl_pl.rewards.guard import RewardError, checked_scores, guarded
from qerl_pl.rewards.thoughts import assistant_turn
from qerl_pl.rewards.verdict import CAUSES, Cause, Verdict, no_progress

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Judge(Protocol):
    """Protocol of a reward that also gives reasons for its scores: its method ``judge`` is called, not ``__call__``."""

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """Score completions and return one verdict (score and reason) per completion. ``texts`` are the completions,
        and ``answers`` the known answers from the data set. The method calls ``progress`` with the number of
        completions scored since it last called ``progress``."""
        ...


@runtime_checkable
class Limited(Protocol):
    """Protocol of a reward whose scores depend on the limit on the length of completions."""

    def limited_to(self, max_tokens: int) -> Callable[..., Any]:
        """Return a copy of the reward for completions of at most ``max_tokens`` tokens. Raises ValueError if the reward
        was configured with another limit."""
        ...


class Reward(Protocol):
    """A reward function: an object with ``__call__``, whose constructor takes the reward's settings, or a plain
    function. The arguments are passed by name, so the order of the parameters does not matter, and annotations are not
    needed. A reward whose parameters are not ``prompts`` and ``completions`` is called as TRL calls reward functions
    (see ``rewards/calling.py``)."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """Return one score per completion, or None for one that cannot be scored. A completion without a score is left
        out of the loss, while one with score 0 counts in it.

        Args:
            prompts: [B] the prompt of each completion, repeated for completions of the same prompt. A prompt has
                ``text``, ``messages``, ``tokens``, ``answer``, and ``row``, which holds the problem's columns in the
                data set.
            completions: [B] the completions, each with ``text``, ``tokens``, ``logprobs`` and ``finished``.
        """
        ...


@dataclass(frozen=True)
class WeightedReward:
    """One term of the weighted sum of rewards; in YAML ``{name: answer, weight: 1.0, reward: CLASS_OR_FUNCTION}``.

    Args:
        name: name that the scores are logged under.
        reward: a function of two lists, prompts and completions, that returns a list with a number for each completion,
            or None for a completion that it cannot score; or a class with such a ``__call__``. A reward with other
            parameters, such as columns of the data set, is called as TRL calls reward functions.
        weight: factor of the scores in the sum. With 0 the scores are only logged, and a completion that this reward
            cannot score still counts in the loss.
        time_limit: seconds that the reward may take for a batch; after that, the run stops. null sets no limit. For a
            reward with a ``judge`` method, which reports progress, this is the limit on the time between two reports.
        messages: only for rewards that are called as TRL calls them: true passes prompts and completions as lists of
            messages, false as texts; null passes messages if the questions in the data set are lists of messages.

    Raises:
        ValueError: the name is empty, the weight is not finite, time_limit is not positive, the reward's parameters
            name neither prompts nor completions, or ``messages`` is set for a reward that gets ``Prompt`` and
            ``Completion``.
    """

    name: str
    reward: Callable[..., Any]
    weight: float = 1.0
    time_limit: float | None = 600.0
    messages: bool | None = None

    def __post_init__(self) -> None:
        if not (self.name and self.name.isprintable()):
            raise ValueError(f"a reward's name is {self.name[:80]!r}; expected the name to log it under, e.g. 'answer'")
        if not abs(self.weight) <= LARGEST:  # also refuses nan
            raise ValueError(f"the weight of reward {self.name!r} is {self.weight}; expected a finite number")
        if self.time_limit is not None and not 0 < self.time_limit < threading.TIMEOUT_MAX:
            raise ValueError(
                f"the time_limit of reward {self.name!r} is {self.time_limit}; expected seconds, more than 0, or null"
            )
        by_objects = isinstance(self.reward, Judge) or takes_objects(self.name, self.reward)
        if by_objects and self.messages is not None:
            raise ValueError(
                f"messages is {self.messages} for reward {self.name!r}, which gets Prompt and Completion; leave it out"
            )


class RewardTable(NamedTuple):
    """Scores of one batch of B rows by all rewards."""

    total: Tensor
    """[B] fp32, weighted sum of the rewards' scores; 0 for completions that have a False in ``scored``."""
    scored: Tensor
    """[B] bool, False for a completion for which a reward with a weight other than 0 returned None."""
    components: dict[str, Tensor]
    """Maps a reward's name to its scores before weighting, [B] fp32; NaN where the reward returned None."""
    verdicts: dict[str, tuple[Verdict, ...]]
    """Maps a reward's name to its scores with their reasons, [B]."""
    only_logged: frozenset[str] = frozenset()
    """Names of the rewards with weight 0."""
    metrics: Mapping[str, tuple[float, ...]] = {}
    """Maps a metric's name to the numbers that rewards logged by calling ``log_metric``."""

    @property
    def rewarded(self) -> bool:
        """Whether any reward has a weight other than 0; otherwise ``total`` is 0 and has no meaning."""
        return bool(self.components.keys() - self.only_logged)

    def causes(self) -> dict[Cause, int]:
        """Count the missing scores of all rewards by cause; every cause is a key, with 0 if it did not occur."""
        counts = Counter(verdict.cause for verdicts in self.verdicts.values() for verdict in verdicts)
        return {cause: counts[cause] for cause in CAUSES}

    def common_reason(self) -> str:
        """Return the most frequent reason why a reward with a weight other than 0 gave None; empty if none did."""
        weighted = (verdicts for name, verdicts in self.verdicts.items() if name not in self.only_logged)
        reasons = Counter(verdict.reason for verdicts in weighted for verdict in verdicts if verdict.score is None)
        return max(reasons, key=reasons.__getitem__, default="")


def have_weight(rewards: Sequence[WeightedReward]) -> bool:
    """Return whether any reward has a weight other than 0; a reward with weight 0 is only logged."""
    return any(term.weight != 0 for term in rewards)


def ready_rewards(
    rewards: Sequence[WeightedReward], *, max_tokens: int, metric: str | None = None, optional: bool = False
) -> list[WeightedReward]:
    """Check the rewards of a run together, and return them with the limit on the completion length, ``max_tokens``
    tokens, set in the rewards that depend on it. ``metric`` is the name of the reward by which dynamic sampling filters
    groups (the completions of one prompt), or None. If ``optional``, because a teacher trains the policy, no reward
    needs a weight other than 0. Raises ValueError if two rewards have one name, ``metric`` is not the name of a reward,
    or no weight is other than 0 (unless ``optional``)."""
    _check_names(rewards)
    if not rewards and not optional:
        raise ValueError("model.rewards is empty; expected at least one reward, or a teacher (model.teacher)")
    if not optional and not have_weight(rewards):
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
    rewards: Sequence[WeightedReward],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    seed: int = 0,
    progress: Progress = Progress(),  # noqa: B008  (a NamedTuple is constant)
) -> RewardTable:
    """Score a batch of B completions with every reward; returns the weighted sum of each completion's scores, and each
    reward's scores with reasons. While a reward runs, the global random streams have a seed that is derived from
    ``seed`` and the reward's name. Rewards may read ``progress``, the optimizer steps of the run so far and in all.
    Raises RewardError if a reward failed, took too long, or did not return one score per completion, or if a weighted
    sum is not finite."""
    _check_names(rewards)
    if len(prompts) != len(completions):
        raise ValueError(
            f"{len(prompts)} prompts for {len(completions)} completions; expected one prompt per completion"
        )

    import torch  # imported here, because `score` needs no tensors, and torch takes seconds to import

    total = torch.zeros(len(prompts), dtype=torch.float32)
    scored = torch.ones(len(prompts), dtype=torch.bool)
    components, verdicts = {}, {}
    metrics: dict[str, tuple[float, ...]] = {}
    for term in rewards:
        judged, logged = judge_rows(term, prompts, completions, seed=seed, progress=progress)
        verdicts[term.name] = tuple(judged)
        for name, values in logged.items():
            metrics[name] = (*metrics.get(name, ()), *values)
        raw = [math.nan if verdict.score is None else verdict.score for verdict in judged]
        scores = torch.tensor(raw, dtype=torch.float32)
        present = ~scores.isnan()
        components[term.name] = scores
        if term.weight != 0:
            scored &= present
            total += term.weight * torch.where(present, scores, 0.0)
            if not total.isfinite().all():
                row = int(total.isfinite().logical_not().nonzero()[0])
                raise RewardError(
                    f"with reward {term.name!r} ({raw[row]:g} x weight {term.weight:g}) the rewards of row {row} add "
                    f"up to {total[row]:g}; expected a finite fp32 number: give smaller scores or weights"
                )
    only_logged = frozenset(term.name for term in rewards if term.weight == 0)
    return RewardTable(torch.where(scored, total, 0.0), scored, components, verdicts, only_logged, metrics)


def check_answers(rewards: Sequence[WeightedReward], prompts: Sequence[Prompt]) -> None:
    """Check before a run that the rewards can score some prompts of the data set. A reward with a ``judge`` method has
    to score completions that consist of the known answer; for any other reward, the data set must have the columns that
    the reward's parameters name. Raises ValueError if a reward can read none of the known answers, or the data set
    lacks a column."""
    completions = [
        Completion((), (), True, text=f"\\boxed{{{prompt.answer}}} #### {prompt.answer}") for prompt in prompts
    ]
    for term in rewards:
        if prompts and not isinstance(term.reward, Judge):
            check_columns(term.name, term.reward, prompts)
        if term.weight == 0 or not isinstance(term.reward, Judge) or not prompts:
            continue
        verdicts, _ = judge_rows(term, prompts, completions)
        if all(verdict.cause == "known_answer" for verdict in verdicts):
            raise ValueError(
                f"reward {term.name!r} can read none of the first {len(prompts)} answers of the training data, for "
                f"example {prompts[0].answer!r} ({verdicts[0].reason}): give data.source the column that holds the "
                "final answer, or choose a reward that can read such answers"
            )


def judge_rows(
    term: WeightedReward,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    seed: int = 0,
    progress: Progress = Progress(),  # noqa: B008  (a NamedTuple is constant)
    finished: Callable[[int], object] = no_progress,
) -> tuple[list[Verdict], dict[str, list[float]]]:
    """Call one reward on a batch under its time limit, and restore the global state that it changes (see ``guarded``).
    Returns one verdict per completion, with the reward's reasons if it has a ``judge`` method, and the numbers that the
    reward logged by ``log_metric``, by name. ``finished`` is called with the number of completions scored since its
    last call. The reward's random numbers follow from ``seed``, and it may read ``progress``, the optimizer steps of
    the run. Raises RewardError if the reward fails, takes too long, or does not return one score per completion."""
    name, reward, num_rows = term.name, term.reward, len(prompts)
    own_seed = derive_seed(seed, f"reward {name}")
    with guarded(name, num_rows=num_rows, time_limit=term.time_limit, seed=own_seed) as restart:

        def report(count: int) -> None:
            restart(count)
            finished(count)

        if isinstance(reward, Judge):
            texts = list(map(assistant_turn, prompts, completions))
            verdicts = reward.judge(texts, [prompt.answer for prompt in prompts], report)
            if not isinstance(verdicts, list | tuple) or not all(isinstance(verdict, Verdict) for verdict in verdicts):
                raise RewardError(f"reward {name!r}: judge() returned no list of Verdict (qerl_pl.rewards.verdict)")
            scores = checked_scores(name, [verdict.score for verdict in verdicts], num_rows)
            return [verdict._replace(score=score) for verdict, score in zip(verdicts, scores, strict=True)], {}
        copies = [prompt.with_own_row() for prompt in prompts]
        called = call(name, reward, copies, completions, messages=term.messages, progress=progress)
        scores = checked_scores(name, called.scores, num_rows)
    finished(num_rows)
    verdicts = [
        Verdict(None, note or "the reward does not say why", "unsaid") if score is None else Verdict(score, note)
        for score, note in zip(scores, called.notes, strict=True)
    ]
    return verdicts, called.metrics


def _check_names(rewards: Sequence[WeightedReward]) -> None:
    repeated = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if repeated:
        raise ValueError(f"several rewards are named {repeated[0]!r}; give each its own name")
