"""Policy objectives token by token, as the papers print them. Scalars are fp64 tensors, so autograd gives the
gradients. Rows are lists of per-token scalars without padding, so the reference needs no masks."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Row = Sequence[Tensor]
Objective = Callable[[Row, Row, float, Row], list[Tensor]]


def clipped(clip_low: float, clip_high: float, max_ratio: float | None = None) -> Objective:
    """Make the objective min(r A, clip(r, 1 - low, 1 + high) A) of every token, with ratio r and advantage A. If
    ``max_ratio`` is given, a larger r in the first term is replaced by it."""

    def objective(new: Row, old: Row, advantage: float, importance: Row) -> list[Tensor]:
        values = []
        for t in range(len(new)):
            ratio = torch.exp(new[t] - old[t])
            values.append(importance[t] * _surrogate(ratio, advantage, clip_low, clip_high, max_ratio))
        return values

    return objective


def sequence_clipped(clip_low: float, clip_high: float, max_ratio: float | None = None) -> Objective:
    """Make the clipped objective with one ratio per row (GSPO), (pi(y) / pi_old(y))^(1 / |y|), where y is the row's
    completion."""

    def objective(new: Row, old: Row, advantage: float, importance: Row) -> list[Tensor]:
        probability_ratio = torch.ones((), dtype=torch.float64)
        for t in range(len(new)):
            probability_ratio = probability_ratio * torch.exp(new[t]) / torch.exp(old[t])
        ratio = probability_ratio ** (1 / len(new)) if len(new) else probability_ratio
        return [importance[t] * _surrogate(ratio, advantage, clip_low, clip_high, max_ratio) for t in range(len(new))]

    return objective


def cispo(clip_low: float, clip_high: float) -> Objective:
    """Make the objective sg(clip(r, 1 - low, 1 + high)) A log pi of every token, where sg stops the gradient."""

    def objective(new: Row, old: Row, advantage: float, importance: Row) -> list[Tensor]:
        values = []
        for t in range(len(new)):
            ratio = float(torch.exp(new[t].detach() - old[t]))
            values.append(importance[t] * min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage * new[t])
        return values

    return objective


def token_mean(rows: list[list[Tensor]]) -> Tensor:
    """DAPO: the mean over all tokens of the batch."""
    return _total(_total(row) for row in rows) / max(sum(len(row) for row in rows), 1)


def sequence_mean(rows: list[list[Tensor]]) -> Tensor:
    """GRPO: the mean over sequences of the means over their tokens."""
    means = [_total(row) / len(row) for row in rows if row]
    return _total(means) / max(len(means), 1)


def constant_mean(max_tokens: int) -> Callable[[list[list[Tensor]]], Tensor]:
    """Make the mean of Dr. GRPO: the sum over each row's tokens, averaged over the rows, and divided by ``max_tokens``,
    the longest possible length."""

    def mean(rows: list[list[Tensor]]) -> Tensor:
        sums = [_total(row) / max_tokens for row in rows if row]
        return _total(sums) / max(len(sums), 1)

    return mean


def kl(kind: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Compute Schulman's estimator ``kind`` (k1, k2 or k3) of KL(policy || reference) at one token that was sampled
    from the policy. Both arguments are log-probabilities of this token."""
    quotient = torch.exp(reference) / torch.exp(policy)
    return {
        "k1": -torch.log(quotient),
        "k2": torch.log(quotient) ** 2 / 2,
        "k3": quotient - 1 - torch.log(quotient),
    }[kind]


def _surrogate(ratio: Tensor, advantage: float, clip_low: float, clip_high: float, max_ratio: float | None) -> Tensor:
    bounded = ratio
    if ratio.item() < 1 - clip_low:
        bounded = torch.tensor(1 - clip_low, dtype=torch.float64)
    if ratio.item() > 1 + clip_high:
        bounded = torch.tensor(1 + clip_high, dtype=torch.float64)
    if max_ratio is not None and ratio.item() > max_ratio:
        ratio = torch.tensor(max_ratio, dtype=torch.float64)
    free, held = ratio * advantage, bounded * advantage
    return free if free.item() <= held.item() else held


def _total(values: Iterable[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value
    return total
