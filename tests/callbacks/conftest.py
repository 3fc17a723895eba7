"""Whole runs on a policy with random weights, as in tests/integration."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.integration.conftest import ROOT, TOY, bases, run

__all__ = ["bases", "run", "without_callback"]


def without_callback(class_path: str, folder: Path) -> str:
    """A config file that, given after those of a toy run, leaves one callback out."""
    base, toy = (yaml.safe_load(path.read_text())["trainer"] for path in (ROOT / "configs" / "base.yaml", TOY))
    callbacks = [*base["callbacks"], *toy["callbacks+"]]
    kept = [callback for callback in callbacks if callback["class_path"] != class_path]
    assert len(kept) == len(callbacks) - 1
    file = folder / f"without-{class_path}.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"callbacks": kept}}))
    return str(file)
