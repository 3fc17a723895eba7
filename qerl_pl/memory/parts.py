"""Formulas of the memory plan: the bytes of GPU memory that each part of a run takes, such as the activations of a
decoder block.

Letters: T tokens of a micro-batch; c bytes per value of the compute dtype; r LoRA's rank; L blocks; H hidden size; N
outputs and K inputs of a linear layer. The formulas for activations count the tensors that autograd keeps for backward
in ``policy/lora_product.py``, ``policy/attention.py``, ``policy/logprobs.py`` and the decoder blocks of transformers.
"""

from collections.abc import Collection
from math import ceil

from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES, EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape
from qerl_pl.policy.delta_net import GROUP_TOKENS
from qerl_pl.policy.logprobs import CHUNK_BYTES
from qerl_pl.policy.lora_experts import MULTIPLE
from qerl_pl.policy.recompute import Recompute

# Estimates for those parts of a run's memory for which there is no formula. To check them, compare the predicted and
# the measured peak of a run, which ``callbacks/memory.py`` logs.
CONTEXT = 1 * 2**30
"""Bytes of the CUDA context, loaded kernels and workspaces of libraries."""
GRAPHS_PER_LAYER = 20 * 2**20
"""Bytes that vLLM's CUDA graphs take per decoder block. With speculative decoding, vLLM captures one more set of
graphs, which takes as much, for each possible number of drafted tokens."""
GRAPHS_PER_COUNT = 1 * 2**20
"""Bytes of the CUDA graph of a whole decoding step (``hopper/decoding_graphs.py``) with one given number of
sequences."""
FRAGMENTATION = 0.05
"""Bytes lost to fragmentation in torch's allocator, as a share of the bytes of tensors that exist only during a forward
or backward pass."""
SCAN_BYTES = 52
"""Bytes that backward through the recurrence of a gated delta net takes per token and per element of queries and
values."""

# Defaults of vLLM 0.32.
KV_BLOCK = 16
"""Tokens per block of the KV cache, unless the engine's settings say otherwise."""
SCORED_TOGETHER = 1024
"""Prompt tokens whose logits vLLM computes at once."""
VOCABULARY = 64
"""Number to a multiple of which vLLM pads vocabularies."""


def adapted(shape: ModelShape, targets: Collection[str]) -> list[tuple[int, list[tuple[str, int, int]]]]:
    """Return, for each kind of decoder block, the number of such blocks, and those linear layers of such a block that
    ``targets`` names."""
    return [(number, [linear for linear in linears if linear[0] in targets]) for number, linears in shape.linears]


def adapted_values(shape: ModelShape, targets: Collection[str]) -> list[tuple[int, int]]:
    """Return, for each kind of decoder block, the number of such blocks, and the number of LoRA parameters of one such
    block at rank 1: outputs plus inputs of its linear layers in ``targets``."""
    kinds = adapted(shape, targets)
    return [(number, sum(rows + columns for _, rows, columns in linears)) for number, linears in kinds]


def adapted_experts(shape: ModelShape) -> int:
    """Return the number of LoRA parameters of all experts of one block at rank 1: per expert, an A for gate and up
    together, a B for each of the two, and A and B of down."""
    return shape.experts.num * (2 * shape.hidden + 3 * shape.experts.inner)


def adapter_values(shape: ModelShape, run: RunMemory) -> int:
    """Return the number of trained parameters of a run: those of LoRA and, if it trains them, those of norms."""
    norms = shape.trained_norms * shape.hidden if run.train_norms else 0
    values = run.rank * sum(number * values for number, values in adapted_values(shape, run.targets))
    values += shape.experts.layers * run.rank_of_experts(shape) * adapted_experts(shape)
    return values + shape.num_layers * norms


def expert_factors(shape: ModelShape, itemsize: int, expert_rank: int) -> int:
    """Return the bytes of the LoRA matrices, with padded rank, of all experts of one MoE layer."""
    return itemsize * ceil(expert_rank / MULTIPLE) * MULTIPLE * adapted_experts(shape)


