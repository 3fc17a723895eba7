"""Divide rows, each a prompt and its completion, into micro-batches by their numbers of tokens."""

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Divide rows (sequences of tokens, or groups of sequences that stay together) into micro-batches of at most
    ``max_tokens`` tokens, not counting padding. ``lengths`` [B] are the numbers of tokens of B rows. Returns the row
    indices, int64, of each micro-batch, the micro-batch with the most tokens first.

    First-fit decreasing gives at most about 11/9 of the smallest possible number of micro-batches; rows of equal length
    keep their order, so the result depends only on the lengths. Raises ValueError if a single row is longer than
    ``max_tokens``.
    """
    if len(lengths) and int(lengths.max()) > max_tokens:
        raise ValueError(
            f"a row of {int(lengths.max())} tokens is longer than micro_batch_tokens ({max_tokens}); raise it to at "
            "least the longest prompt plus max_tokens of the sampling"
        )
    sizes = lengths.tolist()
    batches: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        place = next((place for place, free in enumerate(room) if sizes[row] <= free), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(max_tokens)
        batches[place].append(row)
        room[place] -= sizes[row]
    # The micro-batch with the most tokens comes first, so that torch's allocator can serve every later pass from the
    # memory that it has cached.
    fullest_first = sorted(range(len(batches)), key=lambda place: room[place])
    return [torch.tensor(batches[place]) for place in fullest_first]
