"""The formulas of the memory plan: bytes of each part of a run.

T tokens of a micro-batch, otherwise the letters of ``ModelShape``; c bytes of the compute dtype, r LoRA's rank. Where a
part is a matter of what autograd keeps, the list follows the code: ``policy/lora_product.py``, transformers' blocks,
``policy/packing.py``, ``logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from qerl_pl.memory.shape import ModelShape
from qerl_pl.policy.logprobs import CHUNK_BYTES
from qerl_pl.policy.recompute import Recompute

# Estimates, for which there is no formula. ``callbacks/memory.py`` logs what they are worth on a card.
CONTEXT = 1 * 2**30
"""CUDA context, loaded kernels, workspaces of libraries."""
GRAPHS_PER_LAYER = 20 * 2**20
"""CUDA graphs of the engine, a block."""
FRAGMENTATION = 0.05
"""Share of what a pass takes that torch's allocator reserves on top, and does not give out."""

# Of vLLM 0.32.
KV_BLOCK = 16
"""Tokens in a block of the cache, unless said otherwise."""
SCORED_TOGETHER = 1024
"""Prompt tokens whose logits vLLM makes at once."""


def adapted(shape: ModelShape, targets: Collection[str]) -> int:
    """Sum of N + K over a block's linears that have an adapter: its values a rank."""
    return sum(rows + columns for name, rows, columns in shape.linears if name in targets)


def adapter_values(shape: ModelShape, *, rank: int, targets: Collection[str], train_norms: bool) -> int:
    """Trained values: L r (N + K) over the adapted linears, and 2 L H where both norms are trained."""
    norms = shape.trained_norms * shape.hidden if train_norms else 0
    return shape.num_layers * (rank * adapted(shape, targets) + norms)


def checkpoints(shape: ModelShape, tokens: int, itemsize: int, *, how: Recompute) -> int:
    """Inputs of the n blocks that are recomputed whole, c n T H.

    Where they are offloaded, about four are on the device, on their way or in use.
    """
    return (min(4, how.blocks) if how.offload else how.blocks) * tokens * shape.hidden * itemsize


def block_kept(
    shape: ModelShape, tokens: int, itemsize: int, *, rank: int, targets: Collection[str], fused: bool = False
) -> int:
    """What autograd keeps of one block.

    In the compute dtype what linears read (two normed inputs, the attention's output, the MLP's product), queries, keys
    and values, and of the MLP the gate, its activation and the other factor; x A^T of each adapted linear; A and B in
    the compute dtype; in fp32 the inputs of both norms (and of Qwen3's head norms) and the attention's log-sums. Fused
    norms keep their inputs in the compute dtype and a number for each row in fp32, fused SwiGLU no activation.
    """
    norm_inputs = 2 * shape.hidden + shape.head_norms * (shape.query_width + shape.key_width)
    norm_rows = 2 + shape.head_norms * (shape.num_heads + shape.num_key_heads)
    width = 2 * shape.hidden + 2 * shape.query_width + 2 * shape.key_width + (3 if fused else 4) * shape.inner
    width += rank * sum(name in targets for name, _, _ in shape.linears) + fused * norm_inputs
    fp32 = shape.num_heads + (norm_rows if fused else norm_inputs)
    return tokens * (itemsize * width + 4 * fp32) + itemsize * rank * adapted(shape, targets)


def block_kept_selectively(
    shape: ModelShape, tokens: int, itemsize: int, *, targets: Collection[str], fused: bool = False
) -> int:
    """What is kept of one block that recomputes its element-wise work.

    In the compute dtype its input; what attention has: rotated queries and keys, values, its output; and the results of
    adapted linears, but for the last one's, which nothing asks for, and those that are in the attention's memory
    already: values, and queries and keys where they are rotated in place. The attention's log-sums in fp32.
    """
    width = shape.hidden + 2 * shape.query_width + 2 * shape.key_width
    in_place = ("q_proj", "k_proj") if fused and not shape.head_norms else ()
    shared = ("v_proj", shape.last_linear, *in_place)
    width += sum(rows for name, rows, _ in shape.linears if name in targets and name not in shared)
    return tokens * (itemsize * width + 4 * shape.num_heads)


