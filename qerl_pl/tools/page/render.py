"""Render the page about runs as one self-contained HTML file."""

import base64
import hashlib
import html
import itertools
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from qerl_pl.common.run_folder import is_running, plain_yaml
from qerl_pl.results.curves import Curve, summarize
from qerl_pl.settings.changes import changed_settings
from qerl_pl.tools.page.completions import block, choose_files, files_of_run
from qerl_pl.tools.page.teacher import teacher_tables
from qerl_pl.tools.page.verdicts import verdicts

DIGITS = 6  # significant digits of a curve's values


def page_of(runs: Mapping[Path, Mapping[str, Curve]], *, limit: int) -> str:
    """Render one HTML page about one or more runs. ``runs`` maps each run's folder to its logged scalars. If the runs
    have more than ``limit`` completions, the page has those of some rollouts only, evenly spaced in each run, and says
    so.

    The texts that a model wrote are stored as JSON in which ``<`` is escaped, and are shown only as text, never as
    HTML. The page's content security policy forbids network requests, and all scripts except the page's own.
    """
    chosen, note = choose_files(runs, limit)
    summary = {"runs": [_content(folder, curves) for folder, curves in runs.items()], "note": note}
    parts = {
        name: files("qerl_pl.tools.page").joinpath(f"page.{name}").read_text(encoding="utf-8")
        for name in ("html", "css", "js", "completions.js")
    }
    script = parts["js"] + parts["completions.js"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    blocks = (_as_json(block(path, run)) for run, path in chosen)
    values = {
        "TITLE": html.escape(", ".join(folder.name for folder in runs)),
        "POLICY": html.escape(policy),
        "CSS": parts["css"],
        "SUMMARY": _as_json(summary),
        "JS": script,
        "COMPLETIONS": "\n".join(
            f'<script type="application/json" class="completions">{text}</script>' for text in blocks
        ),
    }
    head, *rest = parts["html"].split("{{")
    return head + "".join(values[name] + text for name, text in (part.split("}}", 1) for part in rest))


def _as_json(value: object) -> str:
    """Convert a value to JSON text with ``<`` escaped, so that it cannot end the script element around it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _content(folder: Path, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return what the page shows of a run, except completions, as a dict that JSON can represent."""
    config = plain_yaml(folder / "config.yaml")
    times = [time for curve in curves.values() for time in (curve.times[0], curve.times[-1])]
    earlier = sorted(folder.glob("config.*.yaml"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    return {
        "name": folder.name,
        "running": is_running(folder),
        "seconds": max(times) - min(times),  # pauses between starts included
        "curves": {
            tag: [curve.steps, [_short(value) for value in curve.values]]
            for tag, curve in curves.items()
            if tag.startswith(("train/reward", "time/", "memory/", "speculation/"))
        },
        "summary": {name: _short(value) for name, value in summarize(curves).items()},
        "verdicts": verdicts(curves),
        "teacher": teacher_tables([path.with_suffix(".safetensors") for path in files_of_run(folder, curves)]),
        "config": (folder / "config.yaml").read_text(encoding="utf-8") if config else "",
        "changes": [  # config.1.yaml has the settings before the first change
            {"file": before.name, "settings": changed_settings(plain_yaml(before), plain_yaml(after))}
            for before, after in itertools.pairwise([*earlier, folder / "config.yaml"])
        ],
    }


def _short(value: float) -> float | None:
    """Round a number to ``DIGITS`` significant digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
