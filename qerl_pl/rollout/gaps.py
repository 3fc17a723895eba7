"""Gaps, which are differences between the log-probabilities of trainer and sampler in a rollout, and their limits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed
from qerl_pl.policy.jumps import FAR, MAX_FAR_SHARE, far_share, high_gap, jump, logit_gap

Gaps = Mapping[str, float]
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats; docs/correctness.md has the gaps of correct engines
GAP_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 2e-3}  # nats; smaller gaps never count as a jump
# Factors of GAP_FLOOR for each kind of gap: a mean over one row varies more than a mean over a rollout, and logits vary
# more than log-probabilities.
FLOORS = {"gap": 1.0, "high_gap": 5.0, "logit_gap": 10.0}
# Factors of the setting max_jump for each kind of gap: from rollout to rollout, gaps of single rows vary most, and gaps
# of logits least.
JUMPS = {"gap": 1.0, "high_gap": 1.5, "logit_gap": 0.8}
SURE_SIGMAS = 6.0
FIRST = 2.0  # factor of the limits while most values in a median are estimates from the trainer's rounding errors
# Number of different tokens that a rollout must have for a jump: the means of fewer vary too much. Equal completions,
# whose errors are equal, count once.
LEAST_TOKENS = 64
# Names under which gaps are logged. OF_THE_CHOSEN: of a few rows, for which the trainer computes log-probabilities
# before the update, with the noise on norms that the engine had. OF_ALL: of all rows, with the log-probabilities that
# the update computes anyway, without noise.
OF_THE_CHOSEN = {kind: f"evidence/{kind}" for kind in (*FLOORS, "far_share")}
OF_ALL = {kind: f"{name}_of_all" for kind, name in OF_THE_CHOSEN.items()}
ADVICE = (
    "tokens or log-probabilities were altered, or come from another policy. If engine and trainer are correct, raise "
    "RolloutEvidence.max_gap or max_jump"
)


def gaps_of(trainer: Tensor, other: Tensor, rows: Tensor) -> Gaps:
    """Compare the log-probabilities of the trainer with those of ``other``, such as the sampler, over the tokens of all
    ranks. Returns the mean absolute difference ("gap"), the largest value that the mean of a single completion reaches
    or exceeds in one of 32 completions, and in two or more ("high_gap"), the mean difference of logits, as estimated
    from the log-probabilities ("logit_gap"), the share of tokens whose probabilities differ by a factor above 8
    ("far_share"), and the number of different values that the trainer's log-probabilities have ("different"), so tokens
    of equal completions count once, and so do all tokens with probability 1. The arguments are for this rank's N
    tokens: log-probabilities in nats, [N] fp64, and the index of each token's completion, [N] int64. Every rank must
    call this function."""
    log_ratio = trainer - other
    size = int(rows.max()) + 1 if len(rows) else 0
    sums = log_ratio.new_zeros(size).index_add(0, rows, log_ratio.abs())
    counts = log_ratio.new_zeros(size).index_add(0, rows, torch.ones_like(log_ratio))
    of_rows = sums[counts > 0] / counts[counts > 0]
    totals = log_ratio.abs().sum().item(), logit_gap(trainer, other).sum().item(), far_share(log_ratio) * len(rows)
    parts = ranks.gather_values((of_rows.tolist(), [*totals, len(trainer.unique()), len(rows)]))
    row_gaps = torch.tensor([gap for part, _ in parts for gap in part], dtype=torch.float64)
    gap, logits, far, different, count = map(math.fsum, zip(*(totals for _, totals in parts), strict=True))
    means = {"gap": gap / max(1, count), "logit_gap": logits / max(1, count), "far_share": far / max(1, count)}
    return {**means, "high_gap": high_gap(row_gaps) if len(row_gaps) else 0.0, "different": different}


@dataclass
class GapLimits:
    """Limits of gaps: constants, settings of the callback RolloutEvidence, and multiples of medians of earlier gaps."""

    max_gap: float | None
    max_jump: float | None
    warn_jump: float
    window: int
    history: dict[str, list[float]] = field(default_factory=dict)
    """Gaps of the latest rollouts, up to ``window``, by name, oldest first."""
    excess: dict[str, float] = field(default_factory=dict)
    """First measured gap of the run divided by the expected one, by name."""

    def expect(self, usual: Gaps) -> None:
        """Begin the history with gaps of the size of the trainer's own rounding errors."""
        for rows in (OF_THE_CHOSEN, OF_ALL):
            self.history |= {name: [usual[kind]] * 2 for kind, name in rows.items() if kind in FLOORS}

    def check(
        self, gaps: Gaps, names: Mapping[str, str], *, rollout: int, dtype: torch.dtype, rounding: Callable[[], Gaps]
    ) -> None:
        """Compare the gaps of a rollout, the result of ``gaps_of``, with their limits, and add them to the history
        under the names that ``names`` has for each kind of gap. ``rounding`` measures the gaps that the trainer's own
        rounding errors in the compute dtype ``dtype`` cause in some completions. Raises CheckFailed if a gap exceeds
        its limit."""
        if gaps["far_share"] > MAX_FAR_SHARE:
            raise CheckFailed(
                f"{gaps['far_share']:.2%} of the tokens of rollout {rollout} have a probability in the trainer that "
                f"differs from the sampler's by more than a factor of {FAR:g} (allowed: {MAX_FAR_SHARE:.2%}): {ADVICE}"
            )
        limit, rounding = self.max_gap or MAX_GAP[dtype], cache(rounding)
        for kind in FLOORS:
            name, value, floor = names[kind], gaps[kind], GAP_FLOOR[dtype] * FLOORS[kind]
            what = {"high_gap": " in some rows", "logit_gap": " as a difference of logits"}.get(kind, "")
            differ = (
                f"the sampler's log-probabilities of rollout {rollout} differ from the trainer's by {value:.2g} nats "
                f"per token{what}"
            )
            if kind == "gap" and not value <= limit:
                raise CheckFailed(f"{differ}, more than {limit:.2g}: {ADVICE}")
            if gaps["different"] < LEAST_TOKENS:
                continue
            history = self.history.get(name, [])
            # The history of a run's first rollouts begins with estimates from the trainer's rounding errors, which may
            # be smaller or larger than gaps. Limits are therefore wider until most of the history is measured.
            known = len(history) >= min(4, self.window)
            ratio, sigmas = jump(value, history, floor=floor)
            if sigmas > SURE_SIGMAS:
                if ratio > self.warn_jump:
                    excess = max(value, floor) / max(rounding()[kind], floor)
                    ratio = min(ratio, excess / self.excess.get(name, 1.0))
                most = math.inf if self.max_jump is None else self.max_jump * JUMPS[kind] * (1 if known else FIRST)
                if ratio > most:
                    raise CheckFailed(f"{differ}, {ratio:.1f} times the usual: {ADVICE}")
                if known and kind == "gap" and ratio > self.warn_jump:
                    rank_zero_warn(f"{differ}, {ratio:.1f} times the usual: look at gap/* and ledger/* for the cause")
            if history and not known:
                self.excess.setdefault(name, max(value, floor) / max(history[0], floor))
            self.history[name] = [*history, value][-self.window :]
