"""The protocol of sources of problems, and a source that combines two others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from qerl_pl.common.types import Problem


class PromptSource(Protocol):
    """Protocol of a source of training and validation problems. Its constructor reads no data; only its methods do."""

    def train(self) -> list[Problem]:
        """Return the training problems, always in the same order."""
        ...

    def validation(self) -> list[Problem]:
        """Return the validation problems, always in the same order."""
        ...


@dataclass(frozen=True)
class Pair:
    """A source that takes training problems from one source and validation problems from another, e.g. a benchmark.

    Args:
        training: source of the training problems; its validation problems are not used.
        benchmark: source of the validation problems; its training problems are not used.
    """

    training: PromptSource
    benchmark: PromptSource

    def train(self) -> list[Problem]:
        return self.training.train()

    def validation(self) -> list[Problem]:
        return self.benchmark.validation()


def check_problems(problems: Any, source: str) -> list[Problem]:
    """Check what a source returned, and return it as a list. ValueError: an element is no ``Problem`` with question and
    answer as texts; ``source`` is the name of the source for the message."""
    if not isinstance(problems, Iterable):
        raise ValueError(f"{source} gives {str(problems)[:80]!r}; expected a list of qerl_pl.common.types.Problem")
    problems = list(problems)
    for number, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ValueError(
                f"{source}: problem {number} is {str(problem)[:80]!r} of type {type(problem).__name__}; expected "
                "qerl_pl.common.types.Problem(question, answer)"
            )
        for field in ("question", "answer"):
            value = getattr(problem, field)
            if not isinstance(value, str):
                raise ValueError(
                    f"{source}: the {field} of problem {number} is {str(value)[:80]!r} of type {type(value).__name__}; "
                    "expected text"
                )
    return problems
