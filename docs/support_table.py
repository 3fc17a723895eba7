"""Write the table of supported model families in docs/support.md, from records of tests that passed.

    QERL_PL_SUPPORT=docs/results/support.jsonl make test-long     # on a machine without a GPU
    QERL_PL_SUPPORT=docs/results/support.jsonl make test-gpu      # on one with a GPU
    python docs/support_table.py

The tests append a line of JSON for each part of a run that works (``tests/support.py``); lines may repeat.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qerl_pl.model.family import FAMILIES  # noqa: E402  (the script is run by its path)
from tests.support import CAPABILITIES  # noqa: E402

NOTES = ROOT / "docs" / "results" / "support.jsonl"
MACHINES = ("CPU", "Hopper")
_PLACE = re.compile(r"(<!-- support -->\n).*?(<!-- end -->)", re.DOTALL)


def table(notes: Path) -> str:
    """Format a table with one row per model family and one column per part of a run, whose cells have the devices on
    which that part works; below it are the versions of vLLM."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    versions: dict[str, set[str]] = defaultdict(set)
    for line in notes.read_text().splitlines() if notes.exists() else ():
        note = json.loads(line)
        found[note["family"], note["capability"]].add(note["on"])
        versions[note["on"]].add(note["vllm"])
    rows = [["`model_type`", *CAPABILITIES], ["---"] * (1 + len(CAPABILITIES))]
    rows += [[f"`{family}`", *(_cell(found[family, capability]) for capability in CAPABILITIES)] for family in FAMILIES]
    tested = "; ".join(f"{machine}: {', '.join(sorted(versions[machine])) or 'not run'}" for machine in MACHINES)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\nVersions of vLLM in these tests: {tested}."


def filled(text: str, notes: Path) -> str:
    """Replace the table in a text by a new one."""
    return _PLACE.sub(lambda place: f"{place[1]}{table(notes)}\n{place[2]}", text)


def _cell(machines: set[str]) -> str:
    return ", ".join(sorted(machines)) or "not run"


if __name__ == "__main__":
    page = ROOT / "docs" / "support.md"
    page.write_text(filled(page.read_text(), NOTES))
