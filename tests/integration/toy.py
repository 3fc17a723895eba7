"""What the runs of these tests are made of, beside the real parts."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback

from qerl_pl.types import Completion, Prompt


def low_tokens(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Share of the sampled tokens in the lower half of the vocabulary: a policy with random weights gets some of it."""
    return [sum(token < 128 for token in completion.tokens) / len(completion.tokens) for completion in completions]


class CtrlC(Callback):
    """Presses Ctrl-C when a rollout begins."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.at = at
        self.times = times

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
