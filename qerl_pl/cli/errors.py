"""What the command line says where jsonargparse would print a page: the value, what was expected, the nearest key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.cli.yaml_files import config_files

MOST_LINES = 5
GENERIC = ("Not a valid subclass", "Expected a ", "a class path", "a dict with", "Errors:")
"""What jsonargparse says of the types that a value is not meant to be."""


def in_short(message: str, *, keys: Iterable[str], arguments: Sequence[str]) -> str:
    """Shorten an error of the command line's parser.

    Args:
        message: what jsonargparse says.
        keys: every setting there is, with dots.
        arguments: the command line; its YAML files are looked through for a key that is not known.

    Returns:
        At most five lines; the message itself where nothing in it is known to be superfluous.
    """
    unknown = re.search(r"(?:does not accept option '|unrecognized arguments: --|Key )'?([\w.+]+)", message)
    if unknown and ("accept" in message or "unrecognized" in message):
        return _unknown_key(unknown[1].rstrip("+"), keys, arguments)
    if "Subtypes:" in message:
        return of_the_value(message)
    return "\n".join(line[:300] for line in message.splitlines()[:MOST_LINES])


def of_the_value(message: str) -> str:
    """What is wrong with a value that may have several types, without what jsonargparse says of the types themselves.

    A message of another kind is returned as it is.
    """
    if "Subtypes:" not in message:
        return message
    errors = message.partition("Errors:")[2].partition("Given value type:")[0]
    causes = [" ".join(cause.split()) for cause in re.split(r"^\s*- ", errors, flags=re.MULTILINE)]
    said = [cause for cause in causes if cause and not cause.startswith(GENERIC)]
    subject = re.search(r'[Pp]arser key "([^"]+)"', message)
    place = f"{subject[1]}: " if subject else ""
    return "\n".join(place + cause[:300] for cause in dict.fromkeys(said[:MOST_LINES])) or message


def _unknown_key(key: str, keys: Iterable[str], arguments: Sequence[str]) -> str:
    places = [str(path) for path in config_files(arguments) if _has(_settings(path), key.split("."))]
    where = f" (in {', '.join(places)})" if places else ""
    near = get_close_matches(key, list(keys), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "--help lists those that there are"
    return f"there is no setting {key}{where}; {hint}"


def _settings(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None


def _has(settings: Any, names: Sequence[str]) -> bool:
    for name in names:
        if not isinstance(settings, Mapping):
            return False
        found = next((key for key in (name, f"{name}+") if key in settings), None)
        if found is None:
            return False
        settings = settings[found]
    return True
