"""Build the parts of a configuration that need no base: data source, rewards and objective, for checks without
weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from datamodules.decontaminate import hold_out, without_shared
from datamodules.sources import PromptSource
from qerl_pl.cli.parser import Parser
from qerl_pl.common.types import Problem, Prompt
from qerl_pl.objective import Objective
from qerl_pl.rewards.base import WeightedReward, ready_rewards


class Parts:
    """The data source, the rewards and the objective of the whole parsed configuration of ``fit``, without its base.

    Raises:
        ValueError: the source or a reward cannot be built.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, model = config, config["model"]
        parser = Parser()
        parser.add_argument("--source", type=PromptSource)
        parser.add_argument("--rewards", type=list[WeightedReward])
        parser.add_argument("--objective", type=Objective)
        settings = {"source": config["data"]["source"], "rewards": model["rewards"], "objective": model["objective"]}
        built = parser.instantiate_classes(parser.parse_object(settings))
        self.source: PromptSource = built["source"]
        self.objective: Objective = built["objective"]
        self.rewards = ready_rewards(built["rewards"], max_tokens=model["sampling"]["max_tokens"])

    @cached_property
    def problems(self) -> list[Problem]:
        """Training problems, without those that validation uses."""
        train, _ = without_shared(self.source.train(), self.source.validation())
        return hold_out(train, self.config["data"]["held_out"])[0]

    @property
    def num_validation(self) -> int:
        """Number of problems that validation uses.

        Raises:
            ValueError: there are none.
        """
        num = self.config["data"]["held_out"] or len(self.source.validation())
        if not num:
            raise ValueError("the source gives no validation problems; give it more rows, or another share of them")
        return num

    @property
    def prompts(self) -> list[Prompt]:
        """The first training problems as rewards get them, at most 32, but without tokens and chat template."""
        prompts = []
        for problem in self.problems[:32]:
            messages = problem.messages or ({"role": "user", "content": problem.question},)
            prompts.append(Prompt((), problem.answer, text=problem.question, messages=messages, row=problem.row))
        return prompts