def checkpoints(shape: ModelShape, tokens: int, itemsize: int, *, how: Recompute) -> int:
    """Return the bytes of GPU memory for the inputs [T, H] of those blocks that backward recomputes from their inputs.
    If they are offloaded to host memory, about four of them are on the GPU at a time, in use or being copied."""
    return (min(4, how.blocks) if how.offload else how.blocks) * tokens * shape.hidden * itemsize


def experts_kept(shape: ModelShape, itemsize: int) -> int:
    """Return the bytes per token that the experts of one MoE layer keep for backward: for each chosen expert, the
    outputs of two linear layers, two int64 indices and an fp32 weight; and two fp32 copies of the router's
    probabilities."""
    sizes = shape.experts
    return sizes.chosen * (2 * itemsize * sizes.inner + 20) + 8 * sizes.num


def routes(shape: ModelShape, run_tokens: int, pass_tokens: int) -> int:
    """Return the bytes of the tensors with which training repeats vLLM's choice of experts (``model.router_replay``).
    For each token and layer, they are the indices of the chosen experts, and a byte for the number of those experts
    that the trainer's router would not have chosen. They exist once for all tokens of a rollout, and twice for those of
    a pass."""
    return (shape.experts.route_bytes + shape.experts.layers) * (run_tokens + 2 * pass_tokens)


def recorded_routes(shape: ModelShape, slots: int) -> int:
    """Return the bytes of vLLM's record of the experts that computed each token: an int16 per MoE layer and chosen
    expert for each slot (token) of the KV cache."""
    return 2 * shape.experts.layers * shape.experts.chosen * (slots + 1)


def block_kept(shape: ModelShape, run: RunMemory, tokens: int) -> int:
    """Return the bytes of the activations that autograd keeps for backward of one decoder block, if nothing is
    recomputed.

    In the compute dtype: the inputs of linear layers (two normalised inputs, the attention's output, the MLP's
    product); queries, keys and values; the MLP's gate, its activation and up's output; x A^T of each linear layer with
    an adapter; A and B. In fp32: the inputs of all norms and the attention's log-sum-exp. Fused norms keep their inputs
    in the compute dtype and one fp32 number for each vector; fused SwiGLU does not keep the gate's activation.

    If blocks are of several kinds (with attention or recurrent, with experts or with a dense MLP), every block counts
    with the kinds that keep more. A recurrent layer keeps, in the compute dtype, the inputs and outputs of the
    recurrence, the gate and the gated output; and, in fp32, copies of the gate and of the input of the layer's norm.
    The tensors of a shared expert are added to those of the chosen experts.

    With LoRA dropout, each linear layer with an adapter keeps, instead of its input, a copy of the input with zeros for
    dropped values, and a mask of one byte per value. Backward of attention needs its output in any case.
    """
    itemsize, fused = run.itemsize, run.fuses(shape)
    norm_inputs = shape.block_norms * shape.hidden + shape.head_norms * (shape.query_width + shape.key_width)
    norm_rows = shape.block_norms + shape.head_norms * (shape.num_heads + shape.num_key_heads)
    sizes = shape.recurrent
    mixer = max(2 * shape.query_width + 2 * shape.key_width, sizes.conv_width + 3 * sizes.value_width)
    inputs = itemsize * (2 * shape.hidden + shape.inner)
    chosen_only = experts_kept(shape, itemsize)
    # ``width`` and ``inputs`` below count a dense MLP, of which a shared expert is one
    chosen_only -= itemsize * (3 if fused else 4) * (shape.inner - shape.experts.shared)
    chosen_only = max(0, chosen_only + itemsize * shape.hidden * (shape.experts.shared > 0))
    blocks = [linears for _, linears in adapted(shape, run.targets)]
    if run.dropout:
        inputs = (itemsize + 1) * max(sum(columns for _, _, columns in linears) for linears in blocks)
    width = mixer + (2 if fused else 3) * shape.inner
    width += run.rank * max(map(len, blocks)) + fused * norm_inputs
    fp32 = shape.num_heads + (norm_rows if fused else norm_inputs) + 2 * sizes.value_width
    linears = itemsize * run.rank * max(values for _, values in adapted_values(shape, run.targets))
    linears += expert_factors(shape, itemsize, run.rank_of_experts(shape))
    return tokens * (inputs + itemsize * width + 4 * fp32 + chosen_only) + linears


