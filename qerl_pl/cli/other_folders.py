"""Explain errors about relative paths and modules that are in the folder of a configuration file, or in one above it,
and not in the working directory, in which they are searched for."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from qerl_pl.cli.yaml_files import BASE_CONFIG, config_files

SEARCHED = re.compile(r"(\S+) \(searched in ")
"""Matches a path that does not exist, as ``common.files.searched`` writes it into error messages."""


def path_elsewhere(message: str, arguments: Sequence[str]) -> str:
    """Return a hint for an error message that has a path from ``common.files.searched``, if the path exists near a
    configuration file of the command line ``arguments``; otherwise ""."""
    path = SEARCHED.search(message)
    folder = path and _folder_with([path[1]], arguments)
    return f". {path[1]} is in {folder}: start the command there, or give the whole path" if path and folder else ""


def module_elsewhere(module: str, arguments: Sequence[str]) -> str:
    """Return a hint for an error message about a module that cannot be imported, if the module is near a configuration
    file of the command line ``arguments``; otherwise ""."""
    name = module.partition(".")[0]
    folder = _folder_with([f"{name}.py", f"{name}/__init__.py"], arguments)
    return f". {name} is in {folder}: start the command there, or set PYTHONPATH={folder}" if folder else ""


def other_modules(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each imported module that a configuration file of the command line ``arguments`` names and
    that is not the module of the same name in the configuration file's folder."""
    for file in config_files(arguments):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        settings = "\n".join(line.partition("#")[0] for line in lines)
        for beside in sorted(file.absolute().parent.glob("*.py")):
            taken = getattr(sys.modules.get(beside.stem), "__file__", None)
            named = re.search(rf"(?<![\w./-]){re.escape(beside.stem)}\.[A-Za-z_]", settings)
            if taken and named and os.path.realpath(taken) != os.path.realpath(beside):
                here = beside.parent == Path.cwd()
                yield (
                    f"{file} names the module {beside.stem}, which is imported from {taken} and not from {beside}; to "
                    f"use the latter, {'rename it' if here else f'start the command in {beside.parent}'}"
                )


def _folder_with(names: Sequence[str], arguments: Sequence[str]) -> Path | None:
    """Find a folder that has one of the files or folders ``names``, among the folders of the configuration files and
    those above them; the last file on the command line comes first."""
    files = [Path(os.path.abspath(file)) for file in reversed(config_files(arguments)) if file != BASE_CONFIG]
    folders = (folder for file in files for folder in file.parents)
    return next((folder for folder in folders if any((folder / name).exists() for name in names)), None)
