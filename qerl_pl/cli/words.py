"""Let a configuration name an objective's preset alone: ``objective: dapo`` in YAML, or ``--model.objective dapo``."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from qerl_pl.cli.errors import in_short
from qerl_pl.cli.help_text import HelpFormatter, in_order
from qerl_pl.objective.objective import completed

OPTION = "--model.objective"


class Parser(LightningArgumentParser):
    """The command line's parser; it writes configurations (``--print_config``, config.yaml) with all settings of the
    objective filled in."""

    def __init__(self, **named: Any) -> None:
        named.setdefault("formatter_class", HelpFormatter)
        super().__init__(**named)

    def format_help(self, *args: Any, **named: Any) -> str:
        """Format ``--help`` with the sections in the order of ``help_text.in_order``."""
        groups = self._action_groups
        self._action_groups = in_order(groups)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().format_help(*args, **named)
        finally:
            self._action_groups = groups

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Dump a configuration as jsonargparse does, after replacing nulls in the objective by the preset's values.

        Raises:
            ValueError: a setting of the objective contradicts its preset.
        """
        namespace = namespace.clone()
        for key in [key for key, value in namespace.items(branches=True) if isinstance(value, Namespace)]:
            if key.endswith("model.objective"):
                namespace[key] = Namespace(completed(vars(namespace[key])))
        return super().dump(namespace, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with a short error, in place of jsonargparse's, which begins with a hundred lines of usage.

        Raises:
            SystemExit: with status 2.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        keys = [action.dest for action in parser._actions]
        self.exit(2, f"error: {in_short(message, keys=keys, arguments=sys.argv[1:])}\n")


def spelt_out(arguments: list[str]) -> list[str]:
    """Rewrite ``--model.objective WORD`` to ``--model.objective.preset WORD``.

    A negative number is joined to its option, because argparse reads ``--x -1e-3`` as two options.
    """
    found = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, word = argument.partition("=")
        if name == OPTION and equals and word.isidentifier():
            found[index] = f"{OPTION}.preset={word}"
        elif argument == OPTION and index + 1 < len(arguments) and arguments[index + 1].isidentifier():
            found[index] = f"{OPTION}.preset"
    for index in range(len(found) - 1, 0, -1):
        if found[index - 1].startswith("--") and "=" not in found[index - 1] and _is_below_zero(found[index]):
            found[index - 1 : index + 1] = [f"{found[index - 1]}={found[index]}"]
    return found


def _is_below_zero(text: str) -> bool:
    try:
        return text.startswith("-") and float(text) <= 0
    except ValueError:
        return False


@cache
def accept_words() -> None:
    """Make jsonargparse read ``objective: WORD`` in YAML as ``objective: {preset: WORD}``, and make no object where a
    parameter has no type that says which; a second call does nothing."""
    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    load = get_loader("yaml")
    set_loader("yaml", lambda text: _spelt_out(load(text)), exceptions=(yaml.YAMLError,))


def _spelt_out(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    found = {key: _spelt_out(entry) for key, entry in value.items()}
    word = found.get("objective")
    return found | {"objective": {"preset": word}} if isinstance(word, str) and word.isidentifier() else found
