"""What a reward is, and the weighted sum of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qerl_pl.types import Completion, Prompt


class Reward(Protocol):
    """Scores completions. A class (settings in its constructor) or a plain function: YAML takes both."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """One score a row; ``None`` means unscored: the row is left out of the loss and counted, never taken as 0.

        Args:
            prompts: [B] the prompt of each row, repeated for the rows of a group.
            completions: [B] with their text filled in.
        """
        ...
