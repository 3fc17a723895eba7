"""Guard of speculative decoding: after each rollout it decides for which numbers of running sequences the next rollout
drafts tokens.

Speculation slows down a policy of high entropy, whose tokens drafts rarely guess. A step with drafts also takes longer.
So there are no drafts at those numbers of sequences at which, in recent rollouts, a decoding step with drafts gave
fewer tokens per sequence than steps without drafts give in the same time. The functions depend on counts and constants
only, never on a clock, so a run that resumes with the same counts decides the same.

Counts are a list with a row for each class of numbers of sequences (``CLASSES``), or an empty list. A row has the
number of drafted tokens, the number of times that a sequence's drafts were verified, and the number of tokens that came
out of these verifications.
"""

from collections.abc import Sequence

from qerl_pl.hopper.costs import VERIFICATION
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES
from qerl_pl.rollout.vllm.draft_counts import DraftCounts

CLASSES = tuple(number for number in VERIFICATION if number <= DRAFTS_BY_SEQUENCES[-1][0])
"""Decoding steps are counted by classes of the number of sequences; these are the largest numbers of each class."""
KNOWN = 512
"""A class needs at least this many verifications before its drafts can be left out; the mean of fewer is too
uncertain."""


def by_class(counts: DraftCounts) -> list[list[int]]:
    """Add up counts within each class."""
    rows, before = [], 0
    for last in CLASSES:
        numbers = range(before + 1, last + 1)
        rows.append([sum(each[num] for num in numbers) for each in (counts.drafted, counts.verified, counts.emitted)])
        before = last
    return rows


def remembered(history: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    """Add a rollout's counts, ``new``, to three quarters of the sums so far, ``history``, so that old counts fade. The
    verifications of a class of steps that has no drafts therefore fall below ``KNOWN`` after some rollouts, and the
    class gets drafts again, because the policy's entropy may have changed."""
    before = history or [[0, 0, 0]] * len(CLASSES)
    return [
        [3 * old // 4 + number for old, number in zip(*rows, strict=True)] for rows in zip(before, new, strict=True)
    ]


def drafts_by_sequences(history: Sequence[Sequence[int]], max_num_seqs: int) -> list[int]:
    """Decide how many drafts each sequence gets, by the number of sequences in a decoding step: a list whose entry n is
    for n sequences, from 0 to ``max_num_seqs``."""
    table = [0] * (max(max_num_seqs, CLASSES[-1]) + 1)
    first = 1
    for last, (_, verifications, tokens) in zip(CLASSES, history or [[0, 0, 0]] * len(CLASSES), strict=True):
        drafts = next(number for most, number in DRAFTS_BY_SEQUENCES if last <= most)
        if verifications < KNOWN or tokens > VERIFICATION[last][drafts] * verifications:
            table[first : last + 1] = [drafts] * (last + 1 - first)
        first = last + 1
    return table[: max_num_seqs + 1]
