"""Compare a policy with its teacher by position in the completion and by token, for the HTML page about runs."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

BOUNDS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)  # bounds of the ranges of positions in a completion
MOST_TOKENS = 12


def teacher_tables(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Compare the policy's log p with the teacher's log q at sampled tokens, in two rollouts: the first and the last
    for which the run stored the teacher's log-probabilities. ``paths`` are those of the rollouts' files of tokens, in
    order; files that do not exist are left out. Returns None if there is no such rollout.

    Otherwise returns a dict that JSON can represent: ``rollouts``, the indices of the two rollouts; ``positions``, one
    row per range of token positions with the mean of log p - log q in each rollout, which estimates KL(p || q) there
    (None if no completion is that long); and ``tokens``, one row (text, number of occurrences, mean) for each of the
    tokens with the largest sum of log p - log q in the last rollout.
    """
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    from qerl_pl.rollout.token_file import read_tokens  # imported here, because few pages need torch

    first = read_tokens(paths[0])
    if first is None or first.teacher is None:
        return None
    later = ((path, read_tokens(path)) for path in reversed(paths[1:]))
    last = next(((path, tokens) for path, tokens in later if tokens and tokens.teacher is not None), (paths[0], first))
    columns, tokens, excess = {}, first, np.zeros(0)
    for path, tokens in ((paths[0], first), last):
        assert tokens.teacher is not None
        excess, offsets = -tokens.teacher.double().numpy(), tokens.offsets.numpy()
        position = np.arange(len(excess)) - np.repeat(offsets[:-1], np.diff(offsets))
        parts = [excess[(position >= low) & (position < high)] for low, high in pairwise(BOUNDS)]
        columns[int(path.stem.rpartition("-")[2])] = [float(part.mean()) if len(part) else None for part in parts]
    ids, which, counts = np.unique(tokens.ids.numpy(), return_inverse=True, return_counts=True)
    sums = np.bincount(which, weights=excess)
    largest = np.argsort(-sums)[:MOST_TOKENS]
    places = [f"tokens {low + 1} to {high}" for low, high in pairwise(BOUNDS)]
    rows = [list(row) for row in zip(places, *columns.values(), strict=True)]
    return {
        "rollouts": list(columns),
        "positions": [row for row in rows if any(value is not None for value in row[1:])],
        "tokens": [[tokens.pieces[int(ids[at])], int(counts[at]), float(sums[at] / counts[at])] for at in largest],
    }
