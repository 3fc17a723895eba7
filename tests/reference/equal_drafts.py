"""Definition of the drafts that are accepted, written with loops."""

import torch
from torch import Tensor


def accept(sampled: Tensor, inputs: Tensor, rows: Tensor, starts: Tensor, most_drafts: int) -> tuple[Tensor, Tensor]:
    """Do what ``qerl_pl.hopper.equal_drafts.accept`` does, by loops."""
    tokens = torch.zeros(len(starts) - 1, 1 + most_drafts, dtype=torch.int64)
    counts = torch.zeros(len(starts) - 1, dtype=torch.int32)
    for sequence, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        for row in range(start, end):
            if row > start and inputs[rows[row]] != sampled[row - 1]:
                break
            tokens[sequence, row - start] = sampled[row]
            counts[sequence] += 1
    return tokens, counts
