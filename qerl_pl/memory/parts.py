"""Formulas of the memory plan: the bytes of each part of a run.

Letters: T tokens of a micro-batch; c bytes of the compute dtype; r LoRA's rank; and the letters of ``ModelShape``. The
formulas for activations count the tensors that autograd keeps for backward in ``policy/lora_product.py``,
``policy/packing.py``, ``policy/logprobs.py`` and the decoder blocks of transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from qerl_pl.memory.shape import ModelShape
from qerl_pl.policy.logprobs import CHUNK_BYTES
from qerl_pl.policy.recompute import Recompute

# Estimates for parts without a formula. ``callbacks/memory.py`` logs the measured peak next to the planned one.
CONTEXT = 1 * 2**30
"""CUDA context, loaded kernels, workspaces of libraries."""
GRAPHS_PER_LAYER = 20 * 2**20
"""Bytes of the engine's CUDA graphs per decoder block."""
FRAGMENTATION = 0.05
"""Bytes that torch's allocator reserves in addition to a pass's tensors and cannot use, as a share of the latter."""

# Defaults of vLLM 0.32.
KV_BLOCK = 16
"""Tokens per block of the KV cache, unless the engine's settings say otherwise."""
SCORED_TOGETHER = 1024
"""Prompt tokens whose logits vLLM computes at once."""


def adapted(shape: ModelShape, targets: Collection[str]) -> int:
    """Return the adapter's parameters in one block per unit of rank: the sum of N + K over the linears with an
    adapter."""
    return sum(rows + columns for name, rows, columns in shape.linears if name in targets)


def adapter_values(shape: ModelShape, *, rank: int, targets: Collection[str], train_norms: bool) -> int:
    """Return the number of trained parameters: L r (N + K) over the adapted linears, and trained norms."""
    norms = shape.trained_norms * shape.hidden if train_norms else 0
    return shape.num_layers * (rank * adapted(shape, targets) + norms)


def checkpoints(shape: ModelShape, tokens: int, itemsize: int, *, how: Recompute) -> int:
    """Return the bytes of the inputs of the n blocks that backward recomputes as a whole, c n T H.

    If the inputs are offloaded to host memory, about four are on the GPU at a time: in use or being copied.
    """
    return (min(4, how.blocks) if how.offload else how.blocks) * tokens * shape.hidden * itemsize


def block_kept(
    shape: ModelShape, tokens: int, itemsize: int, *, rank: int, targets: Collection[str], fused: bool = False
) -> int:
    """Return the bytes that autograd keeps of one block without recomputation.

    In the compute dtype: the inputs of linears (two normalised inputs, the attention's output, the MLP's product);
    queries, keys and values; the MLP's gate, its activation and the other factor; x A^T of each adapted linear; A and
    B. In fp32: the inputs of all norms (query and key norms included) and the attention's log-sum-exp. Fused norms keep
    their inputs in the compute dtype and one fp32 number per row; fused SwiGLU keeps no activation.
    """
    norm_inputs = shape.block_norms * shape.hidden + shape.head_norms * (shape.query_width + shape.key_width)
    norm_rows = shape.block_norms + shape.head_norms * (shape.num_heads + shape.num_key_heads)
    width = 2 * shape.hidden + 2 * shape.query_width + 2 * shape.key_width + (3 if fused else 4) * shape.inner
    width += rank * sum(name in targets for name, _, _ in shape.linears) + fused * norm_inputs
    fp32 = shape.num_heads + (norm_rows if fused else norm_inputs)
    return tokens * (itemsize * width + 4 * fp32) + itemsize * rank * adapted(shape, targets)


