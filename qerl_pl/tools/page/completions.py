"""Convert the completion files of a run to JSON for its page, with log-probability, entropy and gap per token if
written."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_pl.common.files import read_lines

STEP = 1000  # integer per nat: per-token numbers are stored as integers in thousandths of a nat
LARGEST = 32.0  # nats; larger per-token numbers are clipped to this


def choose_files(folders: Sequence[Path], limit: int) -> tuple[list[tuple[int, Path]], str]:
    """Choose completion files, spread evenly over each run, so that they have about ``limit`` completions together.

    Returns: (index of the run, file) in order, and a sentence that says which files were left out, or "".
    """
    found = [(index, path) for index, folder in enumerate(folders) for path in completion_files(folder)]
    counts = [_count(path) for _, path in found]
    if sum(counts) <= limit:
        return found, ""
    if limit == 0:
        return [], f"none of {sum(counts):,} completions are shown; `report --completions N` shows N"
    each = -(-sum(counts) // limit)
    return found[::each], (
        f"{sum(counts[::each]):,} of {sum(counts):,} completions are shown, those of one file in {each}; "
        "`report --completions N` shows up to N"
    )


def completion_files(folder: Path) -> list[Path]:
    """List the files that ``callbacks.completions`` wrote for a run, ordered by stage and then by rollout."""
    return sorted((folder / "completions").glob("*.jsonl"))


def block(path: Path, run: int) -> dict[str, Any]:
    """Convert the completions of one file. Lines that cannot be read are skipped and counted in ``damaged``.

    Returns:
        JSON-serialisable: run, stage, step, pieces (texts of tokens), rows. Per-token numbers are base64 of
        little-endian integers: piece indices are uint32, the others int16 in thousandths of a nat.
    """
    stage, _, step = path.stem.rpartition("-")
    lines = [_read(line) for line in read_lines(path, errors="replace")]
    rows = [_row(line) for line in lines if line is not None]
    found = {"run": run, "stage": stage, "step": int(step), "rows": rows, "damaged": len(lines) - len(rows)}
    tokens_path = path.with_suffix(".safetensors")
    if tokens_path.exists() and not found["damaged"]:
        from qerl_pl.rollout.token_file import read_tokens  # imported here, because few pages need torch

        tokens = read_tokens(tokens_path)
        if len(tokens.offsets) == len(rows) + 1:
            pieces = sorted(tokens.pieces)
            places = np.searchsorted(np.array(pieces), tokens.ids.numpy()).astype("<u4")
            numbers = {"l": tokens.logprobs, "e": tokens.entropy, "g": tokens.gap}
            fixed = {
                key: (value.float().nan_to_num().clamp(-LARGEST, LARGEST) * STEP).round().numpy().astype("<i2")
                for key, value in numbers.items()
            }
            bounds = tokens.offsets.tolist()
            for row, start, end, advantage in zip(rows, bounds, bounds[1:], tokens.advantages.tolist(), strict=False):
                row["v"] = float(f"{advantage:.4g}")
                row["t"] = _base64(places[start:end])
                row.update({key: _base64(value[start:end]) for key, value in fixed.items()})
            found["pieces"] = [tokens.pieces[token] for token in pieces]
    return found


def _row(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "p": str(line.get("prompt", "")),
        "c": str(line.get("completion", "")),
        "a": str(line.get("answer", "")),
        "w": line.get("reward"),
        "s": line.get("rewards", {}),
        "y": line.get("reasons", {}),
        "n": line.get("num_tokens", 0),
        "f": bool(line.get("finished", True)),
    }


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()
