"""Sequential test of whether an engine selects completions by a number that each of them has, such as its length."""

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
"""Limit on the total probability of the tokens with which earlier completions continued a prefix. Above it, the token
that the next completion has there is almost no evidence, and is left out."""


class _Rest(NamedTuple):
    """Remaining tokens of the only completion that has reached a branch so far. When a second completion reaches the
    branch, the first of these tokens becomes a branch too."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    at: int


@dataclass(eq=False)
class _Branch:
    """A token that at least one completion of a group has after a certain prefix."""

    probability: float
    rest: _Rest | None
    sums: list[float]
    """Sum of each number over the completions that go on with this token."""
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
    """Compute the evidence that completions begin like earlier completions that have a low (or high) number, such as
    their length, more often than the policy's probabilities say, as when an engine samples more completions than it
    returns and keeps the shortest.

    The completions of a group are compared one after the other. At every prefix that a completion shares with earlier
    completions, let E be a set of tokens with which the earlier ones continue it: token t is in E if the mean of the
    number over the earlier completions that continue with t is at most (or at least) its mean over all earlier
    completions of the group. M is the probability of E according to the log-probabilities that the engine reported. In
    an engine that chooses, the odds of E are multiplied by o (``ODDS``): the likelihood ratio of such an engine to one
    that does not choose is o / (1 + (o - 1) M) if the completion's next token is in E, else 1 / (1 + (o - 1) M). E
    depends on earlier completions only, so if the engine does not choose, the product of these ratios is a martingale,
    provided that the engine reports equal probabilities after equal prefixes; differences by rounding errors have
    either sign and nearly cancel.

    Args:
        groups: tokens and log-probabilities in nats of each completion of P groups.
        numbers: F numbers of each completion of each group.

    Returns:
        Log-likelihood ratio for each share of groups in which the engine chooses (``evidence.SHARES``), number,
        direction (low or high) and o, [len(SHARES) * F * 2 * len(ODDS)] fp64 in nats.
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
    """Yield the log-likelihood ratio of ``token`` after the prefix that ends in ``branch``, for each number, direction
    and odds (see ``branch_evidence``); ``means`` are the means of the numbers in the group so far."""
    taken = branch.following.get(token)
    for number, mean in enumerate(means):
        for sign in (1, -1):
            inside = [way for way in branch.following.values() if sign * (way.sums[number] / way.count - mean) <= 0]
            mass = min(1.0, sum(way.probability for way in inside))
            for odds in ODDS:
                yield (taken in inside) * math.log(odds) - math.log1p((odds - 1) * mass)
