"""Advantages of one group of completions, computed on Python floats. A reward of None means that the completion has no
score."""

from fractions import Fraction


def batch_std(rewards: list[float]) -> float:
    """Compute the unbiased standard deviation of the scored rewards of a batch."""
    if len(rewards) < 2:
        return 0.0
    mean = sum(map(Fraction, rewards)) / len(rewards)
    return float(sum((Fraction(reward) - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5


def advantages(rewards: list[float | None], baseline: str, eps: float, std: float = 0.0) -> list[float]:
    """Compute the advantages of one group, with fractions so that only square roots round. ``std`` is the standard
    deviation of all rewards of the batch, for the baseline "batch_normalized". Completions without a score get 0."""
    scored = [Fraction(reward) for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = sum(scored) / len(scored)
    variance = sum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1)
    values = []
    for reward in rewards:
        if reward is None:
            values.append(0.0)
        elif baseline == "normalized":
            values.append(float(Fraction(reward) - mean) / (float(variance) ** 0.5 + eps))
        elif baseline == "batch_normalized":
            values.append(float(Fraction(reward) - mean) / (std + eps))
        elif baseline == "centered":
            values.append(float(Fraction(reward) - mean))
        elif baseline == "leave_one_out":
            others = sum(scored) - Fraction(reward)
            values.append(float(Fraction(reward) - others / (len(scored) - 1)))
    return values
