"""The import rules of ARCHITECTURE.md, read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MATHS = ("losses", "advantages", "correction", "covariance", "entropy_control", "objective", "published")
TORCH_ONLY = ("types", "evidence", "policy/logprobs", *(f"objective/{name}" for name in MATHS))
STDLIB_ONLY = ("seeding", "noise/schedule", "tasks/arithmetic")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def packages_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


LIBRARY = sorted((ROOT / "qerl_pl").rglob("*.py"))


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_imports_nothing_above_it(path):
    allowed = {"train"} if path.parent.name == "tools" else set()
    assert not (packages_of(path) & {"callbacks", "datamodules", "train"}) - allowed


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_the_maths_imports_torch_only(name):
    heavy = {"lightning", "transformers", "peft", "vllm", "compressed_tensors", "triton"}
    assert not packages_of(ROOT / "qerl_pl" / f"{name}.py") & heavy


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_schedules_seeds_and_tasks_need_no_package(name):
    path = ROOT / "qerl_pl" / f"{name}.py"
    assert not packages_of(path) & {"torch", "numpy", "lightning", "transformers", "peft", "vllm"}


def test_only_the_rollout_engine_imports_vllm():
    users = [path.relative_to(ROOT / "qerl_pl") for path in LIBRARY if "vllm" in packages_of(path)]
    assert all(path.parent == Path("rollout", "vllm") for path in users), users
    assert users


def test_nothing_but_the_tools_looks_inside_the_vllm_engine():
    inside = "qerl_pl.rollout.vllm."
    for path in LIBRARY:
        if path.parent.name not in ("vllm", "tools"):
            looked_at = {name for name in imports_of(path) if name.startswith(inside)} - {inside + "VLLMEngine"}
            assert not looked_at, path


def test_triton_stays_in_the_kernels():
    users = [path.relative_to(ROOT / "qerl_pl") for path in LIBRARY if "triton" in packages_of(path)]
    assert all(path.parent == Path("kernels") for path in users), users
