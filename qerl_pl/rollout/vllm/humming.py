"""Schedules of Humming's kernels, with which vLLM multiplies by NVFP4 weights on Hopper, for decoding.

Humming has a rule for its block sizes. For few tokens and a wide linear, as the fused gate and up of a block, wider and
deeper blocks are faster, and for many tokens and a narrow linear smaller ones (`docs/performance.md`, by
`tests/bench/bench_schedules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

HOPPER = 90  # Humming's key for compute capability 9.0
WIDE, FEW, MANY = 16384, 32, 256
LARGEST = (128, 256, 64)  # blocks of the rule from 129 tokens on


def decoding_schedule(config: Mapping[str, Any], *, outputs: int, inputs: int, tokens: int) -> dict[str, Any]:
    """What to run for a 4-bit linear with 16-bit activations, where Humming's rule says ``config``.

    Args:
        config: ``block_shape`` and ``warp_shape`` are (tokens, outputs, inputs).
        outputs: of the linear.
        inputs: of the linear.
        tokens: in the batch.
    """
    block_tokens = config["block_shape"][0]
    if tokens <= FEW and outputs >= WIDE and outputs % 256 == inputs % 128 == 0:
        blocks = {"block_shape": (block_tokens, 256, 128), "warp_shape": (block_tokens, 32, 64), "num_ctas_per_sm": 1}
    elif tokens <= MANY and inputs <= outputs < WIDE and tuple(config["block_shape"]) == LARGEST:
        # Blocks of half the size, two of them on a multiprocessor: q/k/v and the attention's output have few.
        blocks = {"block_shape": (block_tokens, 128, 64), "warp_shape": (block_tokens, 32, 64), "num_ctas_per_sm": 2}
    else:
        blocks = {}
    return {**config, **blocks}


def without_served(
    schedules: Iterable[tuple[int, int, Mapping[str, Any]]], is_served: Callable[[int], object]
) -> list[tuple[int, int, Mapping[str, Any]]]:
    """Humming's schedules but for those of which other kernels serve all numbers of tokens: those left serve these too.

    Args:
        schedules: of a linear, each for more tokens than the first number and at most the second.
        is_served: true of a number of tokens that another kernel has.
    """
    left, fewer = [], 0
    for first, last, config in schedules:
        if not all(map(is_served, range(first + 1, last + 1))):
            left.append((fewer, last, config))
            fewer = last
    return left


def schedules_on(rule: Any) -> type:
    """Humming's rule for the tile sizes of dense linears, with ``decoding_schedule`` on top."""

    class Schedules(rule):
        @classmethod
        def get_config(cls, layer_config: Any, shape_m: int, *args: Any, **more: Any) -> dict[str, Any]:
            config = super().get_config(layer_config, shape_m, *args, **more)
            if layer_config.a_dtype.num_bits != 16 or layer_config.b_dtype.num_bits != 4 or layer_config.num_experts:
                return config
            return decoding_schedule(config, outputs=layer_config.shape_n, inputs=layer_config.shape_k, tokens=shape_m)

    return Schedules


def load_operators() -> None:
    """Register Humming's operators where vLLM uses them; a graph that it loads from its cache calls them by name.

    Humming itself does so when it first makes a kernel, which is too late: vLLM would compile the graph again.
    """
    if find_spec("humming") is not None and torch.cuda.get_device_capability() == divmod(HOPPER, 10):
        import_module("humming.ops.utils").init_humming_launcher()
