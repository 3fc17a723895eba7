"""Sequential tests of whether completions are independent draws from the distribution that the rollout engine reports.

All tests are likelihood-ratio tests. For a distribution p that the engine reports and any other distribution A, such as
a modification of the trainer's distribution q, the ratio A(x) / p(x) has mean 1 over draws x from p. So the product of
such ratios over tokens is a non-negative martingale of mean 1, and so is a weighted mean of several such products. By
Ville's inequality, the probability that such a martingale ever exceeds 1 / a is at most a, without any assumption about
p, about the length of completions, or about how far q is from p. In this module, "evidence" means the logarithm of such
a product, in nats.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

POWERS = (0.5, 0.75, 7 / 8, 15 / 16, 31 / 32, 33 / 32, 17 / 16, 9 / 8, 1.25, 1.5, 2.0, 4.0)
"""Exponents b of the alternative hypotheses q^b, where q is the trainer's distribution. Exponents near 1 detect small
changes of many tokens, which arise, for example, if the engine keeps the likelier of several completions."""
NUCLEI = (0.5, 0.8, 0.9, 0.95, 0.99)
TOPS = (5, 20, 50)
END_ODDS = (1 / 8, 1 / 2, 2.0, 8.0)
RANDOM = 0.02
ALTERNATIVES = (
    *(f"temperature x {1 / power:.3g}" for power in POWERS),
    *(f"top_p {mass:g}" for mass in NUCLEI),
    *(f"top_k {size}" for size in TOPS),
    *(f"end tokens {odds:g} times as likely" for odds in END_ODDS),
    f"{RANDOM:.0%} random tokens",
)
OUTSIDE = 0.05  # weight of q in an alternative with top_p or top_k, so that one token outside does not rule it out
SHARES = (1.0, 1 / 4, 1 / 16)
"""Shares of the completions, or of the groups, that an alternative hypothesis assumes to be sampled in another way; all
others are assumed to be draws from the distribution p that the engine reports."""
COPY_RATES = (0.9, 0.5, 0.1, 0.01)
REDRAW_RATES = (0.9, 0.5)
LEAST_LEFT = 1e-3
"""Lower bound for the total probability of the completions that a group does not have yet; a ratio divides by it."""
SLOPES = (1.0, 0.5, -0.5, -1.0)
STEEPNESS = 4
"""Parameter k of the alternative hypothesis that an engine returns the completions of a prompt in sorted order, for
example by length: the relative rank of a completion among itself and those before it is then distributed as the largest
(or smallest) of k uniform draws."""
COPIED = ("any earlier", "the previous", "the first", "the one half a group earlier")
"""Earlier completions of the same prompt of which an alternative makes copies."""


def alternative_logprobs(logits: Tensor, targets: Tensor, ends: Tensor) -> Tensor:
    """Compute the log-probabilities of sampled tokens under the trainer's distribution q = softmax(logits), and under K
    other distributions, from which a faulty engine might sample (``ALTERNATIVES`` lists them):

    - q^b normalised, that is, q at another temperature, for each b of ``POWERS``;
    - q with top_p = m for each m of ``NUCLEI``, and with top_k = k for each k of ``TOPS``, each mixed with a share
      ``OUTSIDE`` of q itself;
    - q with the odds of the end tokens multiplied by o, for each o of ``END_ODDS``, which describes an engine that ends
      completions too early or too late, or selects them by their length;
    - q mixed with a share ``RANDOM`` of the uniform distribution over all tokens.

    ``logits`` are [R, V] fp32 or fp64, already divided by the sampling temperature, ``targets`` [R] int64 the sampled
    tokens, and ``ends`` [E] int64 the end tokens, of which there may be none. Returns [R, 1 + K] in nats, in the dtype
    of the logits; column 0 is for q.
    """
    log_q = logits.log_softmax(dim=1)
    q, log_q_target = log_q.exp(), log_q.gather(1, targets.unsqueeze(1))  # [R, V], [R, 1]

    def total(values: Tensor) -> Tensor:
        return values.sum(dim=1, keepdim=True)

    roots = [q.sqrt()]  # products of roots instead of ``q.pow``, which is several times slower
    while len(roots) < 5:
        roots.append(roots[-1].sqrt())
    below_one = [total(power) for power in accumulate(roots, torch.mul)]
    above_one = [total(q * root) for root in reversed(roots)]
    square = q.square()
    above_one += [total(square), total(square.square())]
    powers, nuclei, log_odds, odds_less_one = _constants(q.dtype, q.device)
    tempered = powers * log_q_target - torch.cat(below_one + above_one, dim=1).log()
    # Place the probabilities of all tokens end to end on [0, 1] in descending order; the target's probability then
    # occupies the interval [likelier, at_least]. Tokens of equal q share one interval evenly.
    likelier, at_least = (total(q.where(mask, 0)) for mask in (log_q > log_q_target, log_q >= log_q_target))
    width = (at_least - likelier).clamp(min=torch.finfo(q.dtype).tiny)
    inside = ((nuclei - likelier) / width).clamp(0, 1).split(1, dim=1)
    # CUDA divides by numbers otherwise than by a tensor of these numbers
    in_nuclei = torch.cat([part / mass for part, mass in zip(inside, NUCLEI, strict=True)], dim=1)
    largest = log_q.topk(min(max(TOPS), log_q.shape[1]), dim=1).values
    least = [largest[:, min(size, largest.shape[1]) - 1].unsqueeze(1) for size in TOPS]
    kept = [total(q.where(log_q >= each, 0)) for each in least]  # all tokens that are as likely as the k-th are kept
    in_tops = (log_q_target >= torch.cat(least, dim=1)) / torch.cat(kept, dim=1)
    cut = log_q_target + (OUTSIDE + (1 - OUTSIDE) * torch.cat([in_nuclei, in_tops], dim=1)).log()
    at_end, mass = torch.isin(targets, ends).unsqueeze(1), total(q[:, ends])
    ended = log_q_target + at_end * log_odds - (odds_less_one * mass).log1p()
    mixed = ((1 - RANDOM) * log_q_target.exp() + RANDOM / q.shape[1]).log()
    return torch.cat([log_q_target, tempered, cut, ended, mixed], dim=1)


@cache
def _constants(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return as tensors the powers, the nuclei, the logarithms of the odds of the end tokens, and these odds less 1."""
    odds = torch.tensor(END_ODDS, dtype=torch.float64, device="cpu")
    powers, nuclei, less_one = (torch.as_tensor(of, dtype=dtype, device=device) for of in (POWERS, NUCLEI, odds - 1))
    return powers, nuclei, torch.tensor(list(map(math.log, END_ODDS)), dtype=torch.float32, device=device), less_one


