"""Punish completions that come close to the length limit (DAPO's soft overlong punishment)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qerl_pl.common.types import Completion, Prompt


@dataclass(frozen=True)
class SoftOverlong:
    """A reward that punishes completions which come close to the length limit (DAPO, arXiv 2503.14476, eq. 13).

    The score is 0 up to ``max_tokens - buffer`` tokens, then falls linearly to -1 at ``max_tokens``, and is -1 beyond.

    Args:
        buffer: L_cache in the paper: number of tokens before the limit over which the score falls.
        max_tokens: L_max in the paper: limit on the completion length, in tokens. null takes
            ``model.sampling.max_tokens``; in a run, any other value is refused.

    Raises:
        ValueError: ``buffer`` is not between 1 and ``max_tokens``.
    """

    buffer: int
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.buffer < 1 or (self.max_tokens is not None and self.buffer > self.max_tokens):
            most = "model.sampling.max_tokens" if self.max_tokens is None else f"max_tokens ({self.max_tokens})"
            raise ValueError(f"buffer is {self.buffer}; expected 1 to {most}")

    def limited_to(self, max_tokens: int) -> SoftOverlong:
        if self.max_tokens not in (None, max_tokens):
            raise ValueError(
                f"SoftOverlong.max_tokens is {self.max_tokens} and model.sampling.max_tokens is {max_tokens}: "
                "completions end at the latter; leave max_tokens of the reward out"
            )
        return replace(self, max_tokens=max_tokens)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        if self.max_tokens is None:
            raise ValueError("SoftOverlong has no max_tokens; a run sets it to model.sampling.max_tokens")
        free = self.max_tokens - self.buffer
        return [min(0.0, max(-1.0, (free - len(row.tokens)) / self.buffer)) for row in completions]
