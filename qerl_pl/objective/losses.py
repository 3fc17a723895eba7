"""Policy losses, KL estimators and their reductions, as pure functions of tensors.

Every loss is the sum of ``row_weights[b] * value[b, s]`` over the tokens at which the mask is True. The row weights
express how token losses are averaged, and already contain the division by the number of tokens or rows (the divisor).
This number is counted over a whole mini-batch (all micro-batches and ranks of one optimizer step), so the losses of
micro-batches add up to the loss of the step. The published objectives are pairs of a loss and a way of averaging:

    GRPO       arXiv 2402.03300   clipped_policy_loss,  "sequence"
    DAPO       arXiv 2503.14476   clipped_policy_loss,  "token"
    Dr. GRPO   arXiv 2503.20783   clipped_policy_loss,  "constant"
    GSPO       arXiv 2507.18071   sequence_policy_loss, "sequence"
    CISPO      arXiv 2506.13585   cispo_policy_loss,    "token"

Shapes: B rows (a prompt and its completion each), S token positions. Log-probabilities are in nats, and the ratio r is
the probability of a token under the policy divided by that under the policy before the first update on the rollout.
Where a mask is False, tensors may hold any value, nan and inf included, because masks are applied before exp.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
KLKind = Literal["k1", "k2", "k3"]

# Log-ratios are clamped to +- this value in nats, because exp of larger ones overflows in fp32. Little is lost by this,
# because the gradient of such tokens is either clipped or consists of noise.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """A policy loss, and sums over the tokens of a mask for its metrics. The sums are detached, and can be added over
    micro-batches."""

    loss: Tensor
    """[] the loss, with gradient; if the mask has no token, a 0 that can be backpropagated."""
    clipped_low: Tensor
    """[] number of tokens whose ratio was raised to its lower bound."""
    clipped_high: Tensor
    """[] number of tokens whose ratio was cut to its upper bound."""
    ratio: Tensor
    """[] sum over tokens of the ratio new / old before clipping, whose expectation is 1 per token."""
    k1: Tensor
    """[] sum of log(old / new), nats: an unbiased, noisy estimate of KL(old || new)."""
    k3: Tensor
    """[] sum of new / old - 1 - log(new / old), nats: another estimate of KL(old || new), which is never negative."""


def count_divisor(mask: Tensor, aggregation: Aggregation, *, max_tokens: int) -> Tensor:
    """Count what the loss of a micro-batch is averaged over, [] int64: with the aggregation "token", the tokens at
    which ``mask`` [B, S] bool is True; with "sequence", the rows with at least one such token; with "constant", these
    rows times ``max_tokens``, the limit on a completion's tokens. The sum over all micro-batches and ranks is the
    divisor of the loss.
    """
    if aggregation == "token":
        return mask.sum()
    rows = mask.any(dim=1).sum()
    return rows if aggregation == "sequence" else rows * max_tokens


def row_weights(mask: Tensor, aggregation: Aggregation, divisor: Tensor) -> Tensor:
    """Compute the factor that multiplies the loss of each of a row's tokens, [B] fp64 for B rows; finite also where the
    divisor or a row's length is 0.

    With the aggregation "token" or "constant", it is 1 / divisor; with "sequence", 1 / (divisor x number of the row's
    tokens in ``mask``). The divisor is the sum of ``count_divisor`` over all micro-batches and ranks. If gradients are
    averaged over W ranks instead of summed, the caller passes this sum divided by W.
    """
    divisor = divisor.to(mask.device, torch.float64)
    divisor = torch.where(divisor > 0, divisor, 1.0)
    if aggregation == "sequence":
        return 1 / (divisor * mask.sum(dim=1).clamp(min=1))
    return (1 / divisor).expand(len(mask))


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Reduce values [B, S], such as KL estimates or entropies, to a scalar in the same way as policy losses: the sum
    over the tokens of ``mask``, where those of row b are multiplied by ``weights[b]``, which ``row_weights``
    returned."""
    return (torch.where(mask, values, 0.0) * weights.unsqueeze(1).to(values.dtype)).sum()


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_ratio: float | None = None,
    importance: Tensor | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate with separate bounds: the sum of -min(r A, clip(r, 1 - clip_low, 1 + clip_high)
    A) over tokens, each multiplied by the weight of its row. r is the ratio of new to old probability and A the
    advantage.

    This is arXiv 2503.14476, eq. 8; with ``clip_low == clip_high`` it is arXiv 2402.03300, eq. 3 without its KL term.
    The upper bound acts where A > 0, the lower one where A < 0. ``max_ratio`` is the two-sided clip of INTELLECT-2
    (arXiv 2505.07291, its delta), which bounds the ratio from above where A < 0 too.

    Args:
        logprobs: [B, S] fp32, nats, under the policy being trained; carries the gradient.
        old_logprobs: [B, S] fp32, nats, of the same tokens under the policy before the first update on the rollout.
        advantages: [B] fp32, one per row.
        mask: [B, S] bool, True on tokens that count.
        weights: [B] from ``row_weights``.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        max_ratio: largest ratio where A < 0, above 1 + clip_high; None: no bound.
        importance: [B, S] fp32, constant factor of each token from ``objective.correction``; None: 1.

    Raises:
        ValueError: a shape differs from the above, or a bound is not in its range.
    """
    log_ratio, gain = prepared(logprobs, old_logprobs, advantages, mask, weights, importance)
    return _clipped(log_ratio, log_ratio, gain, mask, clip_low, clip_high, max_ratio)


def sequence_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    max_ratio: float | None = None,
    importance: Tensor | None = None,
    whole: Tensor | None = None,
) -> PolicyLoss:
    """Compute the clipped surrogate with one ratio per sequence, the geometric mean of its tokens' ratios (GSPO, arXiv
    2507.18071, eq. 5).

    Arguments and errors are those of ``clipped_policy_loss``, with the paper's bounds as defaults. Every token of a row
    has the row's ratio, so numbers of clipped ratios count tokens. ``whole`` [B, S] bool (None: ``mask``) is True on
    all tokens over which the row's ratio is taken; ``mask`` may select only some of them for the loss.
    """
    log_ratio, gain = prepared(logprobs, old_logprobs, advantages, mask, weights, importance)
    whole = mask if whole is None else whole
    token_log_ratio = _log_ratio(logprobs, old_logprobs, whole)
    mean = token_log_ratio.sum(dim=1, keepdim=True) / whole.sum(dim=1, keepdim=True).clamp(min=1)  # [B, 1]
    return _clipped(torch.where(mask, mean, 0.0), log_ratio, gain, mask, clip_low, clip_high, max_ratio)


def cispo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    clip_low: float = math.inf,
    clip_high: float = 4.0,
    max_ratio: float | None = None,
    importance: Tensor | None = None,
) -> PolicyLoss:
    """Compute the loss of CISPO (arXiv 2506.13585), REINFORCE with a clipped and constant ratio: the sum of -clip(r, 1
    - clip_low, 1 + clip_high) A log pi over tokens, each multiplied by its row's weight. No gradient flows through the
    ratio r, and A is the advantage, so every token keeps its gradient, for both signs of A.

    Arguments, result and errors are those of ``clipped_policy_loss``, except that ``max_ratio`` raises ValueError. The
    paper sets no lower bound and does not publish its upper bound; by default, the ratio is at most 5.
    """
    log_ratio, gain = prepared(logprobs, old_logprobs, advantages, mask, weights, importance)
    low, high = _bounds(clip_low, clip_high)
    if max_ratio is not None:
        raise ValueError(f"max_ratio is {max_ratio}; CISPO's 1 + clip_high holds for both signs: leave max_ratio out")
    ratio = log_ratio.detach().exp()
    loss = -(ratio.clamp(low, high) * gain * torch.where(mask, logprobs, 0.0)).sum()
    return with_sums(loss, ratio, ratio < low, ratio > high, log_ratio, mask)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KLKind) -> Tensor:
    """Estimate KL(policy || reference) at each token that was sampled from the policy, [B, S] nats, 0 where the mask is
    False; ``.sum(1)`` is the estimate of a whole row.

    With p the policy's and q the reference's probability of the token:

    - "k1": log(p/q). Unbiased. Its gradient is zero in expectation, so it is no use as a loss; detached, it is
      subtracted from the reward.
    - "k2": log(p/q)^2 / 2. As a loss, at tokens of the current policy, its gradient is that of KL(policy || reference).
    - "k3": q/p - 1 - log(q/p). Unbiased and never negative; GRPO's term (arXiv 2402.03300, eq. 4). As a loss, at tokens
      of the current policy, its gradient is that of KL(reference || policy).

    Args:
        logprobs: [B, S] nats under the policy; the gradient flows through it for every kind, so detach it for a reward.
        ref_logprobs: [B, S] nats under the reference.
        mask: [B, S] bool, True on the tokens to estimate at.
        kind: the estimator.
    """
    log_ratio = _log_ratio(logprobs, ref_logprobs.detach(), mask)  # log p/q
    estimators: dict[KLKind, Callable[[Tensor], Tensor]] = {
        "k1": lambda x: x,
        "k2": lambda x: x.square() / 2,
        "k3": lambda x: torch.expm1(-x) + x,
    }
    return estimators[kind](log_ratio)


def drift_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, importance: Tensor | None = None) -> Tensor:
    """Compute importance weights [B, S], without gradient, that correct KL estimates at tokens which an older policy
    sampled: new / old probability, times ``importance`` [B, S], the weights that correct the difference between trainer
    and sampler (None: 1). So an estimate has the expectation that it would have under the current policy (as in the KL
    term of arXiv 2512.02556, in which the gradient also flows through this ratio).

    Quantities that depend only on the preceding tokens, such as the exact entropy, need no weight: the expectation of
    the weight over the sampled token is 1, so it would only add noise.
    """
    ratio = _log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    return ratio if importance is None else ratio * importance


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the entropy [], in nats, that a given ``share`` of N tokens reaches or exceeds (tau for the share rho in
    arXiv 2506.01939). Only these tokens get a policy loss; the loss is still divided by the number of all tokens, as in
    the paper.

    ``entropy`` [N] has the entropies in nats of the tokens in the loss of all ranks. The number of tokens that reach
    the threshold is rounded up; without any token, the threshold is +inf. Raises ValueError if ``share`` is not in (0,
    1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected more than 0 and at most 1 (1 keeps every token)")
    values = torch.cat([entropy.detach(), entropy.new_tensor([math.inf])])  # [n + 1]: never empty
    return values.topk(math.ceil(share * (len(values) - 1)) + 1).values[-1]


def _clipped(
    log_ratio: Tensor,
    token_log_ratio: Tensor,
    gain: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    max_ratio: float | None,
) -> PolicyLoss:
    lowest, highest = _bounds(clip_low, clip_high)
    if max_ratio is not None and max_ratio <= highest:
        raise ValueError(f"max_ratio is {max_ratio}; expected more than 1 + clip_high = {highest}")
    ratio = log_ratio.exp()
    # min(r A, clip(r) A) equals A times the ratio r bounded from above where A > 0, and from below where A < 0.
    low = torch.where(gain < 0, ratio.new_tensor(lowest), 0.0)
    high = torch.where(gain > 0, ratio.new_tensor(highest), math.inf)
    if max_ratio is not None:
        high = torch.where(gain < 0, max_ratio, high)
    loss = -(ratio.clamp(low, high) * gain).sum()
    return with_sums(loss, ratio, ratio < low, ratio > high, token_log_ratio, mask)


def with_sums(
    loss: Tensor, ratio: Tensor, below: Tensor, above: Tensor, token_log_ratio: Tensor, mask: Tensor
) -> PolicyLoss:
    """Return a ``PolicyLoss`` of the given ``loss`` [] and sums for metrics. ``ratio`` [B, S] is the ratio before
    clipping, ``below`` and ``above`` [B, S] bool say where it was clipped, and ``token_log_ratio`` [B, S] nats is the
    log-ratio of each token, 0 outside of ``mask``."""
    log_ratio = token_log_ratio.detach()
    k3 = torch.expm1(log_ratio) - log_ratio
    ratio_sum = torch.where(mask, ratio.detach(), 0.0).sum()
    return PolicyLoss(loss, below.sum(), above.sum(), ratio_sum, -log_ratio.sum(), k3.sum())


def _log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    # masked before subtracting, because inf - inf is NaN
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, other, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    for name, distance in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not distance >= 0:
            raise ValueError(f"{name} is {distance}; expected 0 or more: a distance from ratio 1")
    return max(0.0, 1 - clip_low), 1 + clip_high


def prepared(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a policy loss, and return two tensors [B, S], 0 outside of ``mask``: the log-ratio of new
    to old probability in nats; and the detached factor by which the loss multiplies the ratio, advantage x row weight x
    importance weight. Raises ValueError if a shape or dtype is wrong."""
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs has shape {tuple(logprobs.shape)}; expected [B, S]")
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; expected torch.bool, True on tokens that count")
    per_token = {"old_logprobs": old_logprobs, "mask": mask, "importance": importance}
    per_row = {"advantages": advantages, "weights": weights}
    for tensors, shape in ((per_token, logprobs.shape), (per_row, logprobs.shape[:1])):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)} to fit the logprobs")
    gain = (advantages * weights).unsqueeze(1).to(logprobs.dtype)
    if importance is not None:
        gain = gain * importance
    return _log_ratio(logprobs, old_logprobs, mask), torch.where(mask, gain.detach(), 0.0)


SURROGATES: dict[str, Callable[..., PolicyLoss]] = {
    "clipped": clipped_policy_loss,
    "sequence": sequence_policy_loss,
    "cispo": cispo_policy_loss,
}
