"""Finished batches of an evaluation on disk, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl_pl.common.files import write_whole
from qerl_pl.common.types import Prompt


class EvaluationCache:
    """Records of batches under a name that says what they are a function of: another policy finds nothing.

    Args:
        folder: where the files go.
        identity: everything but the prompts that the records depend on (policy, engine, sampling, rewards), JSON-ready.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / _digest(identity)

    def read(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]] | None:
        """The records of a batch, or None where it was not finished."""
        path = self._path(prompts)
        if not path.exists():
            return None
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def write(self, prompts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a batch, whole or not at all."""
        write_whole(self._path(prompts), "".join(json.dumps(row) + "\n" for row in rows))

    def _path(self, prompts: Sequence[Prompt]) -> Path:
        return self.folder / f"{_digest([list(prompt) for prompt in prompts])}.jsonl"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
