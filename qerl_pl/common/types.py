"""Data types that pass between rollout, reward and loss. Letters: B rows of a rollout (a prompt with a completion
each), S tokens of the longest row, T tokens of one row, L decoder blocks that have experts, k experts per token."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # processes that only compute rewards use these types, and importing torch would take them a second
    from torch import Tensor

Message = dict[str, str]
"""Message of a chat: ``{"role": "user", "content": "..."}``."""


class Problem(NamedTuple):
    """A question and its verifiable answer from a data source, before the chat template is applied."""

    question: str
    answer: str
    messages: tuple[Message, ...] = ()
    """Chat messages, the last of the role "user", that the policy gets instead of the question; empty if the policy
    gets the question."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""


class Prompt(NamedTuple):
    """Prompt as tokens, with the problem's answer; a NamedTuple, because Lightning refuses frozen dataclasses when it
    moves a batch to the device."""

    tokens: tuple[int, ...]
    """Tokens of the whole chat prompt, including the generation prompt."""
    answer: str
    copy: int = 0
    """Number of earlier prompts with equal tokens in the rollout or evaluation, by which their seeds differ."""
    text: str = ""
    """Text of the prompt's tokens, special tokens included."""
    messages: tuple[Message, ...] = ()
    """The prompt's chat messages before the chat template was applied, including the system prompt."""
    row: dict[str, Any] = {}  # noqa: RUF012 (nobody writes to it)
    """All columns of the problem's row in the data set."""
    conversational: bool = False
    """Whether the data source gave messages instead of a question."""

    def with_own_row(self) -> Prompt:
        """Return a copy whose row and messages are not shared with other prompts, so that a reward may change them."""
        return self._replace(messages=deepcopy(self.messages), row=deepcopy(self.row))


@dataclass(frozen=True)
class Completion:
    """One completion that an engine sampled for a prompt."""

    tokens: tuple[int, ...]
    """Sampled tokens, including the end-of-sequence token, or the token that completes a stop string."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, in nats at the sampling temperature, under the distribution from which it was
    sampled: the policy's, with noise on the norm weights (AQN) if the rollout has noise."""
    finished: bool
    """Whether the completion ended at an end token or stop string; False if it was cut off at max_tokens."""
    text: str = ""
    """Text of the completion with special tokens, but without the token that ended it; the rollout loop sets it."""
    seed: int | None = None
    """Key of the random noise with which the tokens were sampled (``policy.margins``); None if there is none."""
    routes: Tensor | None = field(default=None, compare=False, repr=False)
    """[T, L, k] integers: indices of the k experts that computed each token of prompt and completion except the last,
    which goes through no layer. None: the model has no experts, or training does not use the engine's choice. The
    rollout loop converts the tensor to uint8 (int16 for more than 256 experts)."""


class Experience(NamedTuple):
    """One rollout as tensors: B rows, each a prompt and its completion, with advantages. In fields [B, S], where S is
    the number of tokens of the longest row, position s is about token s (e.g. its log-probability), not about token s +
    1."""

    tokens: Tensor
    """[B, S] int64, token ids of prompt and completion, right-padded."""
    lengths: Tensor
    """[B] int64, number of tokens of each row without padding."""
    sampled: Tensor
    """[B, S] bool, True where the policy sampled the token."""
    mask: Tensor
    """[B, S] bool, True for tokens in the loss: sampled tokens of completions that have a reward, except those that are
    left out because they were cut off, or because dynamic sampling found no group to train on."""
    sampler_logprobs: Tensor
    """[B, S] fp32, log-probabilities in nats that the rollout engine returned; 0 at tokens that it did not sample."""
    scored: Tensor
    """[B] bool, False for rows that no reward could score."""
    advantages: Tensor
    """[B] fp32, exactly 0 for completions without a reward and for groups whose rewards are all equal."""
    routes: Tensor | None = None
    """[B, S, L, k] uint8 or int16, indices of the experts that computed each token in the engine; 0 for a row's last
    token and for padding. None: in training the trainer's routers choose, or the model has no experts."""
