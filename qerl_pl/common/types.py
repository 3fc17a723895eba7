"""The data that passes between rollout, reward and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Message = dict[str, str]
"""A turn of a chat: ``{"role": "user", "content": "..."}``."""


class Problem(NamedTuple):
    """A question and its verifiable answer, as a data source gives them, without a template."""

    question: str
    answer: str
    messages: tuple[Message, ...] = ()
    """What the policy is asked, where that is more than the question; the last is the user's."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the row of the data set."""


class Prompt(NamedTuple):
    """A problem ready to be sampled from. A tuple, because Lightning's batch transfer refuses frozen dataclasses."""

    tokens: tuple[int, ...]
    """The whole chat prompt, generation header included."""
    answer: str
    copy: int = 0
    """How many prompts of the same tokens come before it in its rollout, or evaluation, over all ranks."""
    text: str = ""
    """The tokens as text, special tokens included."""
    messages: tuple[Message, ...] = ()
    """The chat that the text was made of, system prompt included."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the row of the data set."""


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one prompt."""

    tokens: tuple[int, ...]
    """Sampled tokens, the end-of-sequence token included where there is one."""
    logprobs: tuple[float, ...]
    """Nats, one a token, at the sampling temperature, under the policy that sampled (noise included)."""
    finished: bool
    """False: cut off at max_tokens (the engine's finish reason, not a search for an end token)."""
    text: str = ""
    """The tokens decoded without special tokens. Engines leave it empty; the rollout loop fills it in."""


@dataclass(frozen=True)
class Experience:
    """Scored rollouts. A per-token field describes the token at its own position, not the next one."""

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
        """The same on another device."""
        return Experience(**{name: tensor.to(device) for name, tensor in vars(self).items()})
