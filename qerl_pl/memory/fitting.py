"""Choose the memory settings that a run leaves open: micro-batch size, gradient checkpointing and KV cache size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import count
from math import ceil
from typing import NamedTuple

from qerl_pl.memory import parts
from qerl_pl.memory.plan import Plan, plan
from qerl_pl.memory.settings import FEW_GRAPH_SEQUENCES, EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape
from qerl_pl.policy.recompute import Recompute, Setting, ladder

GIB = 2**30
USUAL_MICRO_BATCH, LARGEST_MICRO_BATCH = 16384, 32768
"""Numbers of tokens of a micro-batch if memory suffices. The first is for 7B and larger models, which train hardly
faster with more, the second for the smallest models."""
BLOCK_WORK = 1.5e12
"""Product of the tokens of a micro-batch and the parameters of a decoder block. If it is smaller than this, the host
launches a block's kernels more slowly than the GPU computes them: on an H200 machine, it took about 5 ms for the
forward pass of a block, in which the GPU computes 16384 tokens of a 3B's block."""
AMPLE = 0.85
"""Share of a GPU's memory in which a run must fit for its KV cache to stay allocated during training."""
HEADROOM = 0.04
"""Share of the GPU's memory that a memory plan leaves free, because its predictions may be too low by that much."""
STEP = 256
"""Distance, in tokens, between the micro-batch sizes that are tried; a chosen size is a multiple of it, or exactly the
longest prompt and completion together."""

LARGE_STEP = 4096
"""Distance, in tokens, between the sizes above ``USUAL_MICRO_BATCH`` that are tried. It is so large that small changes
of the free memory seldom change the size of a micro-batch, and with it the last bits of gradients."""

# The constants were measured with a 7B model on one H200 (NVFP4, LoRA of rank 32, packed rows): times of passes are
# within 1 % of (tokens + OVERHEAD) * (1 + share) times a constant, from 4096 to 16384 tokens. The overhead, the time of
# dequantisation and kernel launches, grows with the number of parameters as the time of matrix products does, so the
# constants are close to right for other model sizes, except for models below 3B, whose passes wait for the host to
# launch kernels (``BLOCK_WORK``).
OVERHEAD = 600
"""Time of a training pass that does not depend on its number of tokens, in units of the time per token."""
# Extra time of recomputation, as a share of the time of a pass without recomputation. WHOLE: every block is recomputed,
# except its last matrix product, which makes it less than the share of a forward pass. SELECTIVE: only element-wise
# operations are recomputed.
WHOLE, SELECTIVE = 0.33, 0.09
FUSED_WHOLE, FUSED_SELECTIVE = 0.31, 0.023  # if norms, rotary embeddings and SwiGLU are fused kernels
OFFLOAD = 0.07  # of copying the blocks' inputs to host memory and back, as a share of a pass that recomputes all


