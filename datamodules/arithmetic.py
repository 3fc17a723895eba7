"""Generate arithmetic problems with several operands, which the quickstart trains on."""

from dataclasses import dataclass

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Problem
from qerl_pl.tasks.arithmetic import distinct_expressions, question, value


@dataclass(frozen=True)
class Arithmetic:
    """A source of problems such as "7+5-3+8=?". No training problem is a validation problem, whatever the seed.

    Args:
        seed: seed of the draw.
        num_train: number of distinct training problems, at most 28 709.
        num_validation: number of distinct validation problems, at most 3 226.
    """

    seed: int = 0
    num_train: int = 8192
    num_validation: int = 512

    def train(self) -> list[Problem]:
        return self._problems("train", self.num_train)

    def validation(self) -> list[Problem]:
        return self._problems("validation", self.num_validation)

    def _problems(self, side: str, num: int) -> list[Problem]:
        seed = derive_seed(self.seed, f"arithmetic/{side}")
        expressions = distinct_expressions(num, seed=seed, validation=side == "validation")
        return [Problem(question(expression), str(value(expression))) for expression in expressions]
