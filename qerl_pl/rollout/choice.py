"""Choose the completions of a rollout that the trainer's model scores; of equal completions, it scores only one."""

from collections.abc import Iterable
from typing import NamedTuple

from qerl_pl.common import ranks
from qerl_pl.rollout.scored import ScoredBatch


class Choice(NamedTuple):
    """N chosen rows of a batch (prompts with one completion each), of which D are distinct."""

    rows: list[int]
    """[N] indices in the batch."""
    which: list[int]
    """[N] for each chosen row, the index in ``firsts`` of the distinct row that it equals."""
    firsts: list[int]
    """[D] for each distinct row, the index in ``rows`` of the first one that equals it."""


def choose(batch: ScoredBatch, order: Iterable[int], max_tokens: int) -> Choice:
    """Choose rows of a batch (prompts with one completion each), in the order in which ``order`` has their indices.
    ``max_tokens`` limits the number of tokens, prompts included, in the distinct chosen rows of all ranks together.
    Each rank gets an equal share of this limit, which its last row may exceed."""
    limit, total, choice = max_tokens / ranks.num_ranks(), 0, Choice([], [], [])
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for row in order:
        both = (batch.prompts[row].tokens, batch.completions[row].tokens)
        if (which := known.setdefault(both, len(known))) == len(choice.firsts):  # not chosen before
            choice.firsts.append(len(choice.rows))
            total += len(both[0]) + len(both[1])
        choice.rows.append(row)
        choice.which.append(which)
        if total >= limit:
            break
    return choice