def in_shares(evidence: Tensor) -> Tensor:
    """Add up the log-likelihood ratios, ``evidence`` [K, N] in nats, of K alternative hypotheses to the policy over N
    independent units (completions, or groups of completions of one prompt). Each sum is the log-likelihood ratio of the
    hypothesis that every unit was sampled from the alternative with probability s and from the policy otherwise.
    Returns [len(SHARES) * K] in nats: K sums for the first s of ``SHARES``, then K for the next one."""
    shares = torch.tensor(SHARES, dtype=evidence.dtype).reshape(-1, 1, 1)
    return torch.logaddexp((1 - shares).log(), shares.log() + evidence).sum(dim=2).flatten()


def accumulated(before: Tensor, evidence: Tensor) -> Tensor:
    """Update K sequential tests with the results of one rollout. Each tests the hypothesis that, from this or an
    earlier rollout on, completions are sampled from an alternative distribution and no longer from the distribution p
    that the engine reports. ``evidence`` [K] has the log-likelihood ratios of the alternatives to p for this rollout,
    in nats; ``before`` [K] is what this function returned for the previous rollout, and -inf before the first rollout.

    Returns log M_n [K] of the Shiryaev-Roberts sum M_n = (1 + M_{n-1}) exp(evidence_n), which adds up the likelihood
    ratios for all rollouts at which the change may have begun (an e-detector, arXiv 2203.03532). M_n - n is a
    martingale under draws from p, so the probability that M exceeds c within n rollouts is at most n / c.
    """
    return torch.logaddexp(torch.zeros_like(before), before) + evidence


class Draw(NamedTuple):
    """A completion, compared with the earlier completions of the same prompt."""

    prompt: int
    """Number that identifies the prompt."""
    equal: tuple[float, ...]
    """One number for each entry of ``COPIED``, which names some of the earlier completions of the prompt: the share of
    them that equal this completion; NaN if there are none."""
    logprob: float
    """Log-probability of the completion in nats."""
    left: float
    """Total probability, under the policy, of all completions that the group did not have before this one."""
    is_new: bool
    """True if no earlier completion of the group equals this one."""


