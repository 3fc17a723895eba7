"""Every package that the product imports itself is one that pyproject.toml asks for."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = {"qerl_pl", "callbacks", "datamodules", "train", "tests", "configs"}
OPTIONAL = {"vllm", "humming", "cuda", "liger_kernel"}
"""Installed by the extra "gpu"; the CPU build of vLLM by the Makefile."""


def imported() -> set[str]:
    found: set[str] = set()
    files = [
        ROOT / "train.py",
        *(path for top in ("qerl_pl", "callbacks", "datamodules") for path in (ROOT / top).rglob("*.py")),
    ]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - OURS - set(sys.stdlib_module_names) - {"__future__"}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def test_every_imported_package_is_declared():
    distributions = packages_distributions()
    missing = {
        package: distributions.get(package)
        for package in imported() - OPTIONAL
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in distributions.get(package, [])} & declared()
    }
    assert not missing
