"""Make the documentation's pages of settings and commands from type hints, docstrings and ``--help``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import typing
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import yaml
from lightning.pytorch import Callback, Trainer

from datamodules.prompts import PromptDataModule
from datamodules.sources import PromptSource
from docs.griffe_classes import EXAMPLE, block
from qerl_pl.__main__ import COMMANDS, TRAINING, main
from qerl_pl.cli.help_text import words
from qerl_pl.cli.parser import Parser
from qerl_pl.cli.yaml_files import BASE_CONFIG
from qerl_pl.module import QeRLModule
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.settings.trainer import UNUSABLE
from qerl_pl.study.study_file import Study

INTRODUCTION = """# Settings

Every setting of a configuration with its type, its default and its meaning, made from the type hints and docstrings
that the command line itself reads. How files combine and what is often changed is in
[Configurations](../configs/README.md). A class is named by `class_path` and takes its settings under `init_args`.
"""
_UNPRINTABLE = re.compile(r"[^\n -~]")
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"
Kind = Callable[[Any], bool]


def settings() -> str:
    """Make the page of settings: ``model``, ``data``, and every class of this repository that YAML may name."""
    nested: dict[str, Any] = {}
    text = INTRODUCTION
    text += f"\n## model\n\n{_meaning(QeRLModule)}\n\n{table(QeRLModule, 'model.', nested)}"
    text += f"\n## data\n\n{_meaning(PromptDataModule)}\n\n{table(PromptDataModule, 'data.', nested)}"
    text += "\n## trainer\n\nSettings of Lightning, with the defaults of `configs/base.yaml`.\n\n"
    base = yaml.safe_load(BASE_CONFIG.read_text())["trainer"]
    defaults = {
        name: "see configs/base.yaml" if isinstance(value, dict | list) else value for name, value in base.items()
    }
    meanings = {name: f"leave it at {json.dumps(usable)}: {instead}." for name, (usable, instead) in UNUSABLE.items()}
    text += table(Trainer, "trainer.", {}, defaults=defaults, meanings=meanings)
    nested["WeightedReward"] = WeightedReward
    for title, place, package, kind in (
        ("Engines", "model.engine", "qerl_pl.rollout", _is_engine),
        ("Rewards", "reward", "qerl_pl.rewards", _is_reward),
        ("Data sources", "data.source", "datamodules", _is_source),
        ("Callbacks", "trainer.callbacks", "callbacks", _is_callback),
    ):
        text += f"\n## {title}\n\nClasses for `{place}`.\n"
        text += "".join(_section(path, value, nested) for path, value in found_in(package, kind))
    text += "\n## Mappings\n\nValues of settings above that are mappings of their own.\n"
    for name in nested:  # a mapping may add others
        text += _section(name, nested[name], {})
    return text + f"\n## Studies\n\nThe file that `study` runs. {_meaning(Study)}\n\n{table(Study, '', {})}"


def commands() -> str:
    """Make the page of commands."""
    text = "# Commands\n\n`qerl COMMAND`, or `python -m qerl_pl COMMAND` in the repository. Training and evaluation "
    text += "take every [setting](settings.md) as well, as `--KEY VALUE`. This is what `--help` prints.\n"
    for name, what in (TRAINING | COMMANDS).items():
        as_fit = name in TRAINING and name != "fit"
        printed = "Options and settings are those of `fit`." if as_fit else f"```text\n{help_of(name)}\n```"
        text += f"\n## {name}\n\n{what[0].upper()}{what[1:]}.\n\n{printed}\n"
    return text


def help_of(command: str) -> str:
    """Return the output of a command's ``--help``, without settings, which have a page of their own."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
        patch.dict("os.environ", COLUMNS="90"),
        patch.object(sys, "argv", ["qerl"]),
    ):
        main([command, "--help"])
    parts = _UNPRINTABLE.sub("", printed.getvalue()).strip().split("\n\n")
    if command in TRAINING:
        parts = [part for part in parts if not re.search(r"--(trainer|model|data)\b", part)]
    return "\n\n".join(parts)


def found_in(package: str, kind: Kind) -> Iterator[tuple[str, Any]]:
    """Yield import path and object of every public class or function of a kind in a package's modules."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for name, value in list(vars(importlib.import_module(module.name)).items()):
            here = str(getattr(value, "__module__", "")).startswith(module.name)
            public = here and not name.startswith("_") and not vars(value).get("_is_protocol")
            if public and callable(value) and kind(value):
                yield f"{module.name}.{name}", value


def table(
    value: Any,
    prefix: str,
    nested: dict[str, Any],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    meanings: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Make a table of the settings of a class or function, as the command line's parser reads them.

    Args:
        value: the class or function.
        prefix: beginning of every key, e.g. ``model.``.
        nested: dict to which dataclasses that are values of settings are added, by name.
        defaults, meanings: by name of the setting, in place of the constructor's and the docstring's.
    """
    parser = Parser()
    add = parser.add_class_arguments if isinstance(value, type) else parser.add_function_arguments
    add(value, fail_untyped=False)
    rows = ""
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if hint is None or action.default == SUPPRESS or action.dest in ("prompts", "completions"):
            continue  # no setting: an option --KEY.help, or an argument of a reward's call
        nested.update({part.__name__: part for part in _inside(hint) if is_dataclass(part)})  # pyright: ignore
        default = "required" if action.required else f"`{_yaml(defaults.get(action.dest, action.default))}`"
        meaning = meanings.get(action.dest, action.help or "")
        cells = (f"`{prefix}{action.dest}`", words(hint, shown=_shown), default, meaning)
        rows += "|" + "|".join(f" {_cell(cell)} " for cell in cells) + "|\n"
    return HEAD + rows if rows else "No settings.\n"


def _shown(value: Any) -> str:
    """Write a type's name, with a link to its section, or a value of a Literal."""
    if not isinstance(value, type) and typing.get_origin(value) is None and not hasattr(value, "__name__"):
        return f"`{value}`"
    name = getattr(value, "__name__", str(value))
    return f"[{name}](#{name.lower()})" if is_dataclass(value) else name


def _inside(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _inside(part)


def _section(path: str, value: Any, nested: dict[str, Any]) -> str:
    *package, name = path.split(".")
    named = f"`class_path: {path}`\n\n" if package else ""
    example = EXAMPLE.search(inspect.getdoc(value) or "")
    shown = f"\n{block(example[1])}" if example else ""
    return f"\n### {name}\n\n{named}{_meaning(value)}\n\n{table(value, '', nested)}{shown}"


def _meaning(value: Any) -> str:
    return _escaped(re.split(r"\n+(?:Args|Attributes|Returns|Raises|Example):", inspect.getdoc(value) or "")[0])


def _yaml(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()).replace("|", "\\|"))


def _escaped(text: str) -> str:
    """Escape text outside of code that would be read as an HTML element, such as <answer>."""
    return re.sub(r"(`+[^`]*`+)|<", lambda match: match[1] or "&lt;", text)


def _members(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")}


def _is_engine(value: Any) -> bool:
    return _members(RolloutEngine) <= set(dir(value))


def _is_source(value: Any) -> bool:
    made = inspect.get_annotations(value).get("return")  # of a function that makes a source
    return any(_members(PromptSource) <= set(dir(each)) for each in (value, made))


def _is_reward(value: Any) -> bool:
    call = vars(value).get("__call__", value)
    names = inspect.signature(call).parameters if inspect.isfunction(call) else ()
    return [name for name in names if name != "self"] == ["prompts", "completions"]


def _is_callback(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Callback)
