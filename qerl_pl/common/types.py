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
    """Chat that the policy is asked instead of the question, if the data source has one; the user has the last turn."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""


class Prompt(NamedTuple):
    """A problem as tokens. It is a NamedTuple because Lightning's batch transfer refuses frozen dataclasses."""

    tokens: tuple[int, ...]
    """The whole chat prompt, including the generation prompt."""
    answer: str
    copy: int = 0
    """Number of earlier prompts with the same tokens in the rollout or evaluation, over all ranks."""
    text: str = ""
    """The tokens as text, special tokens included."""
    messages: tuple[Message, ...] = ()
    """The chat before the template was applied, including the system prompt."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""


@dataclass(frozen=True)
class Completion:
    """One completion that an engine sampled for a prompt."""

    tokens: tuple[int, ...]
    """Sampled tokens, including the one that ends the completion if there is one."""
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats, at the sampling temperature, under the policy with its noise."""
    finished: bool
    """False if the engine stopped at max_tokens, and not at an end-of-sequence token or stop string; it is the
    engine's finish reason, not a search for an end token."""
    text: str = ""
    """The tokens decoded without special tokens. Engines leave it empty; the rollout loop fills it in."""


@dataclass(frozen=True)
class Experience:
    """Scored rollouts of B rows. Position s of a per-token field describes token s, not the token after it."""

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