def block_kept_selectively(shape: ModelShape, run: RunMemory, tokens: int) -> int:
    """Return the bytes of the activations that autograd keeps for backward of one decoder block, if element-wise
    operations are recomputed.

    In the compute dtype: the block's input; the rotated queries and keys, the values and the output of attention; and
    the outputs of linear layers with adapters, except the last one, which backward does not need, and those that share
    memory with attention's inputs: the values, and queries and keys if they are rotated in place. In fp32: the
    attention's log-sum-exp. With LoRA dropout, the outputs of layers with adapters are recomputed too.
    """
    sizes, expert_rank = shape.recurrent, run.rank_of_experts(shape)
    width = shape.hidden + max(2 * shape.query_width + 2 * shape.key_width, sizes.conv_width + sizes.value_width)
    in_place = ("q_proj", "k_proj") if run.fuses(shape) and not shape.head_norms else ()
    shared = ("v_proj", shape.last_linear, *in_place)
    if not run.dropout:
        outputs = set(run.targets) - set(shared)
        width += max(sum(rows for _, rows, _ in linears) for _, linears in adapted(shape, outputs))
    # the output of a mixture, and its input if experts have adapters
    width += shape.hidden * ((shape.experts.num > 0) + (expert_rank > 0))
    kept = tokens * (run.itemsize * width + 4 * shape.num_heads + experts_kept(shape, run.itemsize))
    return kept + expert_factors(shape, run.itemsize, expert_rank)


def blocks_kept(shape: ModelShape, run: RunMemory, tokens: int, *, how: Recompute) -> tuple[int, int]:
    """Return the bytes of the activations that all decoder blocks together keep for backward, at two moments: before
    backward, and during backward of the last block, after its activations have been recomputed.

    The inputs of the blocks whose whole forward pass backward repeats are not included; ``checkpoints`` counts them.
    These blocks are the first ones, so backward of a block before the last one needs at most as much memory.
    """
    full = block_kept(shape, run, tokens)
    if not how.selective:
        return shape.num_layers * full, shape.num_layers * full
    number = shape.num_layers - how.blocks
    if not number:
        return 0, full
    less = block_kept_selectively(shape, run, tokens)
    # A fused norm keeps its input in the compute dtype, so ``full`` already includes the input of the block.
    inputs = 0 if run.fuses(shape) else tokens * shape.hidden * run.itemsize
    return number * less, (number - 1) * less + inputs + full


def block_backward(shape: ModelShape, run: RunMemory, tokens: int) -> int:
    """Return the bytes that backward through one decoder block needs in addition to the activations kept for it.

    They are the gradient of the block's output, and the larger of what two moments in the MLP need. Backward of the
    last linear layer needs the gradient of its input, and its dequantised weight. Backward of SwiGLU's product
    silu(gate) * up needs the gradients of the two factors, which overwrite the factors if SwiGLU is fused; the
    product's gradient does not count then, because it takes the memory of the product. In a recurrent layer there is a
    third moment, backward of the recurrence of one group of rows, which are padded and computed together (at most
    ``GROUP_TOKENS`` tokens, or one longer row). In an MoE layer, each expert that computes a token has at most four
    tensors of the expert's inner size and two gradients of its input per token; the gradients of adapters on experts
    exist twice in fp32.
    """
    itemsize, fused = run.itemsize, run.fuses(shape)
    scanned = min(tokens, max(GROUP_TOKENS, run.longest_row))
    scan = SCAN_BYTES * scanned * (shape.recurrent.query_width + shape.recurrent.value_width)
    linear = itemsize * (tokens * shape.inner + shape.largest_packed)
    row = shape.experts.chosen * (2 * shape.hidden + 4 * shape.experts.inner)
    linear = max(linear, itemsize * (tokens * row + shape.largest_packed))
    linear += expert_factors(shape, 8, run.rank_of_experts(shape))
    return itemsize * tokens * shape.hidden + max(linear, 0 if fused else itemsize * tokens * 2 * shape.inner, scan)


