"""Build those parts of a configuration of ``fit`` that need no base model, for checks where the base cannot be read."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from datamodules.sources import PromptSource, check_problems
from qerl_pl.cli.checks import check_class_paths
from qerl_pl.common.types import Problem
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.settings.model import ModuleSettings

PARTS: dict[str, tuple[str, Any]] = {
    "settings": ("model", ModuleSettings),
    "engine": ("model.engine", RolloutEngine),
    "rewards": ("model.rewards", list[WeightedReward]),
    "source": ("data.source", PromptSource),
}
"""Section and type of each part that needs no base; "settings" are those of ``model`` but engine and rewards."""


def part_without_base(config: Mapping[str, Any], name: str) -> Any:
    """Build the part with a name in ``PARTS`` from a whole configuration, as ``fit --print_config`` prints it. Raises
    ValueError if the part cannot be built."""
    model, data = config["model"], config["data"]
    settings = {field.name: model[field.name] for field in fields(ModuleSettings) if field.name in model}
    linked = {"max_prompt_tokens": data["max_prompt_tokens"], "stop": data["stop"]}
    given = {**model, "settings": settings | linked, "source": data["source"]}
    section, kind = PARTS[name]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=kind)
    try:
        check_class_paths(given[name], section)  # before anything that a class path names is called
        return parser.instantiate(parser.parse_object({name: given[name]}))[name]
    except (TypeError, ImportError, ArgumentError) as error:
        raise ValueError(str(error)) from error


def training_problems(source: PromptSource) -> list[Problem]:
    """Read the training problems of a source; raises ValueError if it gives none or something else."""
    problems = check_problems(source.train(), type(source).__name__)
    if not problems:
        raise ValueError(f"{type(source).__name__} gives no train problems; give it more rows")
    return problems
