"""DAPO's soft overlong punishment."""

from __future__ import annotations

from collections.abc import Sequence

from qerl_pl.types import Completion, Prompt


class SoftOverlong:
    """Punishes completions that come close to the length limit (DAPO, arXiv 2503.14476, eq. 13).

    With L tokens, limit ``max_tokens`` and ``buffer``: 0 up to ``max_tokens - buffer``, then falling linearly to -1 at
    ``max_tokens``, and -1 beyond it.

    Args:
        max_tokens: L_max, where the punishment is whole; the sampling limit or less.
        buffer: L_cache, the tokens over which it grows.

    Raises:
        ValueError: ``buffer`` is not between 1 and ``max_tokens``.
    """

    def __init__(self, max_tokens: int, buffer: int) -> None:
        if not 1 <= buffer <= max_tokens:
            raise ValueError(f"buffer is {buffer}; expected 1 to max_tokens ({max_tokens})")
        self.max_tokens = max_tokens
        self.buffer = buffer

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        free = self.max_tokens - self.buffer
        return [min(0.0, max(-1.0, (free - len(each.tokens)) / self.buffer)) for each in completions]
