"""Going on with less kept for backward, and then with smaller micro-batches, when memory runs out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class MicroBatchBudget:
    """Most tokens in one pass, halved whenever a pass does not fit; it never grows again.

    Args:
        tokens: to begin with.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"micro_batch_tokens is {tokens}; expected at least 1")
        self.tokens = tokens

    def run(
        self,
        work: Callable[[int], T],
        *,
        longest: int,
        undo: Callable[[], None] = lambda: None,
        recompute_more: Callable[[], object | None] = lambda: None,
    ) -> T:
        """``work(tokens)``; if memory runs out, undone and done again from its beginning with less memory.

        As long as more can be recomputed in backward it is, and then there are half the tokens in a pass.

        Args:
            work: what may run out of memory; given the most tokens of one pass.
            longest: tokens of the longest row. A pass holds one row at least, so that is the smallest budget.
            undo: takes back what unfinished work left behind.
            recompute_more: keeps less for backward; returns the gradient_checkpointing that is now, or None if it is
                as before.

        Raises:
            RuntimeError: memory runs out with one row a pass.
        """
        while True:
            tokens = max(self.tokens, longest)
            try:
                return work(tokens)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            # Not earlier: the error's traceback holds the tensors of the pass.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if (setting := recompute_more()) is not None:
                warnings.warn(
                    f"out of memory with {tokens} tokens in a pass: going on with gradient_checkpointing {setting}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            if tokens == longest:
                raise RuntimeError(
                    f"out of memory with a single row of {longest} tokens in a pass: set model.gradient_checkpointing "
                    "to auto or offload, lower model.sampling.max_tokens, or see what "
                    f"`python -m qerl_pl plan` advises ({reason})"
                )
            self.tokens = max(tokens // 2, longest)
            warnings.warn(
                f"out of memory with {tokens} tokens in a pass: going on with {self.tokens} (micro_batch_tokens)",
                RuntimeWarning,
                stacklevel=2,
            )
