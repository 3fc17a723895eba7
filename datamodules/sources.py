"""What a source of problems is, and the making of one source out of two."""

from __future__ import annotations

from typing import Protocol

from qerl_pl.common.types import Problem


class PromptSource(Protocol):
    """Where problems come from. Built cheaply from YAML; data is read when it is asked for."""

    def train(self) -> list[Problem]:
        """Training problems, always in the same order."""
        ...

    def validation(self) -> list[Problem]:
        """Validation problems, always in the same order."""
        ...


class Pair:
    """Trains on one source and validates on another, e.g. on a benchmark.

    Args:
        training: source of the training problems; its validation side is not used.
        benchmark: source of the validation problems; its training side is not used.
    """

    def __init__(self, training: PromptSource, benchmark: PromptSource) -> None:
        self.training = training
        self.benchmark = benchmark

    def train(self) -> list[Problem]:
        """The training problems of the one."""
        return self.training.train()

    def validation(self) -> list[Problem]:
        """The validation problems of the other."""
        return self.benchmark.validation()
