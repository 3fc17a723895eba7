"""Find the configuration files that a command line names (``-c gsm8k -c qwen2.5-7b -c mine.yaml``), and refuse faults
that YAML itself accepts: duplicate keys, empty sections, cyclic aliases. No package but PyYAML is imported."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.cli.other_names import usual_setting

FOLDER = Path(__file__).parents[2] / "configs"
"""Folder of the shipped configurations, next to ``qerl_pl`` in the repository and in a wheel."""
BASE_CONFIG = FOLDER / "base.yaml"
OPTIONS = ("-c", "--config")
SECTIONS = ("model", "data", "trainer")
MAY_BE_NULL = ("ckpt_path", "weights_only", "return_predictions", "verbose")
KEYS = ("run_dir", *SECTIONS, "seed_everything", "ckpt_path", "weights_only", "verbose", "return_predictions")
FOLLOWING: dict[str, str | tuple[str, ...]] = {
    "trainer.default_root_dir": "run_dir",
    "model.seed": "seed_everything",
    "data.seed": "seed_everything",
    "data.tokenizer": ("model.base", "model.base_format"),
    "model.max_prompt_tokens": "data.max_prompt_tokens",
    "model.stop": "data.stop",
}
"""Maps settings that cannot be set to the settings that they follow from."""
DATA = (".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of files that hold problems and not settings."""
MOST_VALUES = 100_000
KINDS_OF_KEYS = ("str", "int", "merge")
"""YAML tags that a key may have: text, an integer (as the name of an arm of a study), or the merge key ``<<``."""


def with_paths(arguments: Sequence[str]) -> list[str]:
    """Replace names of the package's configurations after ``-c`` by the paths of their files."""
    return with_values(arguments, OPTIONS, lambda name: str(config_path(name)))


def with_values(arguments: Sequence[str], options: Sequence[str], change: Callable[[str], str]) -> list[str]:
    """Change the values of some options in a command line, both in ``OPTION VALUE`` and in ``OPTION=VALUE``."""
    changed = list(arguments)
    for index, argument in enumerate(changed):
        option, equals, value = argument.partition("=")
        if option in options and equals:
            changed[index] = f"{option}={change(value)}"
        elif argument in options and index + 1 < len(changed):
            changed[index + 1] = change(changed[index + 1])
    return changed


def config_files(arguments: Sequence[str]) -> list[Path]:
    """List the configuration files that command-line arguments name by ``-c`` or ``--config``."""
    files = []
    for argument, following in pairwise([*arguments, None]):
        option, equals, path = str(argument).partition("=")
        if argument in OPTIONS and following is not None:
            files.append(Path(following))
        elif equals and option in OPTIONS:
            files.append(Path(path))
    return files


