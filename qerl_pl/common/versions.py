"""Versions of packages with which this release was tested and measured."""

from __future__ import annotations

TESTED = {
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7", "3.9"),
    "transformers": ("5.17", "5.19"),
    "vllm": ("0.32.0",),
}
"""Tested versions by package, in ascending order; "2.11" stands for 2.11.0, 2.11.1 and so on.

Engine tests have run with each version of vLLM listed here, on a CPU and on a GPU, which `docs/results/support.jsonl`
records. ``tests/test_dependencies.py`` checks that pyproject.toml, the Makefile and docs/install.md name the same.
"""


def requirement(package: str) -> str:
    """Return the requirement, as pip reads it, that admits the tested versions of a package: the only one, or the range
    from the first to the last."""
    first, last = TESTED[package][0], TESTED[package][-1]
    return f"{package}=={first}" if first == last else f"{package}>={first},<={last}"
