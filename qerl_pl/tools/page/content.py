"""Read from a run's folder what its page shows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.common.run_folder import is_running
from qerl_pl.results.curves import Curve, read_curves, summarize
from qerl_pl.settings.changes import changed_settings
from qerl_pl.tools.page.verdicts import verdicts

SAME_ARM = ("seed_everything", "run_dir", "ckpt_path", "config")
"""Settings that do not count when the page decides whether two runs have the same configuration (arm)."""
DIGITS = 6  # significant, of a curve's values


def run_content(folder: Path) -> dict[str, Any]:
    """Read everything that a run's page shows, except the completions.

    Returns: JSON-serialisable: name, folder, whether it is running, curves (tag to steps and values), summary,
        verdicts, settings and what each resume changed in them, and the arm: a text that is equal for runs whose
        settings differ only in the seed.

    Raises:
        ValueError: the folder holds no event file that can be read.
    """
    curves = read_curves(folder)
    config = _settings(folder / "config.yaml")
    return {
        "name": folder.name,
        "folder": str(folder),
        "running": is_running(folder),
        "seconds": _seconds(curves),
        "curves": {tag: [curve.steps, [_short(value) for value in curve.values]] for tag, curve in curves.items()},
        "summary": {name: _short(value) for name, value in summarize(curves).items()},
        "verdicts": verdicts(curves),
        "config": (folder / "config.yaml").read_text(encoding="utf-8") if config else "",
        "changes": _changes(folder),
        "arm": yaml.safe_dump({key: value for key, value in config.items() if key not in SAME_ARM}),
    }


def _seconds(curves: Mapping[str, Curve]) -> float:
    """Return the seconds between a run's first and last logged scalar, including pauses between its starts."""
    times = [time for curve in curves.values() for time in (curve.times[0], curve.times[-1])]
    return max(times) - min(times)


def _changes(folder: Path) -> list[dict[str, Any]]:
    """List the settings that each resume of a run changed, oldest first; config.1.yaml has the settings before the
    first change."""
    earlier = sorted(folder.glob("config.*.yaml"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    files = [*earlier, folder / "config.yaml"]
    return [
        {"file": before.name, "settings": changed_settings(_settings(before), _settings(after))}
        for before, after in itertools.pairwise(files)
    ]


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(value: float) -> float | None:
    """Round a number to ``DIGITS`` significant digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
