"""Objectives: losses, advantages and corrections as pure functions, and the settings that choose among them."""

from qerl_pl.objective.objective import Objective

__all__ = ["Objective"]
