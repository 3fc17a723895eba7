"""The configurations that come with the program, found by name: ``-c gsm8k -c qwen2.5-7b -c nvfp4_aqn``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs"
"""Beside the package, in the repository and in an installation."""
BASE_CONFIG = FOLDER / "base.yaml"
OPTIONS = ("-c", "--config")


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Replace the name of a shipped configuration by its path wherever a command line has one after ``-c``.

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


def config_path(name: str) -> Path:
    """Find a configuration: a file, or the name of a shipped one.

    A name may begin with its folder, ``eval/gsm8k``. Without one, an evaluation is the last that is thought of:
    ``gsm8k`` is ``tasks/gsm8k``.

    Raises:
        ValueError: there is neither; lists the names.
    """
    if Path(name).is_file():
        return Path(name)
    known = {str(path.relative_to(FOLDER).with_suffix("")): path for path in FOLDER.rglob("*.yaml")}
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
