"""The term of the loss that draws the policy towards a teacher on completions that the policy has sampled (on-policy
distillation)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qerl_pl.common.checks import require_at_least, require_finite

Kind = Literal["sampled", "forward", "reverse", "jensen_shannon"]


@dataclass(frozen=True, kw_only=True)
class TeacherTerm:
    """Settings of on-policy distillation: a term of the loss that is the divergence of the policy from
    ``model.teacher`` at the sampled tokens, averaged as the objective's ``aggregation`` says.

    With p the policy's distribution of a token and q the teacher's, both at the sampling temperature:

    - "sampled": the gradient of KL(p || q) at the sampled tokens alone, which is that of a policy loss whose advantage
    is log q - log p, token by token; - "reverse": KL(p || q) over the whole vocabulary, of which "sampled" is an
    unbiased and noisy estimate; - "forward": KL(q || p), which is large wherever the policy gives a low probability to
    a token that the teacher may choose; - "jensen_shannon": GKD's generalised Jensen-Shannon divergence (arXiv
    2306.13649, equation 1) with the weight ``beta``, which lies between "forward" and "reverse".

    Args:
        coefficient: factor of this term in the loss. For comparison: advantages are about 1, and the divergence is in
            nats per token.
        divergence: "sampled", "reverse", "forward" or "jensen_shannon". All but "sampled" keep the teacher's hidden
            states of a rollout, and compute logits of both models in every pass.
        beta: weight of the teacher in "jensen_shannon", between 0 (forward) and 1 (reverse); null: 0.5.
        rollouts: RL iterations over which the coefficient falls linearly to 0, after which rewards alone train the
            policy; null: the coefficient stays.
    """

    coefficient: float = 1.0
    divergence: Kind = "sampled"
    beta: float | None = None
    rollouts: int | None = None

    def __post_init__(self) -> None:
        section = "model.objective.teacher"
        require_finite(section, coefficient=self.coefficient, beta=self.beta)
        if not self.coefficient > 0:
            raise ValueError(f"{section}.coefficient is {self.coefficient}; expected more than 0")
        if self.beta is not None and self.divergence != "jensen_shannon":
            raise ValueError(
                f"{section}.beta is {self.beta} and divergence is {self.divergence!r}, with which it has no effect; "
                "leave it out"
            )
        if self.beta is not None and not 0 < self.beta < 1:
            raise ValueError(
                f"{section}.beta is {self.beta}; expected a number between 0 and 1: divergence: forward is 0, reverse 1"
            )
        require_at_least(1, section=f"{section}.", rollouts=self.rollouts, hint=", or null")

    @property
    def mixture(self) -> float | None:
        """Weight beta of the teacher in the generalised Jensen-Shannon divergence: 0 is the forward KL, KL(teacher ||
        policy), and 1 the reverse KL. It is None if the divergence is "sampled", an estimate that uses only the
        log-probabilities of the sampled tokens."""
        between = 0.5 if self.beta is None else self.beta
        shares: dict[Kind, float | None] = {"sampled": None, "forward": 0.0, "reverse": 1.0, "jensen_shannon": between}
        return shares[self.divergence]

    def at(self, rollout: int) -> TeacherTerm | None:
        """Return the term with the coefficient of RL iteration ``rollout``, from 0; None if it has fallen to 0."""
        if self.rollouts is None:
            return self
        left = 1 - rollout / self.rollouts
        return replace(self, coefficient=self.coefficient * left, rollouts=None) if left > 0 else None
