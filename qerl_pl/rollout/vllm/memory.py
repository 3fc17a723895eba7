"""Free the memory pool of vLLM's sleep mode completely when an engine ends, and drop vLLM's references to the trainer's
memory.

vLLM has one such pool per process, and refuses to start an engine while any byte of it is in use. Modules, compiled
graphs or caches may still refer to tensors of an engine that has ended; the memory of these tensors is freed here
nevertheless.
"""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from qerl_pl.rollout.vllm import patches

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase

_left: dict[int, Any] = {}
"""vLLM's record of each segment of its memory pool, by address, that could not be freed when its engine ended, because
something still references it."""


def free(worker: WorkerBase) -> None:
    """Free all memory in the pool of vLLM's sleep mode, and set the parameters of the worker's model, some of which are
    the trainer's tensors, to empty ones. Called before the worker is shut down. All memory of the pool belongs to this
    worker, because vLLM allows one engine with sleep mode per process at a time."""
    if (pool := allocator()) is not None:
        torch.cuda.synchronize()
        gc.unfreeze()  # vLLM calls gc.freeze after its start; gc.get_objects omits frozen objects
        release(referred_to(), _segments(pool))
    for parameter in worker.get_model().parameters():
        parameter.data = parameter.data.new_empty(0)


def referred_to() -> list[Tensor]:
    """List the tensors that the garbage collector tracks, except objects frozen by ``gc.freeze`` and placeholders of
    torch.compile, which have no memory."""
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    real = (tensor for tensor in tensors if not isinstance(tensor, FakeTensor | FunctionalTensor))
    return [tensor for tensor in real if not torch._is_functional_tensor(tensor)]


def release(tensors: Iterable[Tensor], segments: Mapping[int, int]) -> None:
    """Free the memory of those of the ``tensors`` that are in vLLM's memory pool, whoever still refers to them; these
    tensors become empty. ``segments`` has the size in bytes of each segment of the pool, by address."""
    starts = sorted(segments)
    for tensor in tensors:
        if _is_in(tensor, starts, segments) and (storage := tensor.untyped_storage()).resizable():
            storage.resize_(0)


def collect() -> None:
    """Free the memory of vLLM's pool that an engine has left allocated at its end. May be called only while no engine
    runs, because all engines of the process share the pool. If some memory is still referenced and so cannot be freed,
    a warning says how much. This memory is freed with its last reference, and does not prevent the start of the next
    engine (``ignoring_what_is_left``)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _left.clear()
    if (pool := allocator()) is not None and pool.pointer_to_data:
        _left.update(pool.pointer_to_data)
        warnings.warn(
            f"{left() / 2**20:.0f} MiB of the vLLM engine that has ended are still referenced, and stay on the GPU "
            f"until no reference is left: {dict(Counter(data.tag for data in pool.pointer_to_data.values()))} "
            "(vLLM's names)",
            RuntimeWarning,
            stacklevel=3,
        )


def left() -> int:
    """Return the bytes of vLLM's pool that are still allocated for engines that have ended."""
    pool = allocator()
    held = pool.pointer_to_data if pool else {}
    return sum(data.handle[1] for address, data in _left.items() if held.get(address) is data)


def given_back() -> int:
    """Return the bytes of vLLM's pool that a sleeping engine has given back to the GPU, although torch's statistics
    still count them."""
    pool = allocator()
    return sum(data.handle[1] for data in pool.pointer_to_data.values() if data.is_asleep) if pool else 0


@contextmanager
def ignoring_what_is_left() -> Iterator[None]:
    """Let vLLM start within the context although its pool, which it expects to be empty, still holds memory of ended
    engines. If the start fails, later starts also ignore the memory that it has not freed."""
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
    """Return vLLM's memory pool; None on a CPU, or if no engine with sleep mode has been started in this process."""
    if not torch.cuda.is_available():
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.instance


def _segments(pool: Any) -> dict[int, int]:
    return {address: data.handle[1] for address, data in pool.pointer_to_data.items()}


def _is_in(tensor: Tensor, starts: list[int], segments: Mapping[int, int]) -> bool:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    address = tensor.untyped_storage().data_ptr()
    before = bisect_right(starts, address) - 1
    return before >= 0 and address < starts[before] + segments[starts[before]]
