"""Drafts of speculative decoding by loops, the definition that tests compare ``hopper.group_drafts`` with."""

import torch
from torch import Tensor


def draft_reference(
    tokens: Tensor, lengths: Tensor, candidates: Tensor, rows: Tensor, num_drafts: int, longest: int
) -> Tensor:
    """Compute ``draft`` by loops; ``longest`` is the longest match that is looked for, in tokens."""
    texts = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    drafts = []
    for row in rows.tolist():
        best, found = (0, 0, 0), []
        for column, other in enumerate(candidates[row].tolist()):
            for end in range(1, len(texts[other]) if other >= 0 else 0):
                before, match = texts[other][:end], 0
                while match < min(longest, end, len(texts[row])) and before[-1 - match] == texts[row][-1 - match]:
                    match += 1
                if match and (match, end, -column) > best:
                    best, found = (match, end, -column), texts[other][end : end + num_drafts]
        drafts.append(found + texts[row][-1:] * (num_drafts - len(found)))
    return torch.tensor(drafts, dtype=torch.int64).reshape(len(rows), num_drafts)
