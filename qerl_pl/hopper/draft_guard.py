"""Decide after each rollout whether speculative decoding pays, separately for each number of sequences that decode at
the same time; where it does not, the next rollout drafts no tokens.

Speculation slows down a policy of high entropy, whose tokens are rarely guessed, because a decoding step with drafts
takes longer. So there are no drafts at those numbers of sequences at which, in recent rollouts, a decoding step with
drafts gave fewer tokens per sequence than steps without drafts give in the same time. The functions depend on counts
and constants only, never on a clock, so a run that resumes with equal counts decides equally.

Decoding steps are divided into classes by their number of sequences (``CLASSES``). The counts of a rollout are a list
with one row per class, or an empty list. A row has the number of drafted tokens, the number of times that a sequence's
drafts were verified, and the number of tokens that came out of these verifications.
"""

from collections.abc import Sequence

from qerl_pl.hopper.costs import VERIFICATION
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES
from qerl_pl.rollout.vllm.draft_counts import DraftCounts

CLASSES = tuple(number for number in VERIFICATION if number <= DRAFTS_BY_SEQUENCES[-1][0])
"""Classes of decoding steps, each given by the largest number of sequences in its steps."""
KNOWN = 512
"""Smallest number of verifications with which drafts may be turned off for a class of decoding steps; with fewer, the
mean number of tokens per verification is too uncertain."""


def by_class(counts: DraftCounts) -> list[list[int]]:
    """Add up the counts of one rollout, by number of sequences, within each class of ``CLASSES``."""
    rows, before = [], 0
    for last in CLASSES:
        numbers = range(before + 1, last + 1)
        rows.append([sum(each[num] for num in numbers) for each in (counts.drafted, counts.verified, counts.emitted)])
        before = last
    return rows


def remembered(history: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    """Add the speculation counts of the last rollout, ``new``, to three quarters of the sum over earlier rollouts,
    ``history``, so that old counts fade. Both have one row per class of decoding steps (``CLASSES``): drafted tokens,
    verifications, and resulting tokens. A class of steps without speculation gets no new counts, so its verifications
    fall below ``KNOWN`` after some rollouts. Speculation is then tried again, because the policy's entropy may have
    changed."""
    return [
        [3 * old // 4 + number for old, number in zip(*rows, strict=True)]
        for rows in zip(_with_all_classes(history), new, strict=True)
    ]


def _with_all_classes(history: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Append rows of zeros to ``history`` until there is one for each class of decoding steps (``CLASSES``). It is
    empty before the first rollout, and shorter in a checkpoint of an older release, which did not draft in the largest
    steps."""
    return [*history, *[[0, 0, 0]] * (len(CLASSES) - len(history))]


def drafts_by_sequences(history: Sequence[Sequence[int]], max_num_seqs: int, *, graph_tokens: int) -> list[int]:
    """Decide how many tokens are drafted for each sequence of a decoding step. Entry n of the result is the number for
    steps with n sequences, where n is at most ``max_num_seqs``.

    Args:
        history: sums of earlier rollouts' counts that ``remembered`` returns; empty if there are none.
        max_num_seqs: largest number of sequences of a step.
        graph_tokens: largest number of tokens of a step that runs entirely as a CUDA graph. A step that would have more
            tokens with drafts has no drafts, because the host would take longer to launch its kernels than drafts save.
    """
    table = [0] * (max(max_num_seqs, CLASSES[-1]) + 1)
    first = 1
    for last, (_, verifications, tokens) in zip(CLASSES, _with_all_classes(history), strict=True):
        drafts = next(number for most, number in DRAFTS_BY_SEQUENCES if last <= most)
        if verifications < KNOWN or tokens > VERIFICATION[last][drafts] * verifications:
            table[first : last + 1] = [drafts] * (last + 1 - first)
        first = last + 1
    return [drafts * (num * (1 + drafts) <= graph_tokens) for num, drafts in enumerate(table[: max_num_seqs + 1])]
