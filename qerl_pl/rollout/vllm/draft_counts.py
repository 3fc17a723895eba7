"""Counts of drafted and accepted tokens in speculative decoding."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Counts of drafted tokens and of what their verification gave. Each counter maps a number of sequences n to the
    sum over all decoding steps in which n sequences decode."""

    drafted: Counter[int] = field(default_factory=Counter)
    """Tokens that were drafted and verified."""
    verified: Counter[int] = field(default_factory=Counter)
    """Verifications: one for each sequence with drafts in each step."""
    emitted: Counter[int] = field(default_factory=Counter)
    """Tokens that the verifications gave: the accepted drafts, and one more token for each verification."""

    def clear(self) -> None:
        """Set all counts to 0."""
        for counts in (self.drafted, self.verified, self.emitted):
            counts.clear()
