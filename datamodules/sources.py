"""The protocol of sources of problems, and a source that combines two others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from qerl_pl.common.json_lines import stored_text
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
    """Check what a source returned, and return it as a list. Raises ValueError if an element is not a ``Problem`` whose
    question and answer are texts, whose messages are a sequence (if not empty, the last is the user's), and whose row
    is a mapping of columns. ``source`` is the source's name for the message."""
    if not isinstance(problems, Iterable):
        raise ValueError(f"{source} gives {str(problems)[:80]!r}; expected a list of qerl_pl.common.types.Problem")
    problems = list(problems)
    for number, problem in enumerate(problems):
        where = f"{source}: problem {number}"
        if not isinstance(problem, Problem):
            raise ValueError(
                f"{where} is {str(problem)[:80]!r} of type {type(problem).__name__}; expected "
                "qerl_pl.common.types.Problem(question, answer)"
            )
        for field, kinds, expected in (
            ("question", str, "text"),
            ("answer", str, "text"),
            ("messages", list | tuple, "a list of messages with role and content"),
            ("row", Mapping, "a mapping of columns"),
        ):
            value = getattr(problem, field)
            if not isinstance(value, kinds):
                raise ValueError(
                    f"{source}: the {field} of problem {number} is {str(value)[:80]!r} of type {type(value).__name__}; "
                    f"expected {expected}"
                )
        for message in problem.messages:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{where} has the message {str(message)[:80]!r}; expected texts as role and content")
            stored_text(texts[-1], f"{where}: content")
        if problem.messages and problem.messages[-1]["role"] != "user":
            role = problem.messages[-1]["role"]
            raise ValueError(f"{where}: the last message is of role {role!r}; expected the user's")
        stored_text(problem.question, f"{where}: question")
        stored_text(problem.answer, f"{where}: answer")
    return problems
