"""Collect what the page shows of a run, except the completions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.common.run_folder import is_running
from qerl_pl.results.curves import Curve, summarize
from qerl_pl.settings.changes import changed_settings
from qerl_pl.tools.page.verdicts import verdicts

DIGITS = 6  # significant, of a curve's values


def run_content(folder: Path, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return name, whether it is running, curves (tag to steps and values), summary, verdicts, settings and what each
    resume changed in them, of a run with these curves, as JSON-serialisable values."""
    config = _settings(folder / "config.yaml")
    times = [time for curve in curves.values() for time in (curve.times[0], curve.times[-1])]
    earlier = sorted(folder.glob("config.*.yaml"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    return {
        "name": folder.name,
        "running": is_running(folder),
        "seconds": max(times) - min(times),  # pauses between starts included
        "curves": {tag: [curve.steps, [_short(value) for value in curve.values]] for tag, curve in curves.items()},
        "summary": {name: _short(value) for name, value in summarize(curves).items()},
        "verdicts": verdicts(curves),
        "config": (folder / "config.yaml").read_text(encoding="utf-8") if config else "",
        "changes": [  # config.1.yaml has the settings before the first change
            {"file": before.name, "settings": changed_settings(_settings(before), _settings(after))}
            for before, after in itertools.pairwise([*earlier, folder / "config.yaml"])
        ],
    }


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _short(value: float) -> float | None:
    """Round a number to ``DIGITS`` significant digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
