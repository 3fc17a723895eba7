"""Schedules of Humming's kernels, with which vLLM multiplies by NVFP4 weights on Hopper, for decoding.

Humming has a rule for its block sizes and does not start kernels early. Measured on an H200 over the linears of a 7B
block, what is here saves 3 to 20 % of a linear, most where the linear is small: a kernel that is launched early
(programmatic dependent launch) has begun to fetch weights when its input is ready. Only ``vllm_plugin`` imports this.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

HOPPER = 90
WIDE = 16384  # outputs of a linear, from where on


def decoding_schedule(config: Mapping[str, Any], *, outputs: int, inputs: int, tokens: int) -> dict[str, Any]:
    """What to run for a 4-bit linear with 16-bit activations, where Humming's rule says ``config``.

    Args:
        config: ``block_shape`` and ``warp_shape`` are (tokens, outputs, inputs).
        outputs: of the linear.
        inputs: of the linear.
        tokens: in the batch.
    """
    early = {**config, "use_pdl": True}
    block_tokens = config["block_shape"][0]
    if tokens <= 32 and outputs >= WIDE and outputs % 256 == inputs % 128 == 0:
        wide = {"block_shape": (block_tokens, 256, 128), "warp_shape": (block_tokens, 32, 64)}
        return {**early, **wide, "num_ctas_per_sm": 1}
    if 128 < tokens <= 256 and outputs < WIDE and outputs % 128 == inputs % 64 == 0:
        narrow = {"block_shape": (128, 128, 64), "warp_shape": (128, 32, 64)}  # else too few blocks for the GPU
        return {**early, **narrow, "num_ctas_per_sm": 2}
    return early


def install() -> None:
    """Give Humming these schedules for dense linears on Hopper; nothing where it is missing."""
    if find_spec("humming") is None:
        return
    tune: Any = import_module("humming.tune")  # optional
    rule: Any = import_module("humming.tune.sm90").Sm90Heuristics

    class Schedules(rule):
        """Humming's rule with ``decoding_schedule`` on top."""

        @classmethod
        def get_config(cls, layer_config: Any, shape_m: int, *args: Any, **more: Any) -> dict[str, Any]:
            config = super().get_config(layer_config, shape_m, *args, **more)
            if layer_config.a_dtype.num_bits != 16 or layer_config.b_dtype.num_bits != 4 or layer_config.num_experts:
                return config
            return decoding_schedule(config, outputs=layer_config.shape_n, inputs=layer_config.shape_k, tokens=shape_m)

    if tune.heuristics_map[HOPPER] is rule:
        tune.heuristics_map[HOPPER] = Schedules
