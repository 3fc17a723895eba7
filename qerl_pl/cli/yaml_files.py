"""Check configuration files for mistakes that YAML itself accepts: duplicate keys, empty sections, cyclic aliases."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml

from qerl_pl.cli.shipped import with_paths

KEYS = (
    "run_dir",
    "model",
    "data",
    "trainer",
    "seed_everything",
    "ckpt_path",
    "weights_only",
    "verbose",
    "return_predictions",
)
DATA = (".jsonl", ".parquet", ".csv", ".tsv")
"""Suffixes of files that hold problems and not settings."""
SECTIONS = ("model", "data", "trainer")
MOST_VALUES = 100_000
KINDS_OF_KEYS = ("str", "int", "merge")
"""Tags of YAML for keys: a word, or a number as the name of an arm, or ``<<``."""
MAY_BE_NULL = ("ckpt_path", "weights_only", "return_predictions", "verbose")


def config_files(arguments: Sequence[str]) -> list[Path]:
    """List the configuration files that command-line arguments name by ``-c`` or ``--config``."""
    found = []
    for index, argument in enumerate(arguments):
        name, equals, path = argument.partition("=")
        if argument in ("-c", "--config") and index + 1 < len(arguments):
            found.append(Path(arguments[index + 1]))
        elif equals and name in ("-c", "--config"):
            found.append(Path(path))
    return found


def check_yaml_files(arguments: Sequence[str]) -> None:
    """Check each configuration file that a command line names; a missing file is reported by the argument parser.

    Raises:
        ValueError: see ``check_yaml``.
    """
    for path in config_files(arguments):
        if path.is_file():
            check_yaml(path)


def fault_in_files(arguments: Sequence[str]) -> str | None:
    """Return what is wrong with the configurations that a command line names, as files or shipped ones, or None; this
    imports no package but PyYAML."""
    try:
        check_yaml_files(with_paths(arguments))
    except ValueError as error:
        return str(error)
    return None


def check_yaml(path: Path) -> None:
    """Refuse unknown top-level keys and empty sections, and what ``mapping_in`` refuses.

    Raises:
        ValueError: with the file and the line.
    """
    if path.suffix in DATA:
        raise ValueError(
            f"{path} holds data and not settings: -c takes YAML files; name data by --data.source "
            f"datamodules.table.Table --data.source.train_path {path}, or in a YAML file (docs/extending.md)"
        )
    root = mapping_in(path, expected=f"settings as `key: value`, at the top {', '.join(KEYS)}")
    for key, value in root.value:
        if key.value.removesuffix("+") not in KEYS:
            near = get_close_matches(key.value, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(KEYS)}"
            raise ValueError(f"{_place(path, key)}: {key.value!r} is no setting; {hint}")
        if value.tag == "tag:yaml.org,2002:null" and key.value not in MAY_BE_NULL:
            raise ValueError(f"{_place(path, key)}: {key.value} has no value; give one, or leave the line out")
        if key.value in SECTIONS and isinstance(value, yaml.SequenceNode):
            raise ValueError(f"{_place(path, key)}: {key.value} is a list; expected settings as `key: value`")


def mapping_in(path: Path, *, expected: str) -> yaml.MappingNode:
    """Read a YAML file as nodes, and refuse what YAML itself accepts: duplicate keys (it would take the last), cyclic
    aliases, and aliases of aliases that stand for more than ``MOST_VALUES`` values.

    Args:
        path: the file.
        expected: what the file should hold, for messages.

    Raises:
        ValueError: with the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: this is not YAML: {error.problem}") from error
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
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: {error.problem}; expected plain YAML values") from error
    except ValueError as error:  # a number or date that Python cannot read
        raise ValueError(f"{path}: a value cannot be read: {str(error).partition(';')[0][:200]}") from error
    return root


def _check_node(path: Path, node: yaml.Node, above: tuple[int, ...], sizes: dict[int, int]) -> int:
    """Check a node and return its number of values; ``sizes`` has those of the nodes that were checked before."""
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
            if key.tag.removeprefix("tag:yaml.org,2002:") not in KINDS_OF_KEYS:
                raise ValueError(
                    f"{_place(path, key)}: YAML reads the key {key.value!r} as a {key.tag.rpartition(':')[2]}; "
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
