"""What still refers to the memory of vLLM engines that have ended."""

from __future__ import annotations

import gc

from qerl_pl.rollout.vllm import memory as vllm_memory


def held_in_vllms_pool() -> list[str]:
    """Shapes and dtypes of all tensors in it, and the types of what refers to them."""
    found = []
    for tensor in vllm_memory.referred_to():
        if vllm_memory.is_inside(tensor):
            who = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_referrers(tensor)}
            found.append(f"{tuple(tensor.shape)} {tensor.dtype} held by {', '.join(sorted(who))}")
    return found
