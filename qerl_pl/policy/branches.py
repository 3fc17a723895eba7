"""Sequential test of whether a rollout engine samples more completions than it returns, and selects among them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qerl_pl.policy.evidence import in_shares

ODDS = (2.0, 8.0)
CERTAIN = 0.99
"""Limit for the test in ``branch_evidence``, which predicts a completion's next token from the tokens with which
earlier completions continued the same prefix. If these tokens have a larger total probability than this, the next token
is left out of the test: it is almost certainly one of them, so it says almost nothing about the engine."""


class _Rest(NamedTuple):
    """The tokens of a completion for which the tree of prefixes (``_Branch``) has no nodes yet: those from index ``at``
    on. ``tokens`` and ``logprobs`` are those of the whole completion. No other completion begins with ``tokens[:at]``
    so far; when a second one does, ``tokens[at]``, if it exists, gets a node of its own."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    at: int


@dataclass(eq=False)
class _Branch:
    """Node in the tree of the prefixes of one prompt's completions: a token that continues the prefix that leads to
    it."""

    probability: float
    rest: _Rest | None
    sums: list[float]
    """Sum of each property's values over the completions that go on with this token."""
    count: int = 1
    following: dict[int, _Branch] = field(default_factory=dict)
    mass: float = 0.0
    """Total probability of the tokens in ``following``."""

    def begin(self, tokens: Sequence[int], logprobs: Sequence[float], at: int, numbers: Sequence[float]) -> None:
        if at < len(tokens):
            probability = math.exp(logprobs[at])
            self.following[tokens[at]] = _Branch(probability, _Rest(tokens, logprobs, at + 1), list(numbers))
            self.mass += probability

    def pass_by(self, numbers: Sequence[float]) -> None:
        if self.rest is not None:
            self.begin(*self.rest, self.sums)  # the sums are still the numbers of the only completion
            self.rest = None
        self.count += 1
        self.sums = [total + number for total, number in zip(self.sums, numbers, strict=True)]


def branch_evidence(
    groups: Sequence[Sequence[tuple[Sequence[int], Sequence[float]]]], numbers: Sequence[Sequence[Sequence[float]]]
) -> Tensor:
    """Test whether completions begin like earlier completions that have a low (or high) value of a property, such as
    their length, more often than the policy's probabilities say. This happens if an engine samples more completions
    than it returns, and keeps, for example, the shortest.

    The completions of a group (of one prompt) are compared one after the other. For every prefix that a completion
    shares with earlier completions, let E be a set of tokens with which the earlier ones continue it. Token t is in E
    if the mean of the property over the earlier completions that continue with t is at most (or at least) its mean over
    all earlier completions of the group. M is the probability of E according to the reported log-probabilities.

    An engine that selects completions is assumed to multiply the odds of E by o (``ODDS``). The likelihood ratio of
    such an engine to one that does not select is o / (1 + (o - 1) M) if the completion's next token is in E, else 1 /
    (1 + (o - 1) M). E depends on earlier completions only. So if the engine does not select, and reports equal
    probabilities after equal prefixes, the product of these ratios is a martingale. Rounding errors make the reported
    probabilities differ, but in both directions, so their effects nearly cancel.

    ``groups`` has the tokens and log-probabilities in nats of each completion of P groups, and ``numbers`` the values
    of F properties of each. Returns log-likelihood ratios, [len(SHARES) * F * 2 * len(ODDS)] fp64 in nats: one for each
    share of groups in which the engine selects (``evidence.SHARES``), property, direction (low or high) and o.
    """
    num_numbers = len(numbers[0][0]) if numbers else 0
    evidence = torch.zeros(num_numbers * 2 * len(ODDS), len(groups), dtype=torch.float64)
    for index, (group, numbers_of_group) in enumerate(zip(groups, numbers, strict=True)):
        evidence[:, index] = torch.tensor(_of_group(group, numbers_of_group), dtype=torch.float64)
    return in_shares(evidence)


def _of_group(
    group: Sequence[tuple[Sequence[int], Sequence[float]]], numbers: Sequence[Sequence[float]]
) -> list[float]:
    evidence = [0.0] * (len(numbers[0]) * 2 * len(ODDS))
    root = _Branch(1.0, _Rest(*group[0], 0), list(numbers[0]))
    for (tokens, logprobs), own_numbers in zip(group[1:], numbers[1:], strict=True):
        means = [total / root.count for total in root.sums]
        branch = root
        branch.pass_by(own_numbers)
        for place, token in enumerate(tokens):
            if branch.following and branch.mass <= CERTAIN:
                for which, ratio in enumerate(_log_ratios(branch, token, means)):
                    evidence[which] += ratio
            if token not in branch.following:
                branch.begin(tokens, logprobs, place, own_numbers)
                break
            branch = branch.following[token]
            branch.pass_by(own_numbers)
    return evidence


def _log_ratios(branch: _Branch, token: int, means: Sequence[float]) -> Iterator[float]:
    """Yield the log-likelihood ratio in nats (``branch_evidence``) for a completion that continues the prefix of
    ``branch`` with ``token``, for each property, direction (low, high) and o of ``ODDS``. ``means`` are the means of
    the properties over the group's earlier completions."""
    taken = branch.following.get(token)
    for number, mean in enumerate(means):
        for sign in (1, -1):
            inside = [way for way in branch.following.values() if sign * (way.sums[number] / way.count - mean) <= 0]
            mass = min(1.0, sum(way.probability for way in inside))
            for odds in ODDS:
                yield (taken in inside) * math.log(odds) - math.log1p((odds - 1) * mass)
