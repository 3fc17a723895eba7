"""Show the ``Example:`` of a class as YAML: an extension of griffe, which reads the docstrings for mkdocstrings."""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

from griffe import Class, Extension

EXAMPLE = re.compile(r"^Example:\n((?: +.*\n?|\n)+)", re.MULTILINE)


class Examples(Extension):
    """Puts the example of every class into a fenced block."""

    def on_class(self, *, cls: Class, **more: Any) -> None:
        """Change the docstring of a class that was just read."""
        if cls.docstring:
            cls.docstring.value = EXAMPLE.sub(lambda found: block(found[1]), cls.docstring.value)


def block(example: str) -> str:
    """Return Markdown of an example."""
    return f"For example:\n\n```yaml\n{dedent(example).strip()}\n```\n"
