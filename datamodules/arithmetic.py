"""Generate multi-step arithmetic, the problems of the quickstart."""

from __future__ import annotations

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Problem
from qerl_pl.tasks.arithmetic import distinct_expressions, question, value


class Arithmetic:
    """Problems such as "7+5-3+8=?"; training and validation share no problem, whatever the seeds
    (qerl_pl/tasks/arithmetic.py).

    Args:
        seed: seed of the draw.
        num_train: number of distinct training problems, at most 28 709.
        num_validation: number of distinct validation problems, at most 3 226.
    """

    def __init__(self, seed: int = 0, num_train: int = 8192, num_validation: int = 512) -> None:
        self.seed = seed
        self.num_train = num_train
        self.num_validation = num_validation

    def train(self) -> list[Problem]:
        """Return the training problems."""
        return _problems(self.num_train, seed=derive_seed(self.seed, "arithmetic/train"), validation=False)

    def validation(self) -> list[Problem]:
        """Return the validation problems."""
        return _problems(self.num_validation, seed=derive_seed(self.seed, "arithmetic/validation"), validation=True)


def _problems(num: int, *, seed: int, validation: bool) -> list[Problem]:
    expressions = distinct_expressions(num, seed=seed, validation=validation)
    return [Problem(question(expression), str(value(expression))) for expression in expressions]