def blocks_kept(
    shape: ModelShape,
    tokens: int,
    itemsize: int,
    *,
    rank: int,
    targets: Collection[str],
    how: Recompute,
    fused: bool = False,
) -> tuple[int, int]:
    """What all blocks keep, inputs of those that are recomputed whole apart: before backward, and in the last block's.

    The last block is there in full by then. Going on to the blocks before it takes no more, since the whole ones are
    the first.
    """
    full = block_kept(shape, tokens, itemsize, rank=rank, targets=targets, fused=fused)
    if not how.selective:
        return shape.num_layers * full, shape.num_layers * full
    number = shape.num_layers - how.blocks
    if not number:
        return 0, full
    less = block_kept_selectively(shape, tokens, itemsize, targets=targets, fused=fused)
    # The input of a fused norm is in its own dtype, so the block's input is in ``full`` already.
    inputs = 0 if fused else tokens * shape.hidden * itemsize
    return number * less, (number - 1) * less + inputs + full


def block_backward(shape: ModelShape, tokens: int, itemsize: int, *, fused: bool = False) -> int:
    """On top of that, the gradient of the block's output and the most of two moments in the MLP.

    While the last linear goes backward: the gradient of its input and its dequantised weight. While the product goes
    backward: gradients of its two factors (the product itself is gone then, and its gradient in its place); where it is
    fused, they overwrite the factors.
    """
    linear = itemsize * (tokens * shape.inner + shape.largest_packed)
    return itemsize * tokens * shape.hidden + max(linear, 0 if fused else itemsize * tokens * 2 * shape.inner)


def head_backward(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """The final norm and the vocabulary going backward.

    The norm's fp32 input stays. Then it is either the hidden states, their gradient and one chunk of logits in fp32
    with its gradient in the compute dtype, or the norm's own backward: its incoming gradient and three in fp32.
    """
    chunk = min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    vocabulary = 2 * itemsize * tokens * shape.hidden + chunk + (chunk // 2 if itemsize == 2 else chunk)
    norm = tokens * shape.hidden * (itemsize + 3 * 4)
    return 4 * tokens * shape.hidden + max(vocabulary, norm)


def forward_only(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """A forward pass of the trainer without gradients: the MLP with a dequantised weight, or a chunk of logits."""
    mlp = itemsize * (tokens * (3 * shape.inner + 2 * shape.hidden) + shape.largest_packed)
    vocabulary = 2 * itemsize * tokens * shape.hidden + min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    return max(mlp, vocabulary)


def kv_token_bytes(shape: ModelShape, itemsize: int, kv_cache_dtype: str = "auto") -> int:
    """Keys and values of one token, 2 L key_width; one byte each for "fp8" and its kin."""
    return 2 * shape.num_layers * shape.key_width * (1 if kv_cache_dtype.startswith("fp8") else itemsize)


def kv_cache(token_bytes: int, *, block: int, length: int, num_sequences: int) -> int:
    """A cache for so many sequences of so many tokens, in whole blocks, and the block that vLLM keeps for itself."""
    return (num_sequences * ceil(length / block) + 1) * block * token_bytes


def engine_base(shape: ModelShape, itemsize: int, engine_itemsize: int, *, shared_embeddings: bool) -> int:
    """vLLM's weights: packed linears as they are, the others, norms and biases in the engine's compute dtype.

    Embedding and head are the trainer's where they are shared, which they can be only in the trainer's dtype.
    """
    own_embeddings = not shared_embeddings or engine_itemsize != itemsize
    dense = shape.engine_linear_bytes - shape.engine_packed_bytes + shape.other_bytes
    dense += own_embeddings * shape.embedding_bytes
    return shape.engine_packed_bytes + dense // itemsize * engine_itemsize


def engine_pass(shape: ModelShape, itemsize: int, *, batched_tokens: int, num_seqs: int, slot_rank: int) -> int:
    """vLLM's largest forward pass: the MLP at its widest with LoRA's fp32 buffers, or logits.

    Logits are in fp32, and so is what is sampled from.
    """
    mlp = batched_tokens * (itemsize * 3 * (shape.inner + shape.hidden) + 3 * 4 * slot_rank)
    logits = shape.vocabulary * 4 * max(2 * num_seqs, SCORED_TOGETHER)
    return max(mlp, itemsize * batched_tokens * shape.hidden + logits)


def engine_state(shape: ModelShape, *, num_seqs: int, eager: bool) -> int:
    """What vLLM keeps even asleep: counts of every token a sequence (int32 and a bit), and CUDA graphs."""
    counts = num_seqs * (4 * shape.vocabulary + shape.vocabulary // 8)
    return counts + (0 if eager else GRAPHS_PER_LAYER * shape.num_layers)


def slot_rank(rank: int) -> int:
    """LoRA's rank in vLLM's slots: rounded up to what it accepts."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
