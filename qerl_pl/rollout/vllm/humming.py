"""Faster tile sizes for decoding with Humming's GEMM kernels, which vLLM uses for 4-bit weights on Hopper where this
project's native kernels do not run: for MXFP4, and for NVFP4 with ``decoding_kernel: humming``.

Humming chooses tile sizes by a fixed rule. Other tile sizes were measured to be faster in two cases
(`docs/performance.md`, by `tests/bench/bench_schedules.py`): tiles with more outputs and inputs for few tokens and a
linear with many outputs, such as the fused gate and up projections; and smaller tiles for many tokens and a linear with
few outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

HOPPER = 90  # compute capability 9.0, as Humming encodes it
WIDE, FEW, MANY = 16384, 32, 256
LARGEST = (128, 256, 64)  # tile (tokens, outputs, inputs) that Humming's rule gives for 129 tokens or more


def decoding_schedule(config: Mapping[str, Any], *, outputs: int, inputs: int, tokens: int) -> dict[str, Any]:
    """Replace the schedule (tile sizes, and thread blocks per SM) that Humming chose for a 4-bit linear with 16-bit
    activations by a faster one, if one is known.

    Args:
        config: schedule that Humming's rule chose; its ``block_shape`` and ``warp_shape`` are (tokens, outputs,
            inputs).
        outputs: outputs of the linear.
        inputs: inputs of the linear.
        tokens: tokens in the batch.

    Returns:
        The schedule to use.
    """
    if config.get("mma_type") == "mma":
        # The tile sizes below were measured with the instruction wgmma, Humming's default. Humming has chosen mma with
        # sizes for it: in version 0.1.17 for at most 1024 inputs, in 0.1.19 for most linears with few tokens.
        return {**config}
    block_tokens = config["block_shape"][0]
    if tokens <= FEW and outputs >= WIDE and outputs % 256 == inputs % 128 == 0:
        blocks = {"block_shape": (block_tokens, 256, 128), "warp_shape": (block_tokens, 32, 64), "num_ctas_per_sm": 1}
    elif tokens <= MANY and inputs <= outputs < WIDE and tuple(config["block_shape"]) == LARGEST:
        # Use smaller tiles and two thread blocks per SM, because with large tiles q/k/v and o_proj have too few thread
        # blocks to fill the GPU.
        blocks = {"block_shape": (block_tokens, 128, 64), "warp_shape": (block_tokens, 32, 64), "num_ctas_per_sm": 2}
    else:
        blocks = {}
    return {**config, **blocks}


def schedules_on(rule: Any) -> type:
    """Derive a class that chooses tile sizes by Humming's class ``rule`` and then applies ``decoding_schedule``."""

    class Schedules(rule):
        @classmethod
        def get_config(cls, layer_config: Any, shape_m: int, *args: Any, **more: Any) -> dict[str, Any]:
            config = super().get_config(layer_config, shape_m, *args, **more)
            if layer_config.a_dtype.num_bits != 16 or layer_config.b_dtype.num_bits != 4 or layer_config.num_experts:
                return config
            return decoding_schedule(config, outputs=layer_config.shape_n, inputs=layer_config.shape_k, tokens=shape_m)

    return Schedules


def load_operators() -> None:
    """Register Humming's operators with torch, if this GPU is Hopper and Humming is installed.

    Graphs in vLLM's compilation cache call these operators by name. Humming registers them only when it builds its
    first kernel; vLLM loads a cached graph before that, so without this function it would not find them and would
    compile the graph again.
    """
    if find_spec("humming") is not None and torch.cuda.get_device_capability() == divmod(HOPPER, 10):
        import_module("humming.ops.utils").init_humming_launcher()
