"""Settings of a run that decide its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from qerl_pl.memory.shape import ModelShape
from qerl_pl.model.family import PROJECTIONS
from qerl_pl.policy.lora_experts import expert_rank
from qerl_pl.policy.recompute import Recompute, Setting, recompute_of

DEFAULT_BATCHED_TOKENS = 8192
"""Default limit on the tokens of one forward pass of vLLM on a GPU: enough to keep the GPU busy."""
GRAPH_SEQUENCES = 64
"""vLLM's decoding steps with up to this many sequences run entirely as CUDA graphs, which keep memory for the logits.
With more sequences the GPU takes longer than the host, so graphs would save nothing."""
DRAFTS_BY_SEQUENCES = ((4, 7), (16, 3), (32, 1))
"""Pairs (S, D): a decoding step with up to S sequences of an engine that speculates verifies D drafts per sequence;
with more sequences than the last S, none. D is as many as one more tile of the decode GEMMs holds, so a step with
drafts has at most ``GRAPH_SEQUENCES`` tokens."""
CHECKED_TOKENS = 4096
"""Most tokens of a forward pass of the trainer without gradients while the engine is awake; a pass of this size takes
less memory than the engine's own passes."""


@dataclass(frozen=True)
class EngineMemory:
    """Settings of a vLLM engine that decide how much GPU memory it takes; most have the names of arguments of
    ``VLLMEngine``."""

    dtype: str = "auto"
    """Compute dtype; "auto" means the policy's."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Limit on the tokens of one forward pass; None means ``DEFAULT_BATCHED_TOKENS``."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; None means as much as a rollout can use or, if that does not fit, as much as fits."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    enforce_eager: bool = False
    sleep_level: int = 0
    """While it sleeps, the engine frees the KV cache and, with 1, its weights and its copy of the adapter."""
    one_copy: bool = False
    """Whether the engine uses the trainer's packed weights instead of a copy, where its kernels can read them."""
    dequantises: bool = False
    """Whether the engine dequantises linears to scratch memory in forward passes with many tokens."""
    speculates: bool = False
    """Whether decoding steps verify drafts, with the numbers of ``DRAFTS_BY_SEQUENCES``."""

    def itemsize(self, policy_itemsize: int) -> int:
        """Return the bytes per value of the engine's compute dtype."""
        return policy_itemsize if self.dtype == "auto" else getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class TeacherMemory:
    """The teacher of a run that distils."""

    shape: ModelShape
    keep: Literal["auto", "gpu", "host"]
    """Place of the teacher's weights while the teacher does not score; "auto": the GPU if the run fits with them there,
    else host memory."""
    states: bool
    """Whether the teacher's hidden states at all sampled tokens are kept during the updates."""


@dataclass(frozen=True)
class RunMemory:
    """Settings of a run that decide its memory on one GPU."""

    rows: int
    """Completions per rollout on this GPU."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    completion_tokens: int
    """Tokens of the longest completion that is trained on."""
    evaluation_tokens: int = 0
    """Tokens of the longest completion of an evaluation."""
    itemsize: int = 2
    """Bytes per value of the policy's compute dtype."""
    rank: int = 32
    targets: tuple[str, ...] = PROJECTIONS
    expert_rank: int | None = None
    """Rank of the adapters on experts; None means the default, see ``rank_of_experts``."""
    dropout: bool = False
    """Whether LoRA has dropout, with which each adapted linear keeps a separate copy of its input for backward."""
    train_norms: bool = False
    state_bytes: int = 8
    """Bytes of optimizer state per trained parameter: 8 for AdamW in fp32, 2 in 8 bits."""
    micro_batch_tokens: int | None = None
    """Most tokens of a training pass; None means that the memory plan chooses."""
    gradient_checkpointing: Setting = "none"
    """Activations that backward recomputes (``policy.recompute``); "auto" means the fastest choice that fits."""
    offload_checkpoints: bool = False
    fused: bool = False
    """Whether norms, rotary embeddings and SwiGLU are fused kernels, which keep fewer bytes for backward."""
    engine: EngineMemory | None = None
    """Settings of vLLM; None means that transformers samples with the trainer's model."""
    batch_tokens: int = 0
    """Tokens in the KV cache of the transformers engine."""
    teacher: TeacherMemory | None = None
    router_replay: bool = False
    """Whether training uses the experts that the engine chose, if the base is a mixture."""
    shared_embeddings: bool = True
    """Whether trainer and engine share the memory of embedding and head; they do so only if their dtypes are equal."""

    def recompute(self, num_layers: int) -> Recompute | None:
        """Return the level of gradient checkpointing that the settings name; None and errors as in ``recompute_of``."""
        return recompute_of(self.gradient_checkpointing, num_layers, self.offload_checkpoints)

    def rank_of_experts(self, shape: ModelShape) -> int:
        """Return the rank of the adapters on the experts of a base; 0 if the base has no experts or they get no
        adapters."""
        return expert_rank(self.rank, self.expert_rank, self.targets, shape.experts.chosen)

    def with_completions(self, tokens: int) -> RunMemory:
        """Return the settings with completions of up to ``tokens`` tokens in training and evaluation."""
        return replace(self, completion_tokens=tokens, evaluation_tokens=tokens)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row that is trained on."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def checked_tokens(self) -> int:
        """Number of tokens of the trainer's largest forward pass without gradients while the engine is awake, in which
        completions are checked."""
        return min(check_limit(self.longest_row), self.rows * self.longest_row)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that is sampled, in training or evaluation."""
        return self.prompt_tokens + max(self.completion_tokens, self.evaluation_tokens)


def check_limit(longest_row: int) -> int:
    """Return the limit on the tokens of a forward pass that checks completions of the engine: ``CHECKED_TOKENS``, or
    the longest row if this has more."""
    return max(longest_row, CHECKED_TOKENS)


def state_bytes(optimizer: str) -> int:
    """Return the bytes per trained parameter of the two moments of an optimizer, given by the name of its class."""
    return 2 if "8bit" in optimizer else 8
