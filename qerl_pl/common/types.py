"""Data types that pass between rollout, reward and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Message = dict[str, str]
"""Turn of a chat: ``{"role": "user", "content": "..."}``."""


class Problem(NamedTuple):
    """A question and its verifiable answer, as a data source gives them, without a template."""

    question: str
    answer: str
    messages: tuple[Message, ...] = ()
    """Chat messages that the policy gets instead of the question, if the data source has them; the last one is the
    user's."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""


class Prompt(NamedTuple):
    """A problem as the tokens of a prompt. The class is a NamedTuple because Lightning's transfer of batches to the
    device refuses frozen dataclasses."""

    tokens: tuple[int, ...]
    """The whole chat prompt, including the generation prompt."""
    answer: str
    copy: int = 0
    """Number of earlier prompts with the same tokens in the same rollout or evaluation, over all ranks. It makes the
    sampling seeds of equal prompts differ."""
    text: str = ""
    """The tokens as text, special tokens included."""
    messages: tuple[Message, ...] = ()
    """The prompt's chat messages before the chat template was applied, including the system prompt."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""


@dataclass(frozen=True)
class Completion:
    """One completion that an engine sampled for a prompt."""

    tokens: tuple[int, ...]
    """Sampled tokens, including the one that ends the completion if there is one."""
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats at the sampling temperature, under the distribution that was sampled from
    (the policy with AQN's noise, if there is any)."""
    finished: bool
    """True if the engine ended the completion at an end-of-sequence token or stop string, False if it cut it off at
    max_tokens. This is the finish reason that the engine reported."""
    text: str = ""
    """Text of the completion, decoded without special tokens. Engines leave it empty; the rollout loop fills it in."""


@dataclass(frozen=True)
class Experience:
    """One rollout as tensors: B rows, each a prompt and its completion, with rewards and advantages. Position s of a
    per-token field describes token s, not the token after it."""

    tokens: Tensor
    """[B, S] int64, prompt then completion, right-padded."""
    lengths: Tensor
    """[B] int64, tokens of each row that are not padding."""
    sampled: Tensor
    """[B, S] bool, True where the policy sampled the token."""
    mask: Tensor
    """[B, S] bool, True where the token counts in the loss: sampled, scored, not filtered out."""
    sampler_logprobs: Tensor
    """[B, S] fp32 nats from the engine, 0 where ``sampled`` is False."""
    rewards: Tensor
    """[B] fp32, weighted sum of the reward components."""
    scored: Tensor
    """[B] bool, False for rows that no reward could score."""
    advantages: Tensor
    """[B] fp32, exactly 0 for rows without signal."""

    def to(self, device: torch.device) -> Experience:
        """Copy all tensors to a device."""
        return Experience(**{name: tensor.to(device) for name, tensor in vars(self).items()})
