"""The protocol of rewards, and the weighted sum of several rewards."""

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
    """Protocol of a reward that also gives reasons for its scores: the program calls its method ``judge`` instead of
    ``__call__``."""

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """Return one verdict per row, given the texts of completions and the known answers; call ``progress`` with the
        number of rows finished since its last call."""
        ...


@runtime_checkable
class Limited(Protocol):
    """Protocol of a reward whose scores depend on the largest length that completions may have."""

    def limited_to(self, max_tokens: int) -> Callable[..., Any]:
        """Return a copy of the reward for completions of at most ``max_tokens`` tokens; ValueError: it has another
        limit."""
        ...


class Reward(Protocol):
    """Scores completions: an object of a class, whose constructor takes the reward's settings, or a plain function. The
    arguments are passed by name, so the order of the parameters does not matter, and annotations are not needed. A
    reward with other parameters than these two is called as TRL calls reward functions (``rewards/calling.py``)."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """Return one score per row, or None for a row that cannot be scored: it is left out of the loss, while a row
        that scores 0 is trained on.

        Args:
            prompts: [B] the prompt of each row, repeated for the rows of a group, with ``text``, ``messages``,
                ``tokens``, ``answer``, and ``row``, which holds the problem's columns in the data set.
            completions: [B] the completion of each row, with ``text``, ``tokens``, ``logprobs`` and ``finished``.
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
        weight: factor of the scores in the sum. With 0 the scores are only logged, and a row is trained on even if this
            reward cannot score it.
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
    """The scores of one batch."""

    total: Tensor
    """[B] fp32, weighted sum of the rewards' scores, 0 on unscored rows."""
    scored: Tensor
    """[B] bool, False for a row that a reward with a weight other than 0 left unscored."""
    components: dict[str, Tensor]
    """Scores by name of the reward, [B] fp32, before weighting; NaN for completions that the reward left unscored."""
    verdicts: dict[str, tuple[Verdict, ...]]
    """Maps a reward's name to its scores with reasons, [B]."""
    only_logged: frozenset[str] = frozenset()
    """Names of the rewards with weight 0."""
    metrics: Mapping[str, tuple[float, ...]] = {}
    """Numbers that rewards logged by ``log_metric``, by name."""

    @property
    def rewarded(self) -> bool:
        """Whether there is a reward with a weight other than 0; without one, ``total`` is 0 and means nothing."""
        return bool(self.components.keys() - self.only_logged)

    def causes(self) -> dict[Cause, int]:
        """Count the missing scores by cause; causes that did not occur have 0."""
        counts = Counter(verdict.cause for verdicts in self.verdicts.values() for verdict in verdicts)
        return {cause: counts[cause] for cause in CAUSES}

    def common_reason(self) -> str:
        """Return the most frequent reason for unscored rows; empty if all rows are scored."""
        weighted = (verdicts for name, verdicts in self.verdicts.items() if name not in self.only_logged)
        reasons = Counter(verdict.reason for verdicts in weighted for verdict in verdicts if verdict.score is None)
        return max(reasons, key=reasons.__getitem__, default="")


def have_weight(rewards: Sequence[WeightedReward]) -> bool:
    """Return whether a reward has a weight other than 0; rewards with weight 0 are only logged."""
    return any(term.weight != 0 for term in rewards)


def ready_rewards(
    rewards: Sequence[WeightedReward], *, max_tokens: int, metric: str | None = None, optional: bool = False
) -> list[WeightedReward]:
    """Check the rewards of a run together, and return them with ``max_tokens``, the longest completion that is sampled
    in training, set in rewards that depend on it. ``metric`` names the reward that dynamic sampling filters by, if any.
    With ``optional``, a teacher trains the policy, so there may be no reward, or none with a weight. ValueError if
    names repeat, ``metric`` names no reward, or rewards are missing."""
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
    """Score a batch with every reward. The completions [B] must have their text. While a reward runs, the global random
    streams are seeded from ``seed`` and the reward's name, and rewards may read the run's ``progress``. RewardError: a
    reward failed, took too long, or did not return one score per row, or a weighted sum is not finite."""
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
    """Check, before anything is sampled, that the rewards can read the answers of some prompts of the data set: each
    reward with a ``judge`` method is called with the known answers as completions, and for others the data must have
    the columns that their parameters name. ValueError if a reward can read no answer, or the data lacks a column."""
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
    """Call a reward of any kind under its time limit, with global state protected (``guarded``). Returns one verdict
    per row, with the reward's reasons if it has a ``judge`` method, and by name the numbers that the reward logs by
    ``log_metric``. ``finished`` is called with the number of rows finished since its last call; the other arguments and
    errors are as in ``score_rewards``."""
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
