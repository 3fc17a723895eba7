"""The protocol of a source of problems, and a source that combines two."""

from __future__ import annotations

from typing import Protocol

from qerl_pl.common.types import Problem


class PromptSource(Protocol):
    """A source of problems. It is cheap to build from YAML; data is read on demand."""

    def train(self) -> list[Problem]:
        """Return the training problems, always in the same order."""
        ...

    def validation(self) -> list[Problem]:
        """Return the validation problems, always in the same order."""
        ...


class Pair:
    """A source that trains on one source and validates on another, e.g. on a benchmark.

    Args:
        training: source of the training problems; its validation problems are not used.
        benchmark: source of the validation problems; its training problems are not used.
    """

    def __init__(self, training: PromptSource, benchmark: PromptSource) -> None:
        self.training = training
        self.benchmark = benchmark

    def train(self) -> list[Problem]:
        """Return the training source's problems."""
        return self.training.train()

    def validation(self) -> list[Problem]:
        """Return the benchmark's problems."""
        return self.benchmark.validation()
