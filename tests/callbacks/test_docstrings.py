"""Every callback shows how a YAML file names it, and says which of its methods are Lightning's hooks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback

FOLDER = Path(__file__).parent.parent.parent / "callbacks"
CALLBACKS = [
    one
    for path in sorted(FOLDER.glob("[a-z]*.py"))
    for one in vars(import_module(f"callbacks.{path.stem}")).values()
    if inspect.isclass(one) and issubclass(one, Callback) and one.__module__ == f"callbacks.{path.stem}"
]


def test_they_are_found():
    assert len(CALLBACKS) >= 20


@pytest.mark.parametrize("cls", CALLBACKS, ids=lambda cls: cls.__name__)
def test_the_example_is_yaml_that_makes_this_callback(cls):
    text = (inspect.getdoc(cls) or "").split("Example:\n")[-1]
    [entry] = yaml.safe_load(textwrap.dedent(text))["trainer"]["callbacks+"]
    assert entry["class_path"] == f"{cls.__module__}.{cls.__qualname__}"
    assert isinstance(cls(**entry.get("init_args", {})), cls)


@pytest.mark.parametrize("cls", CALLBACKS, ids=lambda cls: cls.__name__)
def test_hooks_are_marked_as_such(cls):
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for method in tree.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("__"):
            marked = any(ast.unparse(decorator) == "override" for decorator in method.decorator_list)
            assert marked == any(hasattr(base, method.name) for base in cls.__bases__), method.name
