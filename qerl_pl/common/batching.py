"""Divide rows, each a prompt and its completion, into micro-batches by their numbers of tokens."""

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Divide rows of [B] lengths into micro-batches of at most ``max_tokens`` tokens, not counting padding. Returns the
    row indices, int64, of each micro-batch, and the micro-batch with the most tokens first. ValueError if a single row
    is longer than ``max_tokens``.

    The algorithm is first-fit decreasing, which gives at most about 11/9 of the smallest possible number of
    micro-batches. Rows of equal length keep their order, so the result depends only on the lengths.
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


def micro_batches_of_groups(
    lengths: Tensor, prompts: Tensor, group: Tensor, max_tokens: int, *, least_saved: float
) -> list[Tensor]:
    """Divide rows into micro-batches in which the rows of a group share one copy of their prompt.

    Each group is split into units of as many of its rows as fit into one micro-batch. ``micro_batches`` then divides
    the units, as if each were a row. The policy shares prompts in a micro-batch only if this saves enough tokens
    (``least_saved``). Where it does not, a micro-batch that fits only with shared prompts is dissolved, and its rows
    are divided without sharing.

    Args:
        lengths: [B] int64, tokens of each row, the prompt included.
        prompts: [B] int64, tokens of each row's prompt, the same for all rows of a group.
        group: [B] int64, index of each row's group.
        max_tokens: limit on the tokens of a micro-batch, in which a group's prompt counts once.
        least_saved: smallest share of a micro-batch's tokens that sharing must save to be done.

    The result and the errors are those of ``micro_batches``.
    """
    lengths = lengths.cpu()
    units: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    parts: dict[int, int] = {}
    for row, (length, prompt, number) in enumerate(
        zip(lengths.tolist(), prompts.tolist(), group.tolist(), strict=True)
    ):
        key = number, parts.setdefault(number, 0)
        if key in units and sizes[key] + length - prompt > max_tokens:
            parts[number] += 1
            key = number, parts[number]
        sizes[key] = sizes[key] + length - prompt if key in units else length
        units.setdefault(key, []).append(row)
    rows = list(units.values())
    shared = torch.tensor(list(sizes.values()), dtype=torch.int64)
    batches: list[tuple[int, Tensor]] = []  # tokens and rows
    alone: list[Tensor] = []
    for some in micro_batches(shared, max_tokens):
        chosen = torch.tensor([row for unit in some.tolist() for row in rows[unit]])
        tokens, whole = int(shared[some].sum()), int(lengths[chosen].sum())
        if whole <= max_tokens or whole - tokens >= least_saved * whole:
            batches.append((tokens, chosen))
        else:
            alone.append(chosen)
    if alone:
        left = torch.cat(alone)
        batches += [(int(lengths[left[some]].sum()), left[some]) for some in micro_batches(lengths[left], max_tokens)]
    return [chosen for _, chosen in sorted(batches, key=lambda batch: -batch[0])]
