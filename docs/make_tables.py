"""Puts tables of measured numbers into README.md: python docs/make_tables.py

A table stands between ``<!-- table: FILE -->`` and ``<!-- end -->``, FILE being JSON lines as
``python -m qerl_pl report RUN... --json FILE`` writes them, by its path from the root of the repository.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PLACE = re.compile(r"(?P<head><!-- table: (?P<file>\S+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The text with every table made anew."""
    return _PLACE.sub(lambda place: f"{place['head']}{table(ROOT / place['file'])}\n{place['tail']}", text)


def table(path: Path) -> str:
    """A column a run, a row a quantity, to four digits."""
    if not path.exists():
        return f"*Not measured yet: there is no {path.relative_to(ROOT)}.*"
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [["", *(run["run"] for run in runs)], ["---", *("---:" for _ in runs)]]
    for name in dict.fromkeys(name for run in runs for name in run if name != "run"):
        rows.append([name, *(f"{run[name]:.4g}" if name in run else "-" for run in runs)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
