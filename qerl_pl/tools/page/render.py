"""Render the content of a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any


def render(summary: dict[str, Any], blocks: Iterable[dict[str, Any]], *, follow: bool = False) -> str:
    """Render the HTML page as a string.

    A model's output is stored as JSON, in which ``<`` is escaped, and the page's scripts show it only as text.
    The page's content security policy forbids all network requests, and all scripts but the page's own.

    Args:
        summary: content of the runs, from ``collect``.
        blocks: completions, one block per file, from ``completions.block``.
        follow: True lets the page poll its server for new data.
    """
    parts = {
        name: files("qerl_pl.tools.page").joinpath(f"page.{name}").read_text(encoding="utf-8")
        for name in ("html", "css", "js", "completions.js")
    }
    script = parts["js"] + parts["completions.js"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    if follow:
        policy += "; connect-src 'self'"
    title = ", ".join(run["name"] for run in summary["runs"])
    values = {
        "TITLE": html.escape(title),
        "POLICY": html.escape(policy),
        "CSS": parts["css"],
        "SUMMARY": as_json({**summary, "follow": follow}),
        "JS": script,
        "COMPLETIONS": "\n".join(
            f'<script type="application/json" class="completions">{as_json(block)}</script>' for block in blocks
        ),
    }
    head, *rest = parts["html"].split("{{")
    return head + "".join(values[name] + text for name, text in (part.split("}}", 1) for part in rest))


def as_json(value: object) -> str:
    """Serialise to JSON that is safe inside a script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
