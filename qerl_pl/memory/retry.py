"""Repeat training passes that ran out of GPU memory: without the KV cache of the rollout engine, with more gradient
checkpointing, or with smaller micro-batches."""

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from qerl_pl.common.isolation import rng_restorer

T = TypeVar("T")
LESS_TOKENS = "lower model.sampling.max_tokens"
"""Advice for the user if even one row needs too much memory in a pass."""


class MicroBatchBudget:
    """Limit on the tokens of one training pass. When a pass runs out of GPU memory although the engine's KV cache is
    freed and gradient checkpointing has reached its highest level, the limit is halved; it is never raised again."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def run(
        self,
        work: Callable[[int], T],
        *,
        longest: int,
        undo: Callable[[], None] = lambda: None,
        free_cache: Callable[[], bool] = lambda: False,
        recompute_more: Callable[[], object | None] = lambda: None,
        advice: str = LESS_TOKENS,
    ) -> T:
        """Call ``work(tokens)``; if GPU memory runs out, call ``undo`` and then ``work`` again with settings that need
        less memory. Each call begins with the same random states, so a pass that is repeated unchanged has the
        same dropout and the same result. Raises RuntimeError if memory runs out even with one row per pass.

        Args:
            work: makes the passes of an optimizer step of up to ``tokens`` tokens each.
            longest: tokens of the longest row (prompt and completion), below which the limit is not lowered.
            undo: reverts what a failed call of ``work`` has done, such as accumulated gradients.
            free_cache: frees the KV cache of the rollout engine, and returns whether it was allocated, as
                ``RolloutEngine.free_cache`` does. It is tried first, because it changes no pass.
            recompute_more: raises the level of gradient checkpointing, and returns the new setting; None if the level
                cannot be raised, so that the tokens per pass are halved instead.
            advice: what the user can do if memory runs out even with one row per pass, for the error message.
        """
        restore_rng = rng_restorer()
        while True:
            tokens = max(self.tokens, longest)
            try:
                return work(tokens)
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
            # Memory is freed after the except block: inside of it, the error's traceback still refers to the tensors of
            # the failed pass.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if free_cache():
                change = "the engine's KV cache freed during training"
            elif (setting := recompute_more()) is not None:
                change = f"gradient_checkpointing {setting}"
            elif tokens > longest:
                self.tokens = max(tokens // 2, longest)
                change = f"{self.tokens} (micro_batch_tokens)"
            else:
                raise RuntimeError(
                    f"out of memory with a single row of {longest} tokens in a pass: {advice} ({reason})"
                )
            warnings.warn(
                f"out of memory with {tokens} tokens in a pass: going on with {change}", RuntimeWarning, stacklevel=2
            )
            restore_rng()  # at last, because a user's engine may draw random numbers when it frees its cache
