"""A sequential test of whether an engine chooses among completions by a number such as their length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qerl_pl.policy.evidence import in_shares

ODDS = (2.0, 8.0)
CERTAIN = 0.99
"""Probability of all seen branches together above which the next token tells almost nothing, and is left out."""


@dataclass(eq=False)
class _Branch:
    """A token after a prefix that completions of a group share."""

    probability: float = 0.0
    count: int = 0
    sums: list[float] = field(default_factory=list)
    """Sum of each number over the completions that go on with this token."""
    following: dict[int, _Branch] = field(default_factory=dict)
    mass: float = 0.0
    """Probability of all tokens that follow, together."""


def branch_evidence(
    groups: Sequence[Sequence[tuple[Sequence[int], Sequence[float]]]], numbers: Sequence[Sequence[Sequence[float]]]
) -> Tensor:
    """Compute the evidence that completions go the ways of earlier completions with low (or high) numbers more often
    than the policy's probabilities say, as when the shortest of more completions were kept.

    The completions of a group are compared one after the other. Where the next token of a completion follows a prefix
    of earlier ones, E is the set of the tokens with which these went on and that led to numbers of at most (or at
    least) the mean of the group so far. The log-probabilities that the engine reported for them give the probability M
    of E. In the alternatives, the odds of E are multiplied by o (``ODDS``): the likelihood ratio of a token is o / (1 +
    (o - 1) M) in E and 1 / (1 + (o - 1) M) outside. E depends on earlier completions only, so the product of these
    ratios is a martingale as those of ``evidence`` are, whatever the numbers are. It is one as far as the engine gives
    equal prefixes equal probabilities; rounding errors of the probabilities have either sign and add up little.

    Args:
        groups: tokens and log-probabilities in nats of each completion of P groups.
        numbers: F numbers of each completion of each group.

    Returns:
        Evidence for each share of groups, number, direction and o, [len(SHARES) * F * 2 * len(ODDS)] fp64 in nats.
    """
    num_numbers = len(numbers[0][0]) if numbers else 0
    found = torch.zeros(num_numbers * 2 * len(ODDS), len(groups), dtype=torch.float64)
    for index, (group, given) in enumerate(zip(groups, numbers, strict=True)):
        found[:, index] = torch.tensor(_of_group(group, given), dtype=torch.float64)
    return in_shares(found)


def _of_group(
    group: Sequence[tuple[Sequence[int], Sequence[float]]], numbers: Sequence[Sequence[float]]
) -> list[float]:
    root, evidence = _Branch(sums=[0.0] * len(numbers[0])), [0.0] * (len(numbers[0]) * 2 * len(ODDS))
    for (tokens, logprobs), own in zip(group, numbers, strict=True):
        branch = root
        for token in tokens:
            if branch.following and branch.mass <= CERTAIN:
                means = [total / root.count for total in root.sums]
                for place, ratio in enumerate(_log_ratios(branch, token, means)):
                    evidence[place] += ratio
            if token not in branch.following:
                break  # no earlier completion goes on with this token
            branch = branch.following[token]
        _add(root, tokens, logprobs, own)
    return evidence


def _log_ratios(branch: _Branch, token: int, means: Sequence[float]) -> Iterator[float]:
    """Compute the log-likelihood ratios of a token after a prefix for each number, direction and odds."""
    taken = branch.following.get(token)
    for number, mean in enumerate(means):
        for sign in (1, -1):
            inside = [each for each in branch.following.values() if sign * (each.sums[number] / each.count - mean) <= 0]
            mass = min(1.0, sum(each.probability for each in inside))
            for odds in ODDS:
                yield (taken in inside) * math.log(odds) - math.log1p((odds - 1) * mass)


def _add(root: _Branch, tokens: Sequence[int], logprobs: Sequence[float], own: Sequence[float]) -> None:
    branches, branch = [root], root
    for token, logprob in zip(tokens, logprobs, strict=True):
        if token not in branch.following:
            branch.following[token] = _Branch(math.exp(logprob), sums=[0.0] * len(own))
            branch.mass += math.exp(logprob)
        branch = branch.following[token]
        branches.append(branch)
    for branch in branches:
        branch.count += 1
        branch.sums = [total + number for total, number in zip(branch.sums, own, strict=True)]
