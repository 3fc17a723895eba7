"""Build those parts of a configuration of ``fit`` that need no base model, for checks where the base cannot be read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser

from datamodules.sources import PromptSource, check_problems
from qerl_pl.cli.checks import check_class_paths
from qerl_pl.common.types import Problem
from qerl_pl.objective import Objective
from qerl_pl.rewards.base import WeightedReward


class Parts(NamedTuple):
    """Parts of a configuration that need no base model."""

    objective: Objective
    rewards: list[WeightedReward]
    source: PromptSource

    def training_problems(self) -> list[Problem]:
        """Read the training problems; raises ValueError if the source gives none or something else."""
        problems = check_problems(self.source.train(), type(self.source).__name__)
        if not problems:
            raise ValueError(f"{type(self.source).__name__} gives no train problems; give it more rows")
        return problems


def parts_without_base(config: Mapping[str, Any]) -> Parts:
    """Build the parts from a whole configuration, as ``fit --print_config`` prints it. Raises ValueError if they cannot
    be built."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    parser.add_argument("--rewards", type=list[WeightedReward])
    parser.add_argument("--source", type=PromptSource)
    model = config["model"]
    given = {"objective": model["objective"], "rewards": model["rewards"], "source": config["data"]["source"]}
    try:
        check_class_paths(config)  # before anything that a class path names is called
        built: Any = parser.instantiate_classes(parser.parse_object(given))
    except (TypeError, ImportError, ArgumentError) as error:
        raise ValueError(str(error)) from error
    return Parts(built.objective, built.rewards, built.source)