def block_kept_selectively(
    shape: ModelShape, tokens: int, itemsize: int, *, targets: Collection[str], fused: bool = False
) -> int:
    """Return the bytes that autograd keeps of one block whose element-wise operations backward recomputes.

    In the compute dtype: the block's input; the rotated queries and keys, the values and the output of attention; and
    the outputs of adapted linears. Not counted are the output of the last linear, which backward does not need, and
    outputs that share memory with attention's inputs: the values, and queries and keys if they are rotated in place. In
    fp32: the attention's log-sum-exp.
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
    """Return the bytes that all blocks keep, without the inputs of blocks that are recomputed as a whole.

    Returns:
        The bytes before backward, and the bytes while backward is in the last block, whose activations have then been
        recomputed. Backward through the earlier blocks takes no more, since recomputed blocks are the first ones.
    """
    full = block_kept(shape, tokens, itemsize, rank=rank, targets=targets, fused=fused)
    if not how.selective:
        return shape.num_layers * full, shape.num_layers * full
    number = shape.num_layers - how.blocks
    if not number:
        return 0, full
    less = block_kept_selectively(shape, tokens, itemsize, targets=targets, fused=fused)
    # A fused norm keeps its input in the compute dtype, so ``full`` includes the block's input already.
    inputs = 0 if fused else tokens * shape.hidden * itemsize
    return number * less, (number - 1) * less + inputs + full


def block_backward(shape: ModelShape, tokens: int, itemsize: int, *, fused: bool = False) -> int:
    """Return the bytes that backward through one block needs in addition to the activations.

    They are the gradient of the block's output, and the larger of two moments in the MLP. In backward of the last
    linear: the gradient of its input, and its dequantised weight. In backward of the product: the gradients of its two
    factors, which overwrite the factors if SwiGLU is fused; the product is freed by then, and its gradient takes its
    place.
    """
    linear = itemsize * (tokens * shape.inner + shape.largest_packed)
    return itemsize * tokens * shape.hidden + max(linear, 0 if fused else itemsize * tokens * 2 * shape.inner)


def head_backward(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes that forward and backward through the final norm and the language-model head need.

    They are the norm's fp32 input, and the larger of two moments. In forward of the head: the hidden states, the
    gradient of their log-probabilities, and one chunk of logits in fp32 with its gradient in the compute dtype. In
    backward of the norm: its output's gradient, and three fp32 tensors of the same shape.
    """
    chunk = min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    vocabulary = 2 * itemsize * tokens * shape.hidden + chunk + (chunk // 2 if itemsize == 2 else chunk)
    norm = tokens * shape.hidden * (itemsize + 3 * 4)
    return 4 * tokens * shape.hidden + max(vocabulary, norm)


def forward_only(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of a trainer's forward pass without gradients: an MLP and a dequantised weight, or logits."""
    mlp = itemsize * (tokens * (3 * shape.inner + 2 * shape.hidden) + shape.largest_packed)
    vocabulary = 2 * itemsize * tokens * shape.hidden + min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    return max(mlp, vocabulary)


def kv_token_bytes(shape: ModelShape, itemsize: int, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes of one token's keys and values, of which there are 2 L key_width; "fp8..." takes one byte
    each."""
    return 2 * shape.num_layers * shape.key_width * (1 if kv_cache_dtype.startswith("fp8") else itemsize)


def kv_cache(token_bytes: int, *, block: int, length: int, num_sequences: int) -> int:
    """Return the bytes of a KV cache for ``num_sequences`` sequences of ``length`` tokens.

    The cache consists of whole blocks and one more, which vLLM reserves.
    """
    return (num_sequences * ceil(length / block) + 1) * block * token_bytes


def engine_base(shape: ModelShape, itemsize: int, engine_itemsize: int, *, shared_embeddings: bool) -> int:
    """Return the bytes of vLLM's weights: packed linears, and everything else in the engine's compute dtype.

    Embedding and head take no memory if they are shared with the trainer, which needs the trainer's dtype.
    """
    own_embeddings = not shared_embeddings or engine_itemsize != itemsize
    dense = shape.engine_linear_bytes - shape.engine_packed_bytes + shape.other_bytes
    dense += own_embeddings * shape.embedding_bytes
    return shape.engine_packed_bytes + dense // itemsize * engine_itemsize


def engine_pass(
    shape: ModelShape, itemsize: int, *, batched_tokens: int, num_seqs: int, slot_rank: int, dequantises: bool = False
) -> int:
    """Return the bytes of vLLM's largest forward pass: the MLP with LoRA's fp32 buffers, or the logits.

    With ``dequantises``, the MLP also has a dense copy of its fused gate and up projections.

    Sampling holds the logits twice in fp32.
    """
    mlp = batched_tokens * (itemsize * 3 * (shape.inner + shape.hidden) + 3 * 4 * slot_rank)
    mlp += dequantises * itemsize * 2 * shape.inner * shape.hidden
    logits = shape.vocabulary * 4 * max(2 * num_seqs, SCORED_TOGETHER)
    return max(mlp, itemsize * batched_tokens * shape.hidden + logits)


def engine_state(shape: ModelShape, *, num_seqs: int, eager: bool) -> int:
    """Return the bytes that vLLM keeps while it sleeps: per sequence an int32 and a bit per token id, and CUDA
    graphs."""
    counts = num_seqs * (4 * shape.vocabulary + shape.vocabulary // 8)
    return counts + (0 if eager else GRAPHS_PER_LAYER * shape.num_layers)


def slot_rank(rank: int) -> int:
    """Return the rank of vLLM's adapter slots: ``rank`` rounded up to one that vLLM supports."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
