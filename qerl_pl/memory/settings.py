"""Settings of a run that determine how much GPU memory it takes."""

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
GRAPH_SEQUENCES, FEW_GRAPH_SEQUENCES = 512, 64
"""Largest numbers of sequences for which vLLM's decoding steps run entirely as CUDA graphs. The first is the usual one,
up to which vLLM itself captures graphs of the decoder blocks. The second is for GPUs on which memory is short, because
these graphs keep memory for the logits. Without such graphs, the host takes longer to launch the kernels of a step than
the GPU to compute them: with a 7B in steps of up to 64 sequences, with a 0.5B also in steps of 256."""
DRAFTS_BY_SEQUENCES = ((4, 7), (16, 3), (64, 1))
"""Pairs (S, D) for speculative decoding, in ascending order of S: a decoding step of at most S sequences verifies D
drafted tokens per sequence. The first pair whose S is large enough counts. No tokens are drafted if there are more
sequences than the last S, or if the drafted tokens would make the step too large for a CUDA graph."""
CHECKED_TOKENS = 6144
"""Limit on the tokens of a pass in which the trainer checks completions while the engine is awake; a longer row gets a
pass by itself. It is so low that such a pass takes less memory than the engine's own passes."""


@dataclass(frozen=True)
class EngineMemory:
    """Settings of a vLLM engine that determine its GPU memory; most have the names of arguments of ``VLLMEngine``."""

    dtype: str = "auto"
    """Compute dtype; "auto" means the policy's."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Limit on the tokens of one forward pass; None means ``DEFAULT_BATCHED_TOKENS``."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache in bytes; None means as much as a rollout can use or, if that does not fit, as much as
    fits."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    enforce_eager: bool = False
    sleep_level: int = 0
    """Level of vLLM's sleep mode: 0 frees the KV cache, 1 also the weights and the engine's copy of the adapter."""
    graph_sequences: int = GRAPH_SEQUENCES
    """Largest number of sequences of decoding steps that run entirely as CUDA graphs."""
    keeps_cache: bool = False
    """Whether the KV cache stays allocated while the trainer works, because the GPU has memory to spare."""
    one_copy: bool = False
    """Whether the engine uses the trainer's 4-bit weights, where its kernels can read them."""
    dequantises: bool = False
    """Whether the engine dequantises weights to scratch memory in forward passes with many tokens."""
    speculates: bool = False
    """Whether decoding steps verify drafted tokens, in the numbers that ``DRAFTS_BY_SEQUENCES`` gives."""

    @property
    def batched_tokens(self) -> int:
        """Limit on the tokens of one forward pass."""
        return self.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS

    def itemsize(self, policy_itemsize: int) -> int:
        """Return the bytes per value of the engine's compute dtype."""
        return policy_itemsize if self.dtype == "auto" else getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class TeacherMemory:
    """Settings that determine how much GPU memory the teacher of a distillation run takes."""

    shape: ModelShape
    keep: Literal["auto", "gpu", "host"]
    """Location of the teacher's weights while the teacher computes nothing; "auto": the GPU if the run fits with them
    there, else host memory."""
    states: bool
    """Whether the teacher's hidden states at all sampled tokens are kept during the updates."""


@dataclass(frozen=True)
class RunMemory:
    """Settings of a run that determine how much memory it takes on one GPU."""

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
    """LoRA rank of the adapters on experts; None means the default, which ``rank_of_experts`` gives."""
    dropout: bool = False
    """Whether LoRA uses dropout, with which each adapted linear layer keeps a copy of its input for backward."""
    train_norms: bool = False
    state_bytes: int = 8
    """Bytes of optimizer state per trained parameter: 8 for AdamW in fp32, 2 in 8 bits."""
    micro_batch_tokens: int | None = None
    """Largest number of tokens of a training pass; None means that the memory plan chooses it."""
    gradient_checkpointing: Setting = "none"
    """Level of gradient checkpointing (``policy.recompute``); "auto" means the fastest level that fits."""
    fused: bool = False
    """Whether norms, rotary embeddings and SwiGLU are fused kernels, which keep fewer bytes for backward."""
    engine: EngineMemory | None = None
    """Settings of vLLM; None means that transformers samples with the trainer's model."""
    batch_tokens: int = 0
    """Tokens in the KV cache of the transformers engine."""
    teacher: TeacherMemory | None = None
    router_replay: bool = False
    """Whether training computes each token with the experts that vLLM used for it, in a mixture-of-experts model."""
    shared_embeddings: bool = True
    """Whether trainer and engine may share embedding and head; they do so only if both have the same dtype."""

    def recompute(self, num_layers: int) -> Recompute | None:
        """Return the level of gradient checkpointing that the settings name, or None for "auto" (``recompute_of``)."""
        return recompute_of(self.gradient_checkpointing, num_layers)

    def rank_of_experts(self, shape: ModelShape) -> int:
        """Return the LoRA rank of the adapters on a model's experts; 0 if the model has no experts or they get no
        adapters."""
        return expert_rank(self.rank, self.expert_rank, self.targets, shape.experts.chosen)

    def fuses(self, shape: ModelShape) -> bool:
        """Return whether norms, rotary embeddings and SwiGLU of a model are computed by fused kernels."""
        return self.fused and shape.fusable

    def with_completions(self, tokens: int) -> RunMemory:
        """Return the settings with completions of up to ``tokens`` tokens in training and evaluation."""
        return replace(self, completion_tokens=tokens, evaluation_tokens=tokens)

    @property
    def longest_row(self) -> int:
        """Number of tokens of the longest sequence, prompt and completion, that is trained on."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def checked_tokens(self) -> int:
        """Number of tokens of the largest pass in which the trainer checks completions while the engine is awake."""
        return min(check_limit(self.longest_row), self.rows * self.longest_row)

    @property
    def max_model_len(self) -> int:
        """Number of tokens of the longest sequence that is sampled in training or evaluation."""
        return self.prompt_tokens + max(self.completion_tokens, self.evaluation_tokens)


def check_limit(longest_row: int) -> int:
    """Return the limit on the tokens of a forward pass in which the trainer computes log-probabilities of vLLM's
    completions, to compare them with vLLM's: the larger of ``CHECKED_TOKENS`` and ``longest_row``, the tokens of the
    longest prompt and completion together."""
    return max(longest_row, CHECKED_TOKENS)


def state_bytes(optimizer: str) -> int:
    """Return the bytes per trained parameter of the two moments of an optimizer, by its class's name."""
    return 2 if "8bit" in optimizer else 8
