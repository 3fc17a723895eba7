"""An entropy bonus that adapts to the entropy (Skywork-OR1, arXiv 2505.22312, its adaptive entropy control)."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_pl.common.finite import require_finite


@dataclass(frozen=True)
class EntropyControl:
    """Keep the policy's entropy from falling below a target, by a bonus whose coefficient follows the entropy.

    The coefficient starts at 0. On a rollout with less entropy than the target it acts, and grows by ``step`` for the
    next one; on one with more it does not act, and shrinks. Unlike in the paper's formula it does not fall below 0: it
    would, as entropy begins above the target, and the bonus would be a penalty when it is needed first.

    Args:
        target: nats per token, mean over the rollout, at the sampling temperature; the paper's 0.2.
        step: what the coefficient changes by in a rollout; the paper's 0.005.

    Raises:
        ValueError: a value is not more than 0.
    """

    target: float = 0.2
    step: float = 0.005

    def __post_init__(self) -> None:
        section = "model.objective.entropy_control"
        require_finite(section, target=self.target, step=self.step)
        for name, value in (("target", self.target), ("step", self.step)):
            if not value > 0:
                raise ValueError(f"{section}.{name} is {value}; expected more than 0")

    def in_force(self, coefficient: float, entropy: float) -> float:
        """The weight of the bonus on a rollout of this mean entropy, in nats."""
        return coefficient if entropy <= self.target else 0.0

    def following(self, coefficient: float, entropy: float) -> float:
        """The coefficient of the next rollout."""
        if entropy == self.target:
            return coefficient
        return max(0.0, coefficient + (self.step if entropy < self.target else -self.step))
