"""Find shipped configurations by name: ``-c gsm8k -c qwen2.5-7b -c nvfp4_aqn``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "configs"
"""Folder of the shipped configurations, next to the package ``qerl_pl`` in the repository and in an installed wheel."""
BASE_CONFIG = FOLDER / "base.yaml"
OPTIONS = ("-c", "--config")


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Replace names of shipped configurations after ``-c`` in a list of command-line arguments by the paths of their
    files.

    Raises:
        ValueError: see ``config_path``.
    """
    found = list(arguments)
    for index, argument in enumerate(found):
        option, equals, name = argument.partition("=")
        if option in OPTIONS and equals:
            found[index] = f"{option}={config_path(name)}"
        elif argument in OPTIONS and index + 1 < len(found):
            found[index + 1] = str(config_path(found[index + 1]))
    return found


def plain_settings(section: str) -> dict[str, Any]:
    """Return the settings of a section of base.yaml that are single values, by their full names, such as
    ``trainer.devices``."""
    settings = yaml.safe_load(BASE_CONFIG.read_text(encoding="utf-8"))[section]
    return {f"{section}.{name}": value for name, value in settings.items() if not isinstance(value, list | dict)}


def config_path(name: str) -> Path:
    """Return the path of a configuration, which is given as a file or as the name of a shipped configuration.

    A name may contain its folder, as in ``eval/gsm8k``. A name without a folder prefers every other folder to eval/, so
    ``gsm8k`` means ``tasks/gsm8k``.

    Raises:
        ValueError: there is neither a file nor a configuration of that name; the message lists the known names.
    """
    if Path(name).is_file():
        return Path(name)
    known = {
        str(path.relative_to(FOLDER).with_suffix("")): path
        for path in FOLDER.rglob("*.yaml")
        if path.parent.name != "studies"  # those are for the command `study`
    }
    same = [key for key in known if name in (key, key.rpartition("/")[2])]
    if same:
        return known[min(same, key=lambda key: key.startswith("eval/"))]
    if name.endswith((".yaml", ".yml")):
        raise ValueError(f"there is no file {name}")
    bare = [key.rpartition("/")[2] for key in known]
    near = get_close_matches(name, bare, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(sorted(key for key in known if not key.startswith(("rewards/", "base"))))
    raise ValueError(f"{name!r} is neither a file nor a shipped configuration{hint} (there are: {listed})")
