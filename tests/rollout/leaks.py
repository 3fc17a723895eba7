"""Find what still refers to the memory of vLLM engines that have ended."""

import gc

from torch import Tensor

from qerl_pl.rollout.vllm import memory as vllm_memory


def is_inside(tensor: Tensor) -> bool:
    """Return whether a tensor's memory belongs to vLLM's memory pool."""
    if (pool := vllm_memory.allocator()) is None or not tensor.is_cuda:
        return False
    segments = vllm_memory._segments(pool)
    return vllm_memory._is_in(tensor, sorted(segments), segments)


def held_in_vllms_pool() -> list[str]:
    """List what keeps memory of vLLM's pool in use: the shape and dtype of each tensor in the pool, and the types of
    the objects that refer to the tensor."""
    found = []
    for tensor in filter(is_inside, vllm_memory.referred_to()):
        who = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_referrers(tensor)}
        found.append(f"{tuple(tensor.shape)} {tensor.dtype} held by {', '.join(sorted(who))}")
    return found
