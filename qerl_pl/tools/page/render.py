"""Render the page of runs as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from qerl_pl.results.curves import Curve
from qerl_pl.tools.page.completions import block, choose_files
from qerl_pl.tools.page.content import run_content


def page_of(runs: Mapping[Path, Mapping[str, Curve]], *, limit: int) -> str:
    """Render the HTML page of runs as a string.

    A model's output is stored as JSON, in which ``<`` is escaped, and the page's script shows it only as text. The
    page's content security policy forbids all network requests, and all scripts but the page's own.

    Args:
        runs: curves of the runs by folder.
        limit: most completions on the page; if the runs have more, whole files are left out, spread evenly over each
            run, and the page says so.
    """
    chosen, note = choose_files(list(runs), limit)
    summary = {"runs": [run_content(folder, curves) for folder, curves in runs.items()], "note": note}
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
    """Serialise to JSON that is safe inside a script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