def copy_evidence(draws: Iterable[Draw]) -> Tensor:
    """Test whether completions of a prompt are copies of each other, or avoid each other, and are therefore not
    independent draws from the policy p.

    Each alternative hypothesis assumes a fault in a share of the prompts (``SHARES``). By the first kind of hypothesis,
    a completion is with probability r (``COPY_RATES``) a copy of an earlier completion of its prompt (``COPIED``), and
    otherwise a draw from p. By the second kind, it is drawn with probability r (``REDRAW_RATES``) from the completions
    that its group does not have yet, and otherwise from p. For draws x from p, the mean of 1{x equals a given earlier
    completion} / p(x) is 1, and so is that of 1{x is new} / p(all that is new), so the likelihood ratios are
    martingales. If p(x) is near 1, a repeated completion changes the ratio of the first kind very little, because
    independent draws are then equal, too.

    Returns log-likelihood ratios, [len(SHARES) * (len(COPY_RATES) * len(COPIED) + len(REDRAW_RATES))] fp64 in nats.
    """
    seen = [draw for draw in draws if not all(map(math.isnan, draw.equal))]
    if not seen:
        num = len(COPY_RATES) * len(COPIED) + len(REDRAW_RATES)
        return torch.zeros(len(SHARES) * num, dtype=torch.float64)
    _, group = torch.tensor([draw.prompt for draw in seen]).unique(return_inverse=True)
    equal = torch.tensor([draw.equal for draw in seen], dtype=torch.float64).T  # [C, N]
    logprob = torch.tensor([draw.logprob for draw in seen], dtype=torch.float64)
    rates = torch.tensor(COPY_RATES, dtype=torch.float64).reshape(-1, 1, 1)
    repeats = rates.log() + equal.log() - logprob  # -inf if no earlier completion is equal
    copied = torch.logaddexp((1 - rates).log(), repeats).where(~equal.isnan(), 0).flatten(0, 1)  # [rates * C, N]
    redrawn = torch.tensor([draw.is_new / max(draw.left, LEAST_LEFT) for draw in seen], dtype=torch.float64)
    rates = torch.tensor(REDRAW_RATES, dtype=torch.float64).unsqueeze(1)
    rows = torch.cat([copied, (1 - rates + rates * redrawn).log()])
    return in_shares(rows.new_zeros(len(rows), int(group.max()) + 1).index_add(1, group, rows))


def repeats(seen: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int, float]]) -> Iterator[Draw]:
    """Yield a ``Draw``, the input of ``copy_evidence``, for each completion of a rollout.

    Args:
        seen: digests of prompt and completion, for each completion of earlier rollouts.
        rows: digests of prompt and completion, and the completion's log-probability in nats, for each completion of
            this rollout, in the order in which the engine returned them.
    """
    prompts, both = Counter(prompt for prompt, _ in seen), Counter(seen)
    sizes, groups = Counter(prompt for prompt, _, _ in rows), defaultdict(list)
    drawn = defaultdict[int, dict[int, float]](dict)
    for prompt, completion, logprob in rows:
        group, own_chances, half = groups[prompt], drawn[prompt], sizes[prompt] // 2
        others = (group[-1:], group[:1], group[len(group) - half :][:1] if 0 < half <= len(group) else [])
        any_earlier = both[prompt, completion] / prompts[prompt] if prompts[prompt] else math.nan
        equal = (any_earlier, *(float(places[0] == completion) if places else math.nan for places in others))
        yield Draw(prompt, equal, logprob, 1 - math.fsum(own_chances.values()), completion not in own_chances)
        prompts[prompt] += 1
        both[prompt, completion] += 1
        group.append(completion)
        own_chances.setdefault(completion, math.exp(min(logprob, 0.0)))


def order_evidence(values: Tensor, uniforms: Tensor) -> Tensor:
    """Test whether a property of completions, such as their length, depends on a completion's place in its group.

    If completions are independent draws, all orders are equally likely. Among a value and the values before it in its
    group, n in all, let m be the number of values that are smaller and t the number of those that are equal (itself
    included), and let u = (m + U t) / n, with U drawn from [0, 1). Then u is uniform in [0, 1] and independent of the u
    of the values before it. The alternative hypotheses are other densities of u in a share of groups (``SHARES``).
    Densities 1 + c (2 u - 1), for c of ``SLOPES``, mean that later values are larger (or smaller), for example because
    the later half was sampled with another adapter. The density k u^(k - 1), with k = ``STEEPNESS``, and its mirror
    image mean that the engine returns completions in sorted order, for example because it selected the shortest.

    ``values`` are [F, P, G], F properties of the G completions of each of P prompts, and ``uniforms``, U, of the same
    shape. Returns log-likelihood ratios, [len(SHARES) * (len(SLOPES) + 2) * F] fp64 in nats.
    """
    slopes = torch.tensor(SLOPES, dtype=torch.float64).reshape(-1, 1, 1)
    evidence = values.new_zeros(len(SLOPES) + 2, *values.shape[:2], dtype=torch.float64)
    for place in range(1, values.shape[2]):
        value, earlier = values[:, :, place : place + 1], values[:, :, :place]
        ties = (earlier == value).sum(dim=2) + 1
        rank = ((earlier < value).sum(dim=2) + uniforms[:, :, place] * ties) / (place + 1)
        rank = rank.double().clamp(1e-9, 1 - 1e-9)
        steep = math.log(STEEPNESS) + (STEEPNESS - 1) * torch.stack([rank.log(), (-rank).log1p()])
        evidence += torch.cat([(slopes * (2 * rank - 1)).log1p(), steep])
    return in_shares(evidence.flatten(0, 1))


def log_false_alarm(evidence: Tensor) -> float:
    """Return the logarithm of an upper bound on the probability that a correct engine gives log-likelihood ratios as
    large as ``evidence``, [K] in nats for K alternatives: Ville's inequality for the mean of the K ratios. For a result
    of ``accumulated`` it is a bound per rollout: within n rollouts, the probability is at most n times as large."""
    return min(0.0, math.log(len(evidence)) - evidence.logsumexp(dim=0).item())
