"""The import rules of ARCHITECTURE.md, checked against the source."""

import ast
import re
import subprocess
import warnings
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MATHS = ("losses", "advantages", "correction", "custom", "objective", "resolved")
TORCH_ONLY = ("common/types", "policy/evidence", "policy/logprobs", *(f"objective/{name}" for name in MATHS))
STDLIB_ONLY = ("common/seeding", "noise/schedule", "tasks/arithmetic")


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Find every module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@cache
def strings_of(path: Path) -> frozenset[str]:
    """Find every string literal of a file that names something of the package qerl_pl."""
    return frozenset(
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("qerl_pl.")
    )


def packages_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


LIBRARY = sorted((ROOT / "qerl_pl").rglob("*.py"))
PRODUCT = [*LIBRARY, *(path for folder in ("callbacks", "datamodules") for path in (ROOT / folder).glob("*.py"))]
ARROW_UP = {("qerl_pl/study/", "qerl_pl/__main__.py")}
"""(Importing entry, imported entry) of the only imports that go up in ARCHITECTURE's table."""


def floors() -> list[str]:
    """List the packages and files of ARCHITECTURE's table, from top to bottom."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Packages")[2].partition("\n\n- ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in row.strip(" `").split("`, `")]


def floor_of(path: Path) -> str | None:
    """Return the entry of the table of packages in ARCHITECTURE.md to which a file belongs: the longest entry with
    which the file's path begins. None if the path begins with no entry."""
    name = str(path.relative_to(ROOT))
    return max((entry for entry in floors() if name.startswith(entry)), key=len, default=None)


def test_every_file_has_a_floor_and_every_floor_a_file():
    without = {str(path.relative_to(ROOT)) for path in PRODUCT if floor_of(path) is None}
    assert without == {"qerl_pl/__init__.py"}
    assert {floor_of(path) for path in (*PRODUCT, ROOT / "train.py")} - {None} == {*floors()}


def test_imports_only_go_down_the_table_of_the_architecture():
    order = {entry: index for index, entry in enumerate(floors())}
    for path in (*PRODUCT, ROOT / "train.py"):
        here = floor_of(path)
        for name in imports_of(path):
            place = ROOT / name.replace(".", "/")
            files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()]
            there = floor_of(files[0]) if files else None
            if here and there and here != there and (here, there) not in ARROW_UP:
                assert order[here] < order[there], f"{path.relative_to(ROOT)} imports {name}, which is above it"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_imports_nothing_above_it(path):
    """The package qerl_pl can be used without the folders next to it: only its command line imports callbacks and data
    modules, and nothing in it imports the script train.py."""
    allowed = {"callbacks", "datamodules"} if path.parent.name == "cli" else set()
    assert not (packages_of(path) & {"callbacks", "datamodules", "train"}) - allowed


def test_only_commands_import_the_command_line():
    users = {path for path in LIBRARY if any(name.startswith("qerl_pl.cli") for name in imports_of(path))}
    assert {path.parent.name for path in users} <= {"cli", "tools"}, users


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
    assert {path.parent for path in users} == {Path("rollout", "vllm"), Path("hopper")}, users


def test_nothing_but_the_tools_looks_inside_the_vllm_engine():
    inside = "qerl_pl.rollout.vllm."
    for path in LIBRARY:
        if path.parent.name not in ("vllm", "tools", "hopper"):
            looked_at = {name for name in imports_of(path) if name.startswith(inside)} - {inside + "VLLMEngine"}
            assert not looked_at, path


def test_triton_stays_in_the_kernels():
    users = [path.relative_to(ROOT / "qerl_pl") for path in LIBRARY if "triton" in packages_of(path)]
    assert all(path.parent in (Path("kernels"), Path("hopper")) for path in users), users


def test_one_module_is_the_door_to_the_folder_that_may_be_left_out():
    strings = ((path, value) for path in PRODUCT for value in strings_of(path))
    users = {path for path, value in strings if re.fullmatch(r"qerl_pl\.hopper[\w.:]*", value)}
    users |= {path for path in PRODUCT if any(name.startswith("qerl_pl.hopper") for name in imports_of(path))}
    outside = {path.relative_to(ROOT) for path in users if path.parent.name != "hopper"}
    assert outside == {Path("qerl_pl", "native.py")}


TOP_LEVEL = {"qerl_pl", "callbacks", "datamodules", "configs", "tests", "docs", "train.py", "pyproject.toml"}


def test_long_product_files_are_named_in_a_warning():
    sources = [
        path for path in (ROOT / "qerl_pl").rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".js", ".css", ".html")
    ]
    for path in {*sources, *PRODUCT, ROOT / "train.py"}:
        lines = len(path.read_text().splitlines())
        if lines > 330:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines; does it hold one concept?", stacklevel=1)


def test_functions_fit_in_a_head():
    for path in [*PRODUCT, ROOT / "train.py"]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{path}: {node.name}"


def own_imports(path: Path) -> set[Path]:
    """Return the product's files that a file imports, at its top or inside functions, or that it names in a string such
    as "qerl_pl.module", by which they can be imported later."""
    strings = strings_of(path)
    names = imports_of(path) | strings | {name.rpartition(".")[0] for name in strings}
    files = {ROOT / (name.replace(".", "/") + ".py") for name in names if name}
    return {file for file in files if file in PRODUCT and file != path}


def test_no_file_imports_itself_through_others_not_even_in_a_function_or_by_a_string():
    graph = {path: own_imports(path) for path in PRODUCT}
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, " -> ".join(str(each.relative_to(ROOT)) for each in (*above, path))
        if path not in done:
            for other in sorted(graph[path]):
                visit(other, (*above, path))
            done.add(path)

    for path in PRODUCT:
        visit(path, ())


def test_the_top_level_is_the_design_cards():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = {name.split("/")[0] for name in tracked}
    ordinary = {
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "requirements-vllm-cpu.txt",
        "mkdocs.yml",
        "CHANGELOG.md",
        "CITATION.cff",
        "Dockerfile",
    }
    assert names - TOP_LEVEL <= ordinary | {name for name in names if name.startswith(".")}


def test_test_files_have_names_of_their_own():
    """pytest imports test files by their file names without folders, and refuses to collect two files of the same
    name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