def fitted(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """Plan the memory of a run on a GPU, and choose the settings that the user has left open. The result may exceed the
    GPU's memory: the caller has to compare its peak with ``usable``.

    A micro-batch has ``USUAL_MICRO_BATCH`` tokens or as many as fit, but no fewer than the longest prompt and
    completion together. The level of gradient checkpointing is the one with which a training pass takes the least time
    per token or, if none fits, the least memory. The KV cache holds all sequences of a rollout at their maximum length
    or as many as fit, and at least one. If this leaves memory to spare, the KV cache stays allocated during training,
    and micro-batches of models with small blocks are larger (``usual_micro_batch``). Decoding steps of many sequences
    run as CUDA graphs if that changes neither the level of gradient checkpointing nor the KV cache.
    """
    if run.teacher is not None and run.teacher.keep == "auto":
        kept = [replace(run, teacher=replace(run.teacher, keep=place)) for place in ("gpu", "host")]
        plans = [fitted(shape, one, gpu_bytes) for one in kept]
        return next((one for one in plans if one.peak <= usable(gpu_bytes)), plans[-1])
    many, engine = _fitted(shape, run, gpu_bytes), run.engine
    if engine is None or engine.max_num_seqs <= FEW_GRAPH_SEQUENCES:
        return many
    few = _fitted(shape, replace(run, engine=replace(engine, graph_sequences=FEW_GRAPH_SEQUENCES)), gpu_bytes)
    recomputes_as_much = many.run.gradient_checkpointing == few.run.gradient_checkpointing
    takes_nothing = recomputes_as_much and many.kv_cache_bytes == few.kv_cache_bytes
    return many if takes_nothing and many.peak <= usable(gpu_bytes) else few


def _fitted(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """Choose the settings that the user has left open by the rules that ``fitted`` describes, except the number of
    sequences up to which decoding steps run as CUDA graphs, which ``run`` gives."""
    offered = checkpointing_options(shape, run, gpu_bytes)
    fitting = [option for option in offered if option.train <= usable(gpu_bytes)]
    chosen = min(fitting, key=lambda option: option.time, default=offered[-1])
    why = chosen.why(offered[0], gpu_bytes) if run.recompute(shape.num_layers) is None else ""
    if why:
        run = replace(run, gradient_checkpointing=chosen.setting)
    are_tokens_open, engine = run.micro_batch_tokens is None, run.engine
    run = replace(run, micro_batch_tokens=chosen.tokens)
    if engine is not None and engine.kv_cache_bytes is None:
        empty = plan(shape, replace(run, engine=replace(engine, kv_cache_bytes=0)))
        room = usable(gpu_bytes) - max(empty.total("start"), empty.total("rollout"))
        wanted = cache_bytes(shape, run, engine, num_sequences=min(engine.max_num_seqs, run.rows))
        least = cache_bytes(shape, run, engine, num_sequences=1)
        run = replace(run, engine=replace(engine, kv_cache_bytes=max(least, min(wanted, room))))
    return replace(_with_spare_memory(shape, run, gpu_bytes, are_tokens_open=are_tokens_open), why=why)


def _with_spare_memory(shape: ModelShape, run: RunMemory, gpu_bytes: int, *, are_tokens_open: bool) -> Plan:
    """Plan a run for which micro-batch size, gradient checkpointing and KV cache size are already chosen. If the run
    with a KV cache that stays allocated during training would fit in the share ``AMPLE`` of the GPU's memory, the cache
    stays allocated. If, in addition, the user has left the micro-batch size open (``are_tokens_open``), micro-batches
    get ``usual_micro_batch`` tokens, or as many as fit in this share if those are fewer."""
    engine, limit = run.engine, int(AMPLE * gpu_bytes)
    if engine is None or engine.sleep_level > 0:
        return plan(shape, run)
    kept = replace(run, engine=replace(engine, keeps_cache=True))
    if plan(shape, kept).peak > usable(limit):
        return plan(shape, run)
    if are_tokens_open:
        tokens = _micro_batch(shape, kept, limit, most=usual_micro_batch(shape))
        kept = replace(kept, micro_batch_tokens=tokens)
    return plan(shape, kept)


class Option(NamedTuple):
    """A level of gradient checkpointing, with the largest micro-batch with which the run fits the GPU or, if it fits
    with none, the smallest."""

    setting: Setting
    tokens: int
    train: int
    """Peak bytes of GPU memory of training passes if the engine's KV cache is freed during them."""
    time: float
    """Predicted time per token of training passes (``time_per_token``)."""

    def why(self, everything: Option, gpu_bytes: int) -> str:
        """Return a sentence for the log that says why this level was chosen, and how much slower it is than
        ``everything``, the level that keeps all activations."""
        choice = f"gradient_checkpointing is {self.setting}"
        if self.setting == everything.setting:
            return f"{choice}: all activations that backward needs fit"
        passes = f"passes of {everything.tokens} tokens"
        if everything.train <= usable(gpu_bytes):
            return f"{choice}: keeping all activations fits only with {passes}, and would be slower"
        cost = max(0.0, self.time / everything.time - 1)
        return (
            f"{choice}, which costs about {100 * cost:.0f} % of a training pass: keeping all activations would take "
            f"{everything.train / GIB:.1f} GiB with {passes}"
        )


def checkpointing_options(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> list[Option]:
    """List the levels of gradient checkpointing from which the memory plan chooses, starting with the one that needs
    the most memory; if the user's settings name a level, it is the only one. Levels with which the run does not fit the
    GPU are listed too."""
    engine = run.engine and replace(run.engine, kv_cache_bytes=0)
    setting = run.recompute(shape.num_layers)
    options = []
    for how in ladder(shape.num_layers) if setting is None else (setting,):
        setting = how.setting(shape.num_layers)
        tried = replace(run, engine=engine, gradient_checkpointing=setting)
        tokens = run.micro_batch_tokens or _micro_batch(shape, tried, gpu_bytes)
        train = plan(shape, replace(tried, micro_batch_tokens=tokens)).train
        time = time_per_token(shape, run, how, min(tokens, run.rows * run.longest_row))
        options.append(Option(setting, tokens, train, time))
    return options


def usable(gpu_bytes: int) -> int:
    """Return the bytes of a GPU's memory that a memory plan may use: all but the share ``HEADROOM``."""
    return int(gpu_bytes * (1 - HEADROOM))


def smallest_gpu(shape: ModelShape, run: RunMemory) -> int:
    """Return the smallest GPU memory, in whole GiB, on which a run fits, if the settings that the user has left open
    are chosen for that size."""

    def fits(gib: int) -> bool:
        return fitted(shape, run, gib * GIB).peak <= usable(gib * GIB)

    enough = next(2**power for power in count() if fits(2**power))
    return bisect_left(range(enough + 1), True, key=fits)


def longest_completion(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> int:
    """Return the largest number of tokens, a multiple of ``STEP``, that each completion of a run may have on a GPU; 0
    if not even ``STEP`` tokens fit. Open settings are chosen anew for each length, and the KV cache must hold at least
    one sequence of this length. The number of positions that the model supports is not considered.
    """

    def too_long(steps: int) -> bool:
        return fitted(shape, run.with_completions(steps * STEP), gpu_bytes).peak > usable(gpu_bytes)

    above = next(2**power for power in count() if too_long(2**power))
    return STEP * bisect_left(range(1, above + 1), True, key=too_long)


def usual_micro_batch(shape: ModelShape) -> int:
    """Return the number of tokens, a multiple of ``LARGE_STEP``, of a micro-batch if memory suffices: the smaller the
    blocks of the model, the more tokens, because the time of launching a block's kernels depends neither on the size of
    the block nor on the number of tokens."""
    if shape.experts.layers:
        return USUAL_MICRO_BATCH
    weights = sum(number * rows * columns for number, block in shape.linears for _, rows, columns in block)
    tokens = int(BLOCK_WORK * shape.num_layers / weights) // LARGE_STEP * LARGE_STEP
    return max(USUAL_MICRO_BATCH, min(tokens, LARGEST_MICRO_BATCH))


def cache_bytes(shape: ModelShape, run: RunMemory, engine: EngineMemory, *, num_sequences: int) -> int:
    """Return the bytes of a KV cache for ``num_sequences`` sequences of the maximum length (prompt and completion)."""
    return parts.kv_cache(
        shape,
        engine.itemsize(run.itemsize),
        engine.kv_cache_dtype,
        block=engine.block_size or parts.KV_BLOCK,
        length=run.max_model_len,
        num_sequences=num_sequences,
    )


def _micro_batch(shape: ModelShape, run: RunMemory, gpu_bytes: int, *, most: int = USUAL_MICRO_BATCH) -> int:
    longest = run.longest_row
    choices = [longest, *range(ceil(longest / STEP) * STEP, USUAL_MICRO_BATCH + 1, STEP)]
    choices += range(max(USUAL_MICRO_BATCH, choices[-1]) + LARGE_STEP, most + 1, LARGE_STEP)

    def train(tokens: int) -> int:
        return plan(shape, replace(run, micro_batch_tokens=tokens)).train

    number = bisect_right(choices, usable(gpu_bytes), key=train)
    return choices[max(0, number - 1)]


def time_per_token(shape: ModelShape, run: RunMemory, how: Recompute, tokens: int) -> float:
    """Predict the time per token of a training pass of ``tokens`` tokens at a level of gradient checkpointing, in units
    of the time per token without gradient checkpointing in passes of so many tokens that the fixed time of a pass does
    not matter."""
    time = 1 + OVERHEAD / tokens
    if not how.selective:
        return time
    whole = how.blocks / shape.num_layers
    all_blocks, selective = (FUSED_WHOLE, FUSED_SELECTIVE) if run.fuses(shape) else (WHOLE, SELECTIVE)
    # With LoRA dropout, a block that recomputes selectively repeats all of its forward pass except attention. It counts
    # as recomputed completely, which is a little too much; times with dropout were not measured.
    extra = whole * all_blocks + (1 - whole) * (all_blocks if run.dropout else selective)
    return time * (1 + extra) * (1 + OFFLOAD if how.offload else 1)
