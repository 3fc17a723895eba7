"""Write the tables of measured numbers in docs/quickstart.md: python docs/make_tables.py

A table is between ``<!-- table: FILE -->`` and ``<!-- end -->``. FILE is a path from the root of the repository to JSON
lines that ``python -m qerl_pl report RUN... --json FILE`` has written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PLACE = re.compile(r"(?P<head><!-- table: (?P<file>\S+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Replace every table in the text by a new one."""
    return _PLACE.sub(lambda place: f"{place['head']}{table(ROOT / place['file'])}\n{place['tail']}", text)


COLUMNS = {
    "accuracy, held out": ("accuracy (held out), first", "accuracy (held out), last"),
    "entropy, nats per token": (
        "entropy (nats per token, mean of 5), first",
        "entropy (nats per token, mean of 5), last",
    ),
    "gap without noise, nats": ("logprob gap mean_abs, without noise (nats)",),
    "rollout tokens/s": ("rollout tokens/s (median)",),
    "seconds": ("seconds in RL steps",),
}
"""Names of the values of a column by its header; of two values, the first is that at the run's start, the second that
at its end."""


def table(path: Path) -> str:
    """Format one row per run and one column per quantity of ``COLUMNS``, with three significant digits."""
    if not path.exists():
        return f"*Not measured yet: there is no {path.relative_to(ROOT)}.*"
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [["run", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
    for run in runs:
        values = (" to ".join(_digits(run.get(name)) for name in names) for names in COLUMNS.values())
        rows.append([run["run"], *values])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    page = ROOT / "docs" / "quickstart.md"
    page.write_text(filled(page.read_text()))
