"""Numbers of each sampled token on disk: one safetensors file beside a file of completions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.common.files import allow_reading


@dataclass(frozen=True)
class RowTokens:
    """The sampled tokens of one completion."""

    ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] nats, the trainer's before its first update, at the sampling temperature."""
    gap: Tensor
    """[N] nats, trainer - sampler."""
    entropy: Tensor
    """[N] nats."""
    advantage: float


@dataclass(frozen=True)
class FileTokens:
    """The sampled tokens of B completions, one after the other."""

    ids: Tensor
    """[N] int32."""
    offsets: Tensor
    """[B + 1] int64: row b has the tokens offsets[b] to offsets[b + 1]."""
    logprobs: Tensor
    """[N] fp16 nats."""
    gap: Tensor
    """[N] fp16 nats."""
    entropy: Tensor
    """[N] fp16 nats."""
    advantages: Tensor
    """[B] fp32."""
    pieces: dict[int, str]
    """Text of each token that occurs."""


def write_tokens(path: Path, rows: Sequence[RowTokens], pieces: dict[int, str]) -> None:
    """Write the file whole or not at all; ten bytes a token.

    Args:
        path: ends in .safetensors; its folder exists.
        rows: in the order of the completions.
        pieces: text of each token that occurs.

    Raises:
        OSError: it cannot be written.
    """
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + len(row.ids))

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return torch.cat([getattr(row, name) for row in rows]).to(dtype)

    tensors = {
        "ids": joined("ids", torch.int32),
        "offsets": torch.tensor(bounds),
        "logprobs": joined("logprobs", torch.float16),
        "gap": joined("gap", torch.float16),
        "entropy": joined("entropy", torch.float16),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    }
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"pieces": json.dumps({str(key): text for key, text in pieces.items()})})
    except Exception:  # safetensors has an error of its own for a full disk
        temporary.unlink(missing_ok=True)
        raise
    allow_reading(temporary)
    os.replace(temporary, path)


def read_tokens(path: Path) -> FileTokens:
    """Read what ``write_tokens`` wrote."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        pieces = json.loads(file.metadata()["pieces"])
    return FileTokens(**tensors, pieces={int(key): text for key, text in pieces.items()})
