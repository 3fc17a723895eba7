"""Compute advantages of completions relative to the other completions of their prompt.

Shapes: P prompts, G completions per prompt, which form a group.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["normalized", "batch_normalized", "centered", "leave_one_out"]
AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""A rule that computes advantages [P, G] from rewards [P, G] and a mask ``scored`` [P, G] bool. Where the mask is
False, the completion has no reward, and its advantage has to be 0."""


def has_signal(rewards: Tensor, scored: Tensor) -> Tensor:
    """Return [P] bool: True for groups in which at least two scored rewards differ, so that the built-in rules of
    ``group_advantages`` give advantages other than 0. Arguments and errors are those of ``group_advantages``."""
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
    """Compute advantages, [P, G] of the rewards' dtype (computed in fp64): how much better the reward of each
    completion is than those of its group.

    The rule ``baseline`` is one of the following. r is the reward, and mean and std are those of the group unless
    stated otherwise:

    - "normalized": (r - mean) / (std + eps) with the unbiased std (GRPO, arXiv 2402.03300, section 4.1.2; the paper has
      no eps);
    - "batch_normalized": the same quotient with the std of all rewards of the rollout, so that a group of nearly equal
      rewards keeps small advantages instead of being scaled to the size of other groups (arXiv 2508.08221; TRL's
      scale_rewards "batch");
    - "centered": r - mean (Dr. GRPO, arXiv 2503.20783);
    - "leave_one_out": r minus the mean of the other rewards of the group (RLOO, arXiv 2402.14740), which for n scored
      rewards is "centered" times n / (n - 1).

    Completions without a reward do not enter mean or std. A group whose rewards are all equal gets exact zeros: the
    rounding error of the mean would otherwise be divided by a std of the same size.

    Args:
        rewards: [P, G] fp32; where ``scored`` is False, any value, nan included.
        scored: [P, G] bool, True where the reward is known; elsewhere, advantages are exactly 0.
        baseline: one of the rules above, or a user's function, whose result is returned unchanged.
        eps: added to a std, in units of the reward.
        std_of_batch: [] std of the rewards of all ranks from ``batch_std``, for "batch_normalized"; None: the std is
            computed from ``rewards``.

    Raises:
        ValueError: the shapes differ or are not [P, G], or a scored reward is not finite.
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
    """Compute the unbiased standard deviation, [] fp64, of the N scored rewards [N] of all ranks; 0 if N < 2."""
    return rewards.double().std() if len(rewards) > 1 else rewards.new_zeros((), dtype=torch.float64)


def less_penalty(
    advantages: Tensor, penalty: Tensor, scored: Tensor, baseline: Baseline | AdvantageFunction = "normalized"
) -> Tensor:
    """Subtract a penalty [P, G], such as the KL of each completion to a reference policy, from advantages [P, G].
    Before that, the mean of the penalties of the group (the completions of one prompt) is subtracted from each penalty;
    with "leave_one_out", this is the mean over the group's other completions.

    With the rules "centered" and "leave_one_out", which are linear, the result equals ``group_advantages(rewards -
    penalty)``, which is RLOO's KL in the reward (arXiv 2402.14740). With the other rules, the penalty is not divided by
    a std. If it were, the noise of the penalty would be scaled to about 1 in a group of equal or nearly equal rewards,
    however small the penalty's coefficient is.
    """
    return advantages - group_advantages(
        penalty, scored, "leave_one_out" if baseline == "leave_one_out" else "centered"
    )
