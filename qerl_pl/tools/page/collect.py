"""Collect everything that the HTML page of one or several runs shows, or only what is new since the last call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_pl.tools.page.completions import block, choose_files, completion_files
from qerl_pl.tools.page.content import run_content


def collect(folders: Sequence[Path], *, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the content of a page from the folders of runs.

    Args:
        folders: folders of the runs.
        limit: most completions on the page; if the runs have more, whole files are left out, spread evenly over each
            run, and the page says so.

    Returns:
        The summary and the completions (one block per file), as JSON-serialisable values.

    Raises:
        ValueError: a folder does not hold a run.
    """
    files, note = choose_files(folders, limit)
    return _summary(folders, note, newest=_newest(folders)), [block(path, run) for run, path in files]


def news(folders: Sequence[Path], *, after: int) -> dict[str, Any]:
    """Read the summary of runs again, and the completions from files that were modified later than ``after``.

    Args:
        folders: folders of the runs.
        after: modification time in nanoseconds since the epoch: the entry ``newest`` of the previous summary.
    """
    newest = _newest(folders)
    blocks = [
        block(path, run)
        for run, folder in enumerate(folders)
        for path in completion_files(folder)
        if after < path.stat().st_mtime_ns <= newest
    ]
    return {"summary": _summary(folders, "", newest=newest), "blocks": blocks}


def _summary(folders: Sequence[Path], note: str, *, newest: int) -> dict[str, Any]:
    # A string, because numbers in JavaScript have too few digits.
    return {"runs": [run_content(folder) for folder in folders], "note": note, "newest": str(newest)}


def _newest(folders: Sequence[Path]) -> int:
    return max((path.stat().st_mtime_ns for folder in folders for path in completion_files(folder)), default=0)
