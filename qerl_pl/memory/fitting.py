"""What a run leaves to be chosen, chosen for a card."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import ceil
from typing import NamedTuple

from qerl_pl.memory import parts
from qerl_pl.memory.plan import Plan, plan
from qerl_pl.memory.settings import EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape
from qerl_pl.memory.speed import time_per_token
from qerl_pl.policy.recompute import Recompute, Setting, ladder

GIB = 2**30
USUAL_MICRO_BATCH = 16384
"""Tokens from which on a larger micro-batch trains hardly faster."""
HEADROOM = 0.04
"""Share of the card that a plan leaves free: what it may be wrong by."""
STEP = 256
"""Tokens; chosen micro-batches are multiples of it, or just hold the longest row."""


def fitted(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """The plan of a run with what it leaves open chosen for a card. It may not fit: compare its peak with ``usable``.

    Micro-batches get the usual number of tokens, or as many as fit, and at least those of the longest row. What
    backward recomputes is chosen together with them, for the fastest pass. The cache gets room for every row of a
    rollout at its longest, or what is left, and at least room for one sequence.
    """
    offered = checkpointing_options(shape, run, gpu_bytes)
    chosen = fastest(offered, gpu_bytes)
    why = chosen.why(offered[0], gpu_bytes) if run.recompute(shape.num_layers) is None else ""
    if why:
        run = replace(run, gradient_checkpointing=chosen.how.setting(shape.num_layers), offload_checkpoints=False)
    run = replace(run, micro_batch_tokens=chosen.tokens)
    engine = run.engine
    if engine is not None and engine.kv_cache_bytes is None:
        empty = plan(shape, replace(run, engine=replace(engine, kv_cache_bytes=0)))
        room = usable(gpu_bytes) - max(empty.total("start"), empty.total("rollout"))
        wanted = cache_bytes(shape, run, engine, num_sequences=min(engine.max_num_seqs, run.rows))
        least = cache_bytes(shape, run, engine, num_sequences=1)
        run = replace(run, engine=replace(engine, kv_cache_bytes=max(least, min(wanted, room))))
    return replace(plan(shape, run), why=why)


class Option(NamedTuple):
    """A rung of gradient checkpointing with the largest micro-batch that fits, or the smallest there may be."""

    how: Recompute
    setting: Setting
    tokens: int
    train: int
    """Most bytes while the trainer works, a KV cache apart: the engine sleeps."""
    time: float
    """Predicted for each token, relative to keeping everything in an endless pass (``speed``)."""

    def why(self, everything: Option, gpu_bytes: int) -> str:
        """What was chosen and what it costs, against keeping everything."""
        said = f"gradient_checkpointing is {self.setting}"
        if self.setting == everything.setting:
            return f"{said}: everything that backward needs fits"
        passes = f"passes of {everything.tokens} tokens"
        if everything.train <= usable(gpu_bytes):
            return f"{said}: keeping everything fits with {passes} alone, and would be slower"
        cost = max(0.0, self.time / everything.time - 1)
        return (
            f"{said}, for about {100 * cost:.0f} % of a training pass: keeping everything would take "
            f"{everything.train / GIB:.1f} GiB with {passes}"
        )


def checkpointing_options(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> list[Option]:
    """What may be chosen, whether it fits or not, from the most memory to the least; one option where it is given."""
    engine = run.engine and replace(run.engine, kv_cache_bytes=0)
    given = run.recompute(shape.num_layers)
    found = []
    for how in ladder(shape.num_layers) if given is None else (given,):
        setting = how.setting(shape.num_layers)
        tried = replace(run, engine=engine, gradient_checkpointing=setting, offload_checkpoints=False)
        tokens = run.micro_batch_tokens or _micro_batch(shape, tried, gpu_bytes)
        train = plan(shape, replace(tried, micro_batch_tokens=tokens)).train
        time = time_per_token(how, shape.num_layers, min(tokens, run.rows * run.longest_row), fused=run.fused)
        found.append(Option(how, setting, tokens, train, time))
    return found


def fastest(offered: Sequence[Option], gpu_bytes: int) -> Option:
    """The option with the fastest passes of those that fit, or the one with the least memory."""
    fitting = [option for option in offered if option.train <= usable(gpu_bytes)]
    return min(fitting, key=lambda option: option.time, default=offered[-1])


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
    choices = [longest, *range(ceil(longest / STEP) * STEP, USUAL_MICRO_BATCH + 1, STEP)]

    def train(tokens: int) -> int:
        return plan(shape, replace(run, micro_batch_tokens=tokens)).train

    number = bisect_right(choices, usable(gpu_bytes), key=train)
    return choices[max(0, number - 1)]
