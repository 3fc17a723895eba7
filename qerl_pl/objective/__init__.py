"""Losses, advantages and importance weights as pure functions of tensors, and the settings that choose among them."""

from qerl_pl.objective.objective import Objective
from qerl_pl.objective.resolved import LossInputs, ResolvedObjective

__all__ = ["LossInputs", "Objective", "ResolvedObjective"]
