"""Write the tables of docs/quickstart.md and docs/support.md: python docs/make_tables.py

``<!-- table: FILE -->`` is followed by a table of runs. FILE is a path from the root of the repository to JSON lines
that ``python -m qerl_pl report RUN... --json FILE`` has written. ``<!-- support -->`` is followed by the table of model
families, from records of tests that passed:

    QERL_PL_SUPPORT=docs/results/support.jsonl make test-long     # on a machine without a GPU
    QERL_PL_SUPPORT=docs/results/support.jsonl make test-gpu      # on one with a GPU

The tests append a line of JSON for each part of a run that works (``tests/support.py``); lines may repeat. A table ends
at ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qerl_pl.model.family import FAMILIES  # noqa: E402  (the script is run by its path)
from tests.support import CAPABILITIES  # noqa: E402

NOTES = ROOT / "docs" / "results" / "support.jsonl"
MACHINES = ("CPU", "Hopper")
PLACE = re.compile(r"(?P<head><!-- (?:table: (?P<file>\S+)|support) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL)
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


def filled(text: str) -> str:
    """Replace every table in the text by a new one."""

    def table(place: re.Match[str]) -> str:
        made = of_runs(ROOT / place["file"]) if place["file"] else of_families(NOTES)
        return f"{place['head']}{made}\n{place['tail']}"

    return PLACE.sub(table, text)


def of_runs(path: Path) -> str:
    """Format one row per run and one column per quantity of ``COLUMNS``, with three significant digits."""
    if not path.exists():
        return f"*Not measured yet: there is no {path.relative_to(ROOT)}.*"
    rows = [["run", *COLUMNS], ["---", *("---:" for _ in COLUMNS)]]
    for run in map(json.loads, path.read_text().splitlines()):
        values = (" to ".join(_digits(run.get(name)) for name in names) for names in COLUMNS.values())
        rows.append([run["run"], *values])
    return _markdown(rows)


def of_families(notes: Path) -> str:
    """Format a table with one row per model family and one column per part of a run; a cell has the devices on which
    that part works. A line below the table has the versions of vLLM in these tests."""
    devices: dict[tuple[str, str], set[str]] = defaultdict(set)
    versions: dict[str, set[str]] = defaultdict(set)
    for note in map(json.loads, notes.read_text().splitlines() if notes.exists() else ()):
        devices[note["family"], note["capability"]].add(note["on"])
        versions[note["on"]].add(note["vllm"])
    rows = [["`model_type`", *CAPABILITIES], ["---"] * (1 + len(CAPABILITIES))]
    rows += [[f"`{family}`", *(_listed(devices[family, part]) for part in CAPABILITIES)] for family in FAMILIES]
    tested = "; ".join(f"{machine}: {_listed(versions[machine])}" for machine in MACHINES)
    return f"{_markdown(rows)}\n\nVersions of vLLM in these tests: {tested}."


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "not run"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    for page in (ROOT / "docs" / "quickstart.md", ROOT / "docs" / "support.md"):
        page.write_text(filled(page.read_text()))
