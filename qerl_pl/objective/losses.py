"""Policy losses, KL estimators and their reductions, as pure functions.

Every loss is the sum of ``row_weights[b] * value[b, s]`` over the tokens at which the mask is True. The row weights
express the averaging rule and contain its divisor. The divisor is counted over the whole batch (all micro-batches and
ranks), so the losses of micro-batches add up to the loss of the batch. The published objectives are pairs of a loss and
an averaging rule:

    GRPO       arXiv 2402.03300   clipped_policy_loss,  "sequence"
    DAPO       arXiv 2503.14476   clipped_policy_loss,  "token"
    Dr. GRPO   arXiv 2503.20783   clipped_policy_loss,  "constant"
    GSPO       arXiv 2507.18071   sequence_policy_loss, "sequence"
    CISPO      arXiv 2506.13585   cispo_policy_loss,    "token"

B rows, S tokens; logprobs are in nats. Padding may hold any value, nan and inf included: it is masked before exp.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]
KLKind = Literal["k1", "k2", "k3"]

# Log-ratios are clamped to +- this value in nats, because exp of larger ones overflows in fp32. The gradient of such
# tokens is clipped or mere noise anyway.
MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """A policy loss, and sums over tokens for its metrics. The sums are detached, and can be added over
    micro-batches."""

    loss: Tensor
    """[] the loss, with gradient; 0 that can be backpropagated if no token is valid."""
    clipped_low: Tensor
    """[] tokens whose ratio was raised to its lower bound."""
    clipped_high: Tensor
    """[] tokens whose ratio was cut to its upper bound."""
    ratio: Tensor
    """[] sum over tokens of the ratio new / old before clipping, whose expectation is 1 per token."""
    k1: Tensor
    """[] sum of log(old / new), nats: an unbiased, noisy estimate of KL(old || new)."""
    k3: Tensor
    """[] sum of new / old - 1 - log(new / old), nats: another estimate of KL(old || new), which is never negative."""


def count_divisor(mask: Tensor, aggregation: Aggregation, *, max_tokens: int) -> Tensor:
    """Count what the loss is averaged over, [] int64. The caller sums the counts of all micro-batches and ranks to get
    the divisor.

    "token": the tokens at which ``mask`` [B, S] bool is True. "sequence": the rows with at least one such token, since
    rows without one were filtered out or not scored. "constant": the number of these rows times ``max_tokens``, the
    limit on the length of a completion.
    """
    if aggregation == "token":
        return mask.sum()
    rows = mask.any(dim=1).sum()
    return rows if aggregation == "sequence" else rows * max_tokens


def row_weights(mask: Tensor, aggregation: Aggregation, divisor: Tensor) -> Tensor:
    """Compute the weight of a row's tokens in the loss, [B] fp64, finite also where the divisor or a row's length is 0.

    "token" and "constant": 1 / divisor; "sequence": 1 / (divisor x the row's tokens in ``mask``). The divisor is the
    sum of ``count_divisor`` over the batch; where gradients are averaged over W ranks and not summed, that sum divided
    by W.
    """
    divisor = divisor.to(mask.device, torch.float64)
    divisor = torch.where(divisor > 0, divisor, 1.0)
    if aggregation == "sequence":
        return 1 / (divisor * mask.sum(dim=1).clamp(min=1))
    return (1 / divisor).expand(len(mask))


def weighted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Reduce values [B, S], such as KL estimates or entropies, to a scalar as the policy losses do: sum them over
    ``mask``, multiplied by the weights [B] from ``row_weights``."""
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
    """Clipped surrogate with decoupled bounds: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = new / old.

    arXiv 2503.14476, eq. 8; with ``clip_low == clip_high`` arXiv 2402.03300, eq. 3 without its KL term. The upper bound
    acts where the advantage A > 0, the lower one where A < 0; ``max_ratio`` is the two-sided clip of INTELLECT-2 (arXiv
    2505.07291, its delta), which bounds the ratio from above where A < 0 too.

    Args:
        logprobs: [B, S] fp32, nats, under the policy being trained; carries the gradient.
        old_logprobs: [B, S] fp32, the same tokens under the policy before the first update on this batch.
        advantages: [B] fp32, one per row.
        mask: [B, S] bool, True on tokens that count.
        weights: [B] from ``row_weights``.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        max_ratio: largest ratio where A < 0, above 1 + clip_high; None: no bound.
        importance: [B, S] fp32, constant factor of each token from ``correction``; None: 1.

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
    """Clipped surrogate with one ratio per sequence, the geometric mean of its tokens' ratios (GSPO, arXiv 2507.18071,
    eq. 5).

    Arguments and errors as in ``clipped_policy_loss``; the defaults are the paper's bounds. Every token of a row has
    the row's ratio. The counts in the result are therefore numbers of tokens, and any ``row_weights`` may be used.

    Args:
        whole: [B, S] bool, True on all sampled tokens of a row, of which ``mask`` may select a part; the ratio is taken
            over all of them, whichever tokens carry the loss. None: ``mask``.
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
    """REINFORCE with a clipped, constant ratio: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (arXiv 2506.13585).

    Every token keeps its gradient; the bounds only limit the token's weight, for both signs of A. Arguments and errors
    as in ``clipped_policy_loss``, but ``max_ratio`` is refused. The paper sets no lower bound and does not publish its
    upper bound; the default here, a ratio of at most 5, is our choice.
    """
    log_ratio, gain = prepared(logprobs, old_logprobs, advantages, mask, weights, importance)
    low, high = _bounds(clip_low, clip_high)
    if max_ratio is not None:
        raise ValueError(f"max_ratio is {max_ratio}; CISPO's 1 + clip_high holds for both signs: leave max_ratio out")
    ratio = log_ratio.detach().exp()
    loss = -(ratio.clamp(low, high) * gain * torch.where(mask, logprobs, 0.0)).sum()
    return with_sums(loss, ratio, ratio < low, ratio > high, log_ratio, mask)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens sampled from the policy.

    "k1" log(p/q): unbiased. As a loss, its gradient is zero in expectation, so it is used, detached, in the reward.
    "k2" log(p/q)^2 / 2: as a loss, on policy, its gradient is that of KL(policy || reference). "k3" q/p - 1 - log(q/p):
    unbiased and never negative; GRPO's term (arXiv 2402.03300, eq. 4). As a loss, on policy, its gradient is that of
    KL(reference || policy).

    Args:
        logprobs: [B, S] nats under the policy; the gradient flows through it in every kind: detach it for a reward.
        ref_logprobs: [B, S] nats under the reference.
        mask: [B, S] bool.

    Returns:
        [B, S] nats, 0 where the mask is False; ``.sum(1)`` is the estimate of a whole row.
    """
    log_ratio = _log_ratio(logprobs, ref_logprobs.detach(), mask)  # log p/q
    estimators: dict[KLKind, Callable[[Tensor], Tensor]] = {
        "k1": lambda x: x,
        "k2": lambda x: x.square() / 2,
        "k3": lambda x: torch.expm1(-x) + x,
    }
    return estimators[kind](log_ratio)


def drift_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, importance: Tensor | None = None) -> Tensor:
    """Compute importance weights [B, S] for KL estimates at tokens that an older policy sampled, without a gradient.

    A KL estimator expects tokens sampled from the policy itself. After the first update on a batch, the tokens are
    those of an older policy, and E_new[k] = E_old[(new / old) k] per token (the ratio in the KL term of arXiv
    2512.02556, which also lets a gradient through it). Quantities that depend only on the preceding tokens, such as the
    exact entropy, need no weight: the expectation of the weight over the sampled token is 1, so the weight would only
    add noise. The result is also multiplied by ``importance`` [B, S], the weights that correct the difference between
    trainer and sampler.
    """
    ratio = _log_ratio(logprobs.detach(), old_logprobs, mask).exp()
    return ratio if importance is None else ratio * importance


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the entropy [] that a given ``share`` of N tokens reaches or exceeds (in arXiv 2506.01939, tau for the share
    rho).

    ``entropy`` [N] nats is of the valid tokens of all ranks that share the batch. The number of tokens that reach the
    threshold is rounded up. Without any token, the threshold is +inf. Tokens below the threshold carry no policy loss,
    but the loss is still divided by the number of all tokens, as in the paper. Raises ValueError if the share is not in
    (0, 1].
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
    """Return a loss with the sums for its metrics; ``below`` and ``above`` [B, S] bool are the tokens whose ratio was
    clipped at the lower and at the upper bound."""
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
    """Check the arguments of a policy loss. Returns the log-ratio [B, S], and the factor of the ratio in the loss, [B,
    S]: advantage x row weight x importance weight."""
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
