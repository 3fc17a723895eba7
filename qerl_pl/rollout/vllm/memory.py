"""The memory from which a vLLM engine on a GPU can be put to sleep: given back whole when the engine ends.

vLLM has one pool of it in a process, and refuses to start while any byte of the pool is in use: "CuMem allocator can
only be used for one instance per process". When an engine ends it drops its references, but modules, compiled graphs or
caches may hold others, and then nothing is freed. Here the tensors themselves are freed, whoever refers to them.
"""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qerl_pl.rollout.vllm import patches

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

_left: dict[int, Any] = {}
"""Segments of the pool that no engine uses and that something else still holds: address to what vLLM notes of them."""


def free(worker: WorkerBase) -> None:
    """Free weights, adapter slots and key/value cache of a worker that is about to be shut down.

    Tensors outside vLLM's pool, such as embeddings that the trainer shares with the engine, are left alone.
    """
    if allocator() is None:
        return
    torch.cuda.synchronize()
    for tensor in _tensors(worker):
        if tensor.is_cuda and is_inside(tensor):
            tensor.untyped_storage().resize_(0)


def is_inside(tensor: Tensor) -> bool:
    """Whether a tensor's memory is of vLLM's pool."""
    if (pool := allocator()) is None:
        return False
    starts, address = sorted(pool.pointer_to_data), tensor.untyped_storage().data_ptr()
    before = bisect_right(starts, address) - 1
    return before >= 0 and address < starts[before] + _size(pool, starts[before])


def collect() -> None:
    """Give back what an engine that has ended held. To be called when it has ended: no other shares its pool.

    What something else still refers to is named in a warning. The next engine starts beside it
    (``ignoring_what_is_left``), and it is freed with whatever holds it.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _left.clear()
    if (pool := allocator()) is not None and pool.pointer_to_data:
        _left.update(pool.pointer_to_data)
        warnings.warn(
            f"{left() / 2**20:.0f} MiB of the vLLM engine that has ended are still referred to, and stay on the GPU "
            f"until nothing does: {dict(Counter(data.tag for data in pool.pointer_to_data.values()))} (vLLM's names)",
            RuntimeWarning,
            stacklevel=3,
        )


def left() -> int:
    """Bytes that ended engines have left in vLLM's pool."""
    pool = allocator()
    held = pool.pointer_to_data if pool else {}
    return sum(data.handle[1] for address, data in _left.items() if held.get(address) is data)


@contextmanager
def ignoring_what_is_left() -> Iterator[None]:
    """In it vLLM does not count what ended engines left in its pool, which is all that it asks before it loads weights.

    vLLM 0.32 has no setting for this. Another engine that still runs is counted, and vLLM refuses as it should. What a
    start that fails leaves counts as left.
    """
    pool = allocator()
    before = dict(pool.pointer_to_data) if pool else {}
    count = pool.get_current_usage if pool else None
    patch = patches.memory_of_ended_engines(pool, lambda: count() - left()) if count else nullcontext()
    try:
        with patch:
            yield
    except BaseException:
        held = now.pointer_to_data if (now := allocator()) else {}
        _left.update({address: data for address, data in held.items() if before.get(address) is not data})
        raise


def allocator() -> Any:
    """vLLM's pool; None on a CPU, or where no engine that can sleep has started."""
    if not torch.cuda.is_available():
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _size(pool: Any, address: int) -> int:
    return pool.pointer_to_data[address].handle[1]


def _tensors(worker: Any) -> Iterator[Tensor]:
    values = [*getattr(worker.model_runner, "kv_caches", ())]
    for module in worker.get_model().modules():
        values += [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
    for value in values:
        yield from (one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Tensor))
