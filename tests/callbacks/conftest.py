"""A config file that changes a callback of runs like those of tests/integration."""

from pathlib import Path

import yaml

from tests.integration.conftest import bases, callbacks, run, short

__all__ = ["bases", "run", "short", "with_arguments"]


def with_arguments(class_path: str, arguments: dict[str, object], folder: Path) -> str:
    """Write a config file that gives the callback ``class_path`` of a toy run these arguments and no others; the run's
    other callbacks stay. Returns the file's path."""
    changed = callbacks()
    [callback] = (callback for callback in changed if callback["class_path"] == class_path)
    callback["init_args"] = arguments
    file = folder / f"with-{class_path}.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"callbacks": changed}}))
    return str(file)
