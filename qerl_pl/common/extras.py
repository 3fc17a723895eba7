"""Packages that only some configurations need, and the command that installs each."""

from __future__ import annotations

import re

from qerl_pl.common.versions import requirement

EXTRAS = {
    "bitsandbytes": "bitsandbytes>=0.50",
    "datasets": "datasets>=4",
    "gguf": "gguf>=0.17",
    "humming": "humming-kernels==0.1.17",
    "liger_kernel": "liger-kernel>=0.8.5,<0.9",
    "mlflow": "mlflow-skinny>=2.14",
    "vllm": requirement("vllm"),
    "wandb": "wandb>=0.19",
}
"""Maps the name by which a package is imported to its requirement in an optional dependency group (extra) of
pyproject.toml."""


def not_installed(module: str) -> str | None:
    """Say which command installs an optional package.

    Args:
        module: name of the module that could not be imported; submodules after a dot are ignored.

    Returns:
        One sentence with the command; None if the module belongs to no optional dependency group (extra) of qerl-pl.
    """
    requirement = EXTRAS.get(module.partition(".")[0])
    if requirement is None:
        return None
    name = re.split(r"[^\w-]", requirement)[0]
    return f"{name} is not installed; install it: pip install '{requirement}'"
