"""Read and write values of each token of sampled completions, such as log-probabilities: one safetensors file next to
each file of completions."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.common.files import allow_reading, replacing


@dataclass(frozen=True)
class RowTokens:
    """Values of the N sampled tokens of one completion."""

    ids: Tensor
    """[N] int64, token ids."""
    logprobs: Tensor
    """[N] log-probabilities in nats at the sampling temperature, by the trainer before the first update."""
    gap: Tensor
    """[N] log-probability of the trainer minus that of the sampler, in nats."""
    entropy: Tensor
    """[N] entropy of the trainer's distribution in nats."""
    advantage: float
    teacher: Tensor | None = None
    """[N] log-probability of the teacher minus that of the trainer, in nats; None without a teacher."""


@dataclass(frozen=True)
class FileTokens:
    """Values of ``RowTokens`` for B completions with N sampled tokens in all, one completion after another."""

    ids: Tensor
    """[N] int32, token ids."""
    offsets: Tensor
    """[B + 1] int64: completion b has the tokens offsets[b] to offsets[b + 1] - 1. A completion that dynamic sampling
    has dropped has no tokens."""
    logprobs: Tensor
    """[N] fp16, log-probabilities by the trainer in nats."""
    gap: Tensor
    """[N] fp16, log-probability of the trainer minus that of the sampler, in nats."""
    entropy: Tensor
    """[N] fp16, entropy of the trainer's distribution in nats."""
    advantages: Tensor
    """[B] fp32, advantage of each completion."""
    pieces: dict[int, str]
    """Text of each token that occurs, by token id."""
    teacher: Tensor | None = None
    """[N] fp16, log-probability of the teacher minus that of the trainer, in nats; None without a teacher."""


def write_tokens(path: Path, rows: Sequence[RowTokens], pieces: dict[int, str]) -> None:
    """Write the values of ``RowTokens`` for several completions to a .safetensors file, atomically. They take ten bytes
    per token, and two more with a teacher. ``pieces`` has the text of each token that occurs, by token id."""
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
    if any(row.teacher is not None for row in rows):
        tensors["teacher"] = joined("teacher", torch.float16)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"pieces": json.dumps({str(key): text for key, text in pieces.items()})})
        allow_reading(temporary)


def read_tokens(path: Path) -> FileTokens | None:
    """Read a file that ``write_tokens`` wrote; None, with a warning on stderr, if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            pieces = json.loads(file.metadata()["pieces"])
    except SafetensorError as error:
        print(f"warning: {path} is damaged, and left out: {error}", file=sys.stderr)
        return None
    return FileTokens(**tensors, pieces={int(key): text for key, text in pieces.items()})
