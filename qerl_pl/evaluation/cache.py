"""A cache on disk of an evaluation's finished batches, so that an interrupted evaluation can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_pl.common.files import read_lines, write_whole
from qerl_pl.common.types import Prompt


class EvaluationCache:
    """Stores the records of finished batches in files named by a digest of everything that the records depend on.

    Args:
        folder: folder of the cache's files.
        identity: everything but the prompts that the records depend on (policy, engine, sampling, rewards), as JSON.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / _digest(identity)

    def read(self, prompts: Sequence[Prompt], *, num_rows: int) -> list[dict[str, Any]] | None:
        """Return the ``num_rows`` stored records of a batch of prompts, or None if the batch has not been finished or
        its file is damaged."""
        path = self._path(prompts)
        if not path.exists():
            return None
        try:
            rows = [json.loads(line) for line in read_lines(path)]
        except ValueError:  # not UTF-8, or no JSON
            return None
        return rows if len(rows) == num_rows else None

    def write(self, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> None:
        """Store the records of a batch atomically."""
        write_whole(self._path(prompts), "".join(json.dumps(row) + "\n" for row in rows))

    def _path(self, prompts: Sequence[Prompt]) -> Path:
        return self.folder / f"{_digest([list(prompt) for prompt in prompts])}.jsonl"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
