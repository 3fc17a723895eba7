"""Config files that change the callbacks of runs like those of tests/integration."""

from pathlib import Path
from typing import Any

import yaml

from tests.integration.conftest import bases, callbacks, run, short

__all__ = ["bases", "run", "short", "with_arguments", "without_callbacks"]


def without_callbacks(folder: Path, *class_paths: str) -> str:
    """Write a config file that, given after the config files of a toy run (tests/integration/toy.py), removes these
    callbacks. Returns the file's path."""
    kept = [callback for callback in callbacks() if callback["class_path"] not in class_paths]
    assert len(kept) == len(callbacks()) - len(class_paths)
    return given_callbacks(kept, folder / "without.yaml")


def with_arguments(class_path: str, arguments: dict[str, object], folder: Path) -> str:
    """Write a config file that gives the callback ``class_path`` of a toy run these arguments and no others; the run's
    other callbacks stay. Returns the file's path."""
    changed = callbacks()
    [callback] = (callback for callback in changed if callback["class_path"] == class_path)
    callback["init_args"] = arguments
    return given_callbacks(changed, folder / f"with-{class_path}.yaml")


def given_callbacks(chosen: list[dict[str, Any]], file: Path) -> str:
    """Write a config file with these callbacks; returns its path."""
    file.write_text(yaml.safe_dump({"trainer": {"callbacks": chosen}}))
    return str(file)
