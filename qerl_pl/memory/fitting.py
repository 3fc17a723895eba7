"""What a run leaves to be chosen, chosen for a card."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import count
from math import ceil

from qerl_pl.memory import parts
from qerl_pl.memory.plan import Plan, plan
from qerl_pl.memory.settings import EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape

GIB = 2**30
USUAL_MICRO_BATCH = 16384
"""Tokens from which on a larger micro-batch trains hardly faster."""
HEADROOM = 0.04
"""Share of the card that a plan leaves free: what it may be wrong by."""
STEP = 256
"""Tokens; chosen micro-batches are multiples of it, or just hold the longest row."""


def fitted(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """The plan of a run with what it leaves open chosen for a card. It may not fit: compare its peak with ``usable``.

    Micro-batches get the usual number of tokens, or as many as fit, and at least those of the longest row. The cache
    gets room for every row of a rollout at its longest, or what is left, and at least room for one sequence.
    """
    run = replace(run, micro_batch_tokens=run.micro_batch_tokens or _micro_batch(shape, run, gpu_bytes))
    engine = run.engine
    if engine is not None and engine.kv_cache_bytes is None:
        empty = plan(shape, replace(run, engine=replace(engine, kv_cache_bytes=0)))
        room = usable(gpu_bytes) - max(empty.total("start"), empty.total("rollout"))
        wanted = cache_bytes(shape, run, engine, num_sequences=min(engine.max_num_seqs, run.rows))
        least = cache_bytes(shape, run, engine, num_sequences=1)
        run = replace(run, engine=replace(engine, kv_cache_bytes=max(least, min(wanted, room))))
    return plan(shape, run)


def usable(gpu_bytes: int) -> int:
    """Bytes of a card that a plan may reach."""
    return int(gpu_bytes * (1 - HEADROOM))


def smallest_gpu(shape: ModelShape, run: RunMemory) -> int:
    """GiB of the smallest card that the run fits on, in whole GiB; what it leaves open is chosen for that card."""

    def fits(gib: int) -> bool:
        return fitted(shape, run, gib * GIB).peak <= usable(gib * GIB)

    enough = next(2**power for power in count() if fits(2**power))
    return bisect_left(range(enough + 1), True, key=fits)


def cache_bytes(shape: ModelShape, run: RunMemory, engine: EngineMemory, *, num_sequences: int) -> int:
    """Bytes of a cache for so many sequences of the longest length."""
    one = parts.kv_token_bytes(shape, engine.itemsize(run.itemsize), engine.kv_cache_dtype)
    block = engine.block_size or parts.KV_BLOCK
    return parts.kv_cache(one, block=block, length=run.max_model_len, num_sequences=num_sequences)


def _micro_batch(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> int:
    longest = run.longest_row
    engine = run.engine and replace(run.engine, kv_cache_bytes=0)
    choices = [longest, *range(ceil(longest / STEP) * STEP, USUAL_MICRO_BATCH + 1, STEP)]

    def train(tokens: int) -> int:
        return plan(shape, replace(run, engine=engine, micro_batch_tokens=tokens)).train

    number = bisect_right(choices, usable(gpu_bytes), key=train)
    return choices[max(0, number - 1)]
