"""Generate English word problems, on which a small policy can improve."""

from __future__ import annotations

from typing import Literal

from qerl_pl.common.types import Problem
from qerl_pl.tasks.quantities import Split, check_split
from qerl_pl.tasks.word_problems import WordProblem, check_operations, draw_sets


class WordProblems:
    """A source of generated word problems of 2 to 14 arithmetic operations (qerl_pl/tasks/word_problems.py). No two of
    the training, validation and reach sets share a structure: how quantities are computed from one another.

    A reward sees ``operations``, ``structure`` and ``id`` as ``prompt.row``.

    Args:
        seed: seed of the draw. Keep the default in runs that are compared; ``seed_everything`` does not change the
            problems, only their order.
        num_train: number of training problems.
        num_validation: number of validation problems.
        operations: fewest and most operations of a training or validation problem.
        validates: set that provides the validation problems: "validation" or "reach", which has more operations.
        reach_operations: fewest and most operations of a problem of the reach set.

    Raises:
        ValueError: a number is below 1, the set is unknown, or operations are outside of 2 to 14.
    """

    def __init__(
        self,
        seed: int = 0,
        num_train: int = 8192,
        num_validation: int = 512,
        operations: tuple[int, int] = (8, 12),
        validates: Literal["validation", "reach"] = "validation",
        reach_operations: tuple[int, int] = (12, 14),
    ) -> None:
        for name, value in (("num_train", num_train), ("num_validation", num_validation)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        for each in (operations, reach_operations):
            check_operations(each)
        check_split(validates)
        self.seed = seed
        self.num_train = num_train
        self.num_validation = num_validation
        self.operations = operations
        self.validates: Split = validates
        self.reach_operations = reach_operations

    def train(self) -> list[Problem]:
        """Return the training problems."""
        return self._draw("train")

    def validation(self) -> list[Problem]:
        """Return the validation problems."""
        return self._draw(self.validates)

    def _draw(self, split: Split) -> list[Problem]:
        sizes: dict[Split, int] = {"validation": self.num_validation, "reach": self.num_validation}
        if split == "train":
            sizes["train"] = self.num_train
        operations: dict[Split, tuple[int, int]] = {
            "train": self.operations,
            "validation": self.operations,
            "reach": self.reach_operations,
        }
        sets = draw_sets(seed=self.seed, sizes=sizes, operations=operations)
        return [_problem(problem) for problem in sets[split]]


def _problem(problem: WordProblem) -> Problem:
    row = {"id": problem.identity, "operations": problem.num_operations, "structure": problem.structure}
    return Problem(problem.question, str(problem.answer), row=row)