def head_backward(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes that forward and backward through the final norm and the language-model head need: the norm's
    input in fp32, and the larger of two moments. Forward of the head needs the hidden states, the gradient of the
    log-probabilities with respect to them, and one chunk of logits in fp32 with its gradient in the compute dtype.
    Backward of the norm needs the gradient of its output, and three fp32 tensors of its shape.
    """
    chunk = min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    vocabulary = 2 * itemsize * tokens * shape.hidden + chunk + (chunk // 2 if itemsize == 2 else chunk)
    norm = tokens * shape.hidden * (itemsize + 3 * 4)
    return 4 * tokens * shape.hidden + max(vocabulary, norm)


def forward_only(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the peak bytes of a forward pass of a transformers model without gradients. It is the larger of what two
    moments need: the MLP needs its activations and a dequantised weight; the language-model head needs the hidden
    states and one chunk of logits (at most ``CHUNK_BYTES``)."""
    rows = shape.experts.chosen * (3 * shape.experts.inner + shape.hidden)
    mlp = itemsize * (tokens * (max(3 * shape.inner, rows) + 2 * shape.hidden) + shape.largest_packed)
    vocabulary = 2 * itemsize * tokens * shape.hidden + min(CHUNK_BYTES, 4 * tokens * shape.vocabulary)
    return max(mlp, vocabulary)


def kv_token_bytes(shape: ModelShape, itemsize: int, kv_cache_dtype: str = "auto") -> int:
    """Return the bytes that one token takes in the KV cache: keys and values, ``key_width`` numbers each, in each layer
    with attention, of one byte each if ``kv_cache_dtype`` starts with fp8, else of ``itemsize`` bytes."""
    layers = shape.num_layers - shape.recurrent.num_layers
    return 2 * layers * shape.key_width * (1 if kv_cache_dtype.startswith("fp8") else itemsize)


def recurrent_state(shape: ModelShape, itemsize: int) -> int:
    """Return the bytes of vLLM's cache per sequence and recurrent layer: fp32 state, and the convolution's inputs."""
    sizes = shape.recurrent
    return 4 * sizes.state_values + itemsize * sizes.conv_width * sizes.conv_tokens


def kv_cache(
    shape: ModelShape, itemsize: int, kv_cache_dtype: str = "auto", *, block: int, length: int, num_sequences: int
) -> int:
    """Return the bytes of vLLM's cache for ``num_sequences`` sequences of ``length`` tokens.

    Every sequence takes a whole number of cache blocks of ``block`` tokens, and vLLM reserves one further block in
    total. In a model with recurrent layers, ``block`` is multiplied by the smallest integer with which a block's keys
    and values in one layer take at least as many bytes as a recurrent state. vLLM divides the layers into groups of one
    kind, attention or recurrent, and a sequence needs one block for each group of recurrent layers.
    """
    token = kv_token_bytes(shape, itemsize, kv_cache_dtype)
    recurrent = shape.recurrent.num_layers
    if not recurrent:
        return (num_sequences * ceil(length / block) + 1) * block * token
    attention = shape.num_layers - recurrent
    block *= ceil(recurrent_state(shape, itemsize) * attention / (token * block))
    few, many = sorted((recurrent, attention))
    group = many if many < 1.25 * few else few  # as vLLM chooses it
    blocks = ceil(attention / group) * ceil(length / block) + ceil(recurrent / group)
    return (num_sequences * blocks + 1) * block * token * group // attention


def engine_base(shape: ModelShape, run: RunMemory, engine: EngineMemory) -> int:
    """Return the bytes of vLLM's weights. Embedding and output head are not counted if vLLM shares them with the
    trainer, which requires that both have the same dtype, and that vLLM does not pad the vocabulary."""
    itemsize = engine.itemsize(run.itemsize)
    own_embeddings = not run.shared_embeddings or itemsize != run.itemsize or shape.vocabulary % VOCABULARY > 0
    dense = shape.engine_linear_bytes - shape.engine_packed_bytes + shape.other_bytes
    dense += own_embeddings * shape.embedding_bytes
    return shape.engine_packed_bytes + dense // run.itemsize * itemsize


def engine_pass(shape: ModelShape, run: RunMemory, engine: EngineMemory) -> int:
    """Return the peak bytes of vLLM's largest forward pass, the larger of two moments: an MLP, with LoRA's fp32 buffers
    and, if vLLM dequantises weights in large passes, dequantised weights of gate and up; and sampling, with two fp32
    copies of the logits."""
    itemsize, tokens = engine.itemsize(run.itemsize), engine.batched_tokens
    mlp = tokens * (itemsize * 3 * (shape.inner + shape.hidden) + 3 * 4 * slot_rank(run.rank))
    if engine.dequantises and itemsize == 2 and shape.fitting_bytes:  # only an NVFP4 base has linears that fit
        mlp += itemsize * 2 * shape.inner * shape.hidden
    logits = shape.vocabulary * 4 * max(2 * engine.max_num_seqs, SCORED_TOGETHER)
    return max(mlp, itemsize * tokens * shape.hidden + logits)


def expert_workspace(shape: ModelShape, itemsize: int, *, batched_tokens: int) -> int:
    """Return the bytes that vLLM's kernels for MoE layers allocate once, for two results per token and chosen expert.
    The first is as large as the outputs of gate and up together, the second as large as SwiGLU's product; each is at
    least as large as the expert's output."""
    sizes, hidden = shape.experts, shape.hidden
    return itemsize * batched_tokens * sizes.chosen * (max(2 * sizes.inner, hidden) + max(sizes.inner, hidden))


def engine_state(shape: ModelShape, engine: EngineMemory, *, length: int) -> int:
    """Return the bytes that vLLM keeps even while it sleeps: the model's CUDA graphs; those of whole decoding steps of
    up to ``graph_sequences`` sequences, with two fp32 copies of the logits of that many sequences (models with
    recurrent layers have no such graphs); and, for each sequence, an int32 and a bit per token of the vocabulary for
    repetition penalties. With speculative decoding, vLLM also has a set of graphs for each number of drafted tokens,
    logits for the drafted tokens, and the tokens of all sequences, up to ``length`` int32 each, in which it looks for
    drafts.
    """
    num_seqs = engine.max_num_seqs
    counts = num_seqs * (4 * shape.vocabulary + shape.vocabulary // 8)
    sets, rows = 1, num_seqs
    if engine.speculates and not shape.recurrent.num_layers:  # vLLM drafts nothing in models with recurrent layers
        sets += len(DRAFTS_BY_SEQUENCES)
        rows = max(rows, *(min(num_seqs, most) * (1 + drafts) for most, drafts in DRAFTS_BY_SEQUENCES))
        counts += num_seqs * 4 * length
    rows = 0 if shape.recurrent.num_layers else min(rows, engine.graph_sequences)
    graphs = sets * GRAPHS_PER_LAYER * shape.num_layers + rows * (GRAPHS_PER_COUNT + 2 * 4 * shape.vocabulary)
    return counts + (0 if engine.enforce_eager else graphs)


def adapter_slots(shape: ModelShape, run: RunMemory, engine: EngineMemory) -> int:
    """Return the bytes of GPU memory in which vLLM holds the policy's adapter. They are more than those of the adapter
    in the trainer: vLLM rounds the rank up (``slot_rank``), and has a copy of the matrix A for each of gate and up of
    an expert, which share one in the trainer."""
    values = slot_rank(run.rank) * sum(number * values for number, values in adapted_values(shape, run.targets))
    if expert_rank := run.rank_of_experts(shape):
        of_experts = adapted_experts(shape) + shape.experts.num * shape.hidden
        values += slot_rank(max(MULTIPLE, expert_rank)) * shape.experts.layers * of_experts
    return engine.itemsize(run.itemsize) * values


def slot_rank(rank: int) -> int:
    """Return the smallest rank of adapter slots that vLLM supports and that is at least ``rank``."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
