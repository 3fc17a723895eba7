"""Importance weights, and statistics of the difference between trainer and sampler, computed on Python floats. A row is
a list with log(trainer / sampler) of each token of a completion."""

import math


def weights(rows: list[list[float]], mode: str, level: str, low: float, high: float) -> tuple[list[list[float]], int]:
    """Return the importance weight of every token, and how many ratios were outside of [low, high]. There is one ratio
    per token at level "token", otherwise one per row."""
    factors, outside = [], 0
    for row in rows:
        ratios = [math.exp(value) for value in row]
        if level == "token":
            units = ratios
        elif level == "sequence":
            units = [math.prod(ratios)] if row else []
        elif level == "geometric":
            units = [math.prod(ratios) ** (1 / len(row))] if row else []
        cut = []
        for ratio in units:
            inside = low <= ratio <= high
            outside += not inside and mode != "none"
            cut.append({"none": 1.0, "truncate": min(max(ratio, low), high), "mask": ratio if inside else 0.0}[mode])
        factors.append(cut if level == "token" else cut * len(row))
    return factors, outside


def rejected(row: list[float], level: str, low: float, high: float) -> bool:
    """Return whether a row is left out because its ratio is outside of [low, high]: at level "sequence" the product of
    its tokens' ratios, otherwise their geometric mean. An empty row is never left out."""
    if not row:
        return False
    ratio = math.prod(math.exp(value) for value in row)
    return not low <= (ratio if level == "sequence" else ratio ** (1 / len(row))) <= high


def mismatch(values: list[float]) -> dict[str, float]:
    """Compute statistics of the log-ratios of at least one token."""
    size = sorted(abs(value) for value in values)
    at_most = [sum(other <= value for other in size) / len(size) for value in size]
    return {
        "count": len(values),
        "k1": sum(-value for value in values) / len(values),
        "k3": sum(math.exp(value) - 1 - value for value in values) / len(values),
        "mean_abs": sum(size) / len(size),
        "p99": min(value for value, share in zip(size, at_most, strict=True) if share >= 0.99),
        "max": max(size),
        "outside_share": sum(not 0.9 <= math.exp(value) <= 1.1 for value in values) / len(values),
    }
