"""The argument parser of the training commands: it accepts the name of a published objective (``objective: dapo``),
prints short errors and a readable ``--help``, and writes configurations in which every setting has its value."""

import re
import sys
from collections.abc import Sequence
from contextlib import chdir
from contextvars import Context
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import Namespace, get_loader, set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from qerl_pl.cli.checks import check_groups
from qerl_pl.cli.errors import in_short
from qerl_pl.cli.help_text import TITLES, HelpFormatter
from qerl_pl.objective.objective import completed

OBJECTIVE = "--model.objective"
NEGATIVE = re.compile(r"-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf(?:inity)?)$", re.IGNORECASE)


class Parser(LightningArgumentParser):
    """The command line's parser."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **named})
        self._negative_number_matcher = NEGATIVE  # argparse's takes -1e-3 and -inf for options

    def parse_args(self, *args: Any, **named: Any) -> Any:
        """Parse a command line as jsonargparse does, and keep the working directory for error messages: while
        jsonargparse reads a file, the working directory is the file's folder."""
        self._started_in = Path.cwd()
        return super().parse_args(*args, **named)

    def format_help(self, *args: Any, **named: Any) -> str:
        """Format ``--help``, with a title for each section that describes it, and with the section ``trainer`` last."""
        for group in self._action_groups:
            section = group._group_actions[0].dest if group._group_actions else ""
            if group.title == "Linked arguments":
                group.title = "settings that follow from others and are not set themselves"
            elif not str(group.title).startswith("settings that follow"):
                group.title = TITLES.get(section, section if "." in section else group.title)
        groups: Any = self._action_groups
        groups.sort(key=lambda group: group.title == TITLES["trainer"])
        return super().format_help(*args, **named)

    def dump(self, namespace: Namespace, *args: Any, **named: Any) -> str:
        """Write a configuration as YAML in which the objective's nulls are replaced by the values that its preset and
        other settings imply. Null is refused as in ``validate``, except that ``--print_config`` prints it for a setting
        without a default that is not given."""
        namespace = namespace.clone()
        check_groups(self.groups or (), namespace)
        defaults = {action.dest: action.default for action in self._actions}
        values = {key: value for key, value in namespace.items() if value is not None or defaults.get(key) is not None}
        # in another context, because --print_config switches all checks off in its own
        Context().run(self._refuse_nulls, Namespace(values), skip_required=True)
        for key in [key for key, value in namespace.items(branches=True) if isinstance(value, Namespace)]:
            if key.endswith("model.objective"):
                namespace[key] = Namespace(completed(vars(namespace[key])))
        return super().dump(namespace, *args, **named)

    def validate(self, *args: Any, **named: Any) -> None:
        """Check all values, and accept null only where a setting's type has it. In jsonargparse None stands for a value
        that is not given, so values are checked a second time with another object in its place."""
        super().validate(*args, **named)
        if self._subcommands_action:  # not the parser of a subcommand, or of a class in the settings
            self._refuse_nulls(*args, **named)

    def _refuse_nulls(self, *args: Any, **named: Any) -> None:
        set_parsing_settings(unset_sentinel=True)
        try:
            super().validate(*args, **named)
        finally:
            set_parsing_settings(unset_sentinel=False)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with a short error message; jsonargparse's would begin with a hundred lines of usage."""
        if not self.exit_on_error:
            super().error(message, ex)
        commands = self._subcommands_action.choices if self._subcommands_action else {}
        named = next((commands[word] for word in sys.argv[1:2] if word in commands), self)
        parser = getattr(ex, "subcommand_parser", None) or named  # errors about files do not have it
        keys = [action.dest for action in parser._actions]
        with chdir(self._started_in):
            self.exit(2, f"error: {in_short(message, keys=keys, arguments=sys.argv[1:])}\n")


def spelt_out(arguments: Sequence[str]) -> list[str]:
    """Rewrite ``--model.objective WORD`` to ``--model.objective.preset WORD``."""
    spelt: list[str] = []
    for argument in arguments:
        option, equals, word = argument.partition("=")
        if spelt[-1:] == [OBJECTIVE] and argument.isidentifier():
            spelt[-1:] = [f"{OBJECTIVE}.preset", argument]
        elif option == OBJECTIVE and equals and word.isidentifier():
            spelt.append(f"{OBJECTIVE}.preset={word}")
        else:
            spelt.append(argument)
    return spelt


@cache
def accept_words() -> None:
    """Make jsonargparse read ``objective: WORD`` as ``objective: {preset: WORD}``, leave a mapping with ``class_path``
    for a parameter without a type (or Any) as it is, and write a default that is the member of an enum by its value."""
    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    load = get_loader("yaml")
    set_loader("yaml", lambda text: _with_presets(load(text)), exceptions=(yaml.YAMLError,))
    yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def _with_presets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    values = {key: _with_presets(entry) for key, entry in value.items()}
    word = values.get("objective")
    return values | {"objective": {"preset": word}} if isinstance(word, str) and word.isidentifier() else values
