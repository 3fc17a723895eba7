"""Clip-Cov's and KL-Cov's choice of tokens over python floats. Rows are lists without padding."""

from __future__ import annotations


def covariances(rows: list[list[float]], advantages: list[float]) -> list[list[float]]:
    """(log p - mean) (A - mean) of every token, means over all tokens."""
    tokens = [(value, advantage) for row, advantage in zip(rows, advantages, strict=True) for value in row]
    mean_logprob = sum(value for value, _ in tokens) / len(tokens)
    mean_advantage = sum(advantage for _, advantage in tokens) / len(tokens)
    return [
        [(value - mean_logprob) * (advantage - mean_advantage) for value in row]
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def largest(rows: list[list[float]], share: float) -> list[list[bool]]:
    """The share of the tokens with the largest covariance: rounded down, at least one."""
    ordered = sorted((value for row in rows for value in row), reverse=True)
    threshold = ordered[max(1, int(share * len(ordered))) - 1]
    return [[value >= threshold for value in row] for row in rows]
