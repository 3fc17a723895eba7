"""An entropy bonus that adapts, to keep the policy's entropy up (Skywork-OR1, arXiv 2505.22312)."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_pl.common.checks import require_finite


@dataclass(frozen=True)
class EntropyControl:
    """Keeps the policy's entropy above a target, by an entropy bonus whose coefficient adapts.

    The coefficient starts at 0. If a rollout's entropy is below the target, the bonus acts, and the coefficient grows
    by ``step`` for the next rollout; otherwise the bonus does not act, and the coefficient shrinks. Unlike in the
    paper's formula it stays at 0 or above. Entropy begins above the target, so the paper's coefficient would become
    negative, and the bonus would be a penalty when it is first needed.

    Args:
        target: nats per token, mean over the rollout, at the sampling temperature; the paper uses 0.2.
        step: change of the coefficient per rollout; the paper uses 0.005.

    Raises:
        ValueError: a value is not more than 0.
    """

    target: float = 0.2
    step: float = 0.005

    def __post_init__(self) -> None:
        section = "model.objective.entropy_control"
        require_finite(section, target=self.target, step=self.step)
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{section}.{name} is {value}; expected more than 0")

    def in_force(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient of the entropy bonus for a rollout of this mean entropy, in nats per token."""
        return coefficient if entropy <= self.target else 0.0

    def following(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient of the next rollout."""
        if entropy == self.target:
            return coefficient
        return max(0.0, coefficient + (self.step if entropy < self.target else -self.step))