def config_path(name: str) -> Path:
    """Return the path of a configuration file. ``name`` is a file, or the name of a configuration of this package, with
    or without its folder, as in ``eval/gsm8k``. If a name exists in the folder eval and in another one, the file in the
    other folder is taken: ``gsm8k`` means ``tasks/gsm8k``. Raises ValueError if there is no such file or name; the
    message lists the known names."""
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
    near = get_close_matches(name, [key.rpartition("/")[2] for key in known], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(sorted(key for key in known if not key.startswith(("rewards/", "base"))))
    raise ValueError(f"{name!r} is neither a file nor a shipped configuration{hint} (there are: {listed})")


def plain_settings(section: str) -> dict[str, Any]:
    """Return the settings of a section of base.yaml that are neither lists nor mappings, by full name."""
    settings = yaml.safe_load(BASE_CONFIG.read_text(encoding="utf-8"))[section]
    return {f"{section}.{name}": value for name, value in settings.items() if not isinstance(value, list | dict)}


def check_yaml_files(arguments: Sequence[str]) -> None:
    """Check each configuration file of a command line; the argument parser reports missing ones."""
    for path in config_files(arguments):
        if path.is_file():
            check_yaml(path)


def fault_in_files(arguments: Sequence[str]) -> str | None:
    """Return an error message about the configurations that a command line names; None if they have no fault."""
    try:
        check_yaml_files(with_paths(arguments))
    except ValueError as error:
        return str(error)
    return None


def check_yaml(path: Path) -> None:
    """Raise ValueError, with file and line, for an unknown top-level key, an empty section, a setting that may not be
    given because its value follows from other settings, or a file that ``mapping_in`` cannot read."""
    if path.suffix in DATA:
        raise ValueError(
            f"{path} holds data and not settings: -c takes YAML files; name data by --data.source "
            f"datamodules.table.Table --data.source.train_path {path}, or in a YAML file (docs/extending.md)"
        )
    root = mapping_in(path, expected=f"settings as `key: value`, at the top {', '.join(KEYS)}")
    for key, value in root.value:
        if key.value not in KEYS:
            usual = usual_setting(key.value)
            near = [usual] if usual else get_close_matches(key.value, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}"
            raise ValueError(f"{_place(path, key)}: {key.value!r} is no setting; {hint}")
        if value.tag == "tag:yaml.org,2002:null" and key.value not in MAY_BE_NULL:
            raise ValueError(f"{_place(path, key)}: {key.value} has no value; give one, or leave the line out")
        if key.value in SECTIONS and isinstance(value, yaml.SequenceNode):
            raise ValueError(f"{_place(path, key)}: {key.value} is a list; expected settings as `key: value`")
        if key.value in SECTIONS and isinstance(value, yaml.MappingNode):
            yaml.SafeLoader("").flatten_mapping(value)  # puts what is merged (<<) among the section's own settings
            for inner, _ in value.value:  # whose value the argument parser would replace without a word
                if (name := f"{key.value}.{inner.value}") in FOLLOWING:
                    raise ValueError(f"{_place(path, inner)}: {follows(name)}")


def follows(name: str) -> str:
    """Return the error message for a setting of ``FOLLOWING`` that was given a value."""
    sources = FOLLOWING[name]
    return (
        f"{name} cannot be set: it follows from {sources if isinstance(sources, str) else ', '.join(sources)}; set that"
    )


def mapping_in(path: Path, *, expected: str) -> yaml.MappingNode:
    """Read a YAML file, check it and return its root node. Raises ValueError, with file and line, if it is no mapping
    (``expected`` says of what), a key is duplicate (YAML itself would take the last value), an alias is cyclic, or
    aliases of aliases stand for more than ``MOST_VALUES`` values."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{path}, line {_line(error)}: this is not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML text file: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply for a configuration") from error
    if root is None:
        raise ValueError(f"{path} is empty; expected {expected}")
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}: expected {expected}")
    _check_node(path, root, (), {})
    try:
        yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # an unknown tag, or a merge (<<) of something else than mappings
        raise ValueError(f"{path}, line {_line(error)}: {error.problem}; expected plain YAML values") from error
    except ValueError as error:  # a number or date that Python cannot read
        raise ValueError(f"{path}: a value cannot be read: {str(error).partition(';')[0][:200]}") from error
    return root


def _check_node(path: Path, node: yaml.Node, above: tuple[int, ...], sizes: dict[int, int]) -> int:
    """Check a node of a YAML file for the faults that ``mapping_in`` lists, and for keys of a kind not in
    ``KINDS_OF_KEYS``. Returns the number of the node's values, counting an alias as the values that it stands for.
    ``above`` has the ids of the nodes that contain this one, and ``sizes`` the results for nodes that were checked
    before, by their ids."""
    if id(node) in above:
        raise ValueError(f"{_place(path, node)}: an alias (*) refers to a node that contains it")
    if id(node) in sizes:
        return sizes[id(node)]
    above, size = (*above, id(node)), 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_check_node(path, entry, above, sizes) for entry in node.value)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"{_place(path, key)}: a key is a list or a mapping; expected a word")
            if (tag := key.tag.removeprefix("tag:yaml.org,2002:")) not in KINDS_OF_KEYS:
                raise ValueError(
                    f"{_place(path, key)}: YAML reads the key {key.value!r} as a {tag.rpartition(':')[2]}; "
                    "expected a word: put it in quotes"
                )
            if key.value in lines and key.value != "<<":
                first = lines[key.value]
                raise ValueError(f"{_place(path, key)}: {key.value!r} is given a second time (first in line {first})")
            lines[key.value] = key.start_mark.line + 1
            size += _check_node(path, value, above, sizes)
    if size > MOST_VALUES:
        raise ValueError(f"{_place(path, node)}: aliases (*) stand for {size} values; expected at most {MOST_VALUES}")
    sizes[id(node)] = size
    return size


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _line(error: yaml.MarkedYAMLError) -> int:
    return error.problem_mark.line + 1 if error.problem_mark else 1
