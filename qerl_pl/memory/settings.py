"""What of a run's settings decides its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl_pl.base.family import PROJECTIONS
from qerl_pl.policy.recompute import Recompute, Setting, recompute_of

DEFAULT_BATCHED_TOKENS = 8192
"""Tokens in one forward pass of vLLM on a GPU, where nothing else is said: enough to keep it busy."""
CHECKED_TOKENS = 4096
"""Tokens that a pass of the trainer without gradients may have: they take less than the engine's own passes."""


@dataclass(frozen=True)
class EngineMemory:
    """Of a vLLM engine; the names are those of its arguments."""

    dtype: str = "auto"
    """Compute dtype; "auto" is the policy's."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """None: ``DEFAULT_BATCHED_TOKENS``."""
    kv_cache_bytes: int | None = None
    """None: as much as a rollout can use and as fits."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    enforce_eager: bool = False
    sleep_level: int = 0
    """0: asleep it keeps its weights on the device, and gives its cache back alone."""

    def itemsize(self, policy_itemsize: int) -> int:
        """Bytes of the engine's compute dtype, from those of the policy's."""
        return policy_itemsize if self.dtype == "auto" else getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class RunMemory:
    """Of a run, on one GPU."""

    rows: int
    """Completions of a rollout."""
    prompt_tokens: int
    """Of the longest prompt."""
    completion_tokens: int
    """Of the longest completion that is trained on."""
    evaluation_tokens: int = 0
    """Of the longest completion of an evaluation."""
    itemsize: int = 2
    """Bytes of the policy's compute dtype."""
    rank: int = 32
    targets: tuple[str, ...] = PROJECTIONS
    train_norms: bool = False
    state_bytes: int = 8
    """Of the optimizer, for each trained value: 8 for AdamW in fp32, 2 in 8 bits."""
    micro_batch_tokens: int | None = None
    """None: the usual, or what fits."""
    gradient_checkpointing: Setting = "none"
    """What backward recomputes (``policy.recompute``); "auto": what is fastest of what fits."""
    offload_checkpoints: bool = False
    fused: bool = False
    """Norms, rotations and SwiGLU are single kernels, for which less is kept (``policy.elementwise``)."""
    engine: EngineMemory | None = None
    """None: transformers samples with the trainer's own model."""
    batch_tokens: int = 0
    """Of the transformers engine's cache."""
    shared_embeddings: bool = True
    """Trainer and engine hold embedding and head once, where their dtypes are the same."""

    def recompute(self, num_layers: int) -> Recompute | None:
        """The rung that the settings name; None: it is left open.

        Raises:
            ValueError: they name none, or more blocks than the model has.
        """
        setting, offload = self.gradient_checkpointing, self.offload_checkpoints
        return recompute_of(setting, num_layers, offload)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that is trained on."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def checked_tokens(self) -> int:
        """Tokens of the largest pass without gradients while the engine is awake."""
        return min(check_limit(self.longest_row), self.rows * self.longest_row)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that is ever sampled."""
        return self.prompt_tokens + max(self.completion_tokens, self.evaluation_tokens)


def check_limit(longest_row: int) -> int:
    """Most tokens of a pass without gradients while the engine is awake; a row is never cut."""
    return max(longest_row, CHECKED_TOKENS)


def state_bytes(optimizer: str) -> int:
    """Bytes an optimizer keeps for each trained value, by the name of its class: two moments, in fp32 or in 8 bits."""
    return 2 if "8bit" in optimizer else 8
