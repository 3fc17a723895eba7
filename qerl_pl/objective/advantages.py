"""Compute advantages of completions relative to their group: the G completions of one of P prompts."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["normalized", "batch_normalized", "centered", "leave_one_out"]
AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""Computes advantages [P, G], 0 on unscored rows, from the first two arguments of ``group_advantages``."""


def has_signal(rewards: Tensor, scored: Tensor) -> Tensor:
    """Return [P] bool: True for groups in which at least two scored rewards differ, so that the group's advantages are
    not all 0 and it contributes to the loss.

    ``rewards`` and ``scored`` are as in ``group_advantages``; raises ValueError if their shapes differ or are not
    [P, G], or a scored reward is not finite.
    """
    if rewards.ndim != 2 or rewards.shape != scored.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and scored {tuple(scored.shape)}; expected the same [P, G] for both"
        )
    if not torch.where(scored, rewards, 0.0).isfinite().all():
        raise ValueError("a scored reward is nan or infinite; rows without a score must be False in `scored`")
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    return highest > lowest  # False in an empty group: -inf > inf


def group_advantages(
    rewards: Tensor,
    scored: Tensor,
    baseline: Baseline | AdvantageFunction = "normalized",
    *,
    eps: float = 1e-4,
    std_of_batch: Tensor | None = None,
) -> Tensor:
    """Compute advantages: how much better each completion is than its group.

    "normalized": (r - mean) / (std + eps) with the unbiased std (GRPO, arXiv 2402.03300, section 4.1.2; the paper has
    no eps). "batch_normalized": with the std of the whole batch, so that a group of nearly equal rewards keeps small
    advantages instead of being scaled to the same size as other groups (arXiv 2508.08221; TRL's scale_rewards "batch").
    "centered": r - mean (Dr. GRPO, arXiv 2503.20783). "leave_one_out": r minus the mean of the other rewards (RLOO,
    arXiv 2402.14740), which is "centered" times n / (n - 1).

    Unscored rows do not enter mean or std. A group whose scored rewards are all equal gets exact zeros. Rounding would
    otherwise make them nonzero: the computed mean of eight rewards of 0.7 is one ulp off, and this error would be
    divided by a std of the same size.

    Args:
        rewards: [P, G] fp32; where ``scored`` is False, any value, nan included.
        scored: [P, G] bool, True where the reward is known.
        baseline: one of the rules above, or a user's function, whose result is returned unchanged.
        eps: added to a std, in units of the reward.
        std_of_batch: [] std of the rewards of all ranks from ``batch_std``, for "batch_normalized"; None: the std is
            computed from ``rewards``.

    Returns:
        [P, G] of the rewards' dtype (computed in fp64), exactly 0 on unscored rows and in groups whose scored rewards
        are all equal.

    Raises:
        ValueError: see ``has_signal``.
    """
    signal = has_signal(rewards, scored).unsqueeze(1)
    if callable(baseline):
        return baseline(rewards, scored)
    values = torch.where(scored, rewards, 0.0).double()
    count = scored.sum(dim=1, keepdim=True).clamp(min=2)  # groups with fewer than 2 scored rewards get advantage 0
    centered = torch.where(scored, values - values.sum(dim=1, keepdim=True) / count, 0.0)
    if baseline == "normalized":
        std = (centered.square().sum(dim=1, keepdim=True) / (count - 1)).sqrt()
        advantages = centered / (std + eps)
    elif baseline == "batch_normalized":
        std = batch_std(rewards[scored]) if std_of_batch is None else std_of_batch
        advantages = centered / (std + eps)
    elif baseline == "leave_one_out":
        advantages = centered * count / (count - 1)
    else:
        advantages = centered
    return torch.where(signal, advantages, 0.0).to(rewards.dtype)


def batch_std(rewards: Tensor) -> Tensor:
    """Compute the unbiased std, [] fp64, of a batch's N scored rewards, which the caller has gathered from all ranks; 0
    if N < 2."""
    return rewards.double().std() if len(rewards) > 1 else rewards.new_zeros((), dtype=torch.float64)


def less_penalty(
    advantages: Tensor, penalty: Tensor, scored: Tensor, baseline: Baseline | AdvantageFunction = "normalized"
) -> Tensor:
    """Subtract a penalty [P, G], such as the KL of each completion, from advantages A [P, G]. As a reward would be, the
    penalty is taken relative to its group: A - (penalty - baseline of the group's penalties).

    "centered" and "leave_one_out" are linear, so this equals ``group_advantages(rewards - penalty)``: RLOO's KL in the
    reward (arXiv 2402.14740). With the other baselines, the penalty only has its group's mean subtracted and is not
    divided by a std. In groups of equal rewards, a std of rewards and penalties together would scale the penalty's
    noise to about 1, however small its coefficient; the std of the rewards alone would do the same in groups of nearly
    equal rewards.
    """
    return advantages - group_advantages(
        penalty, scored, "leave_one_out" if baseline == "leave_one_out" else "centered"
    )
