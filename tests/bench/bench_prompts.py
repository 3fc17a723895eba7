"""Prompts' linears by Humming and by dequantising with cuBLAS: python -m tests.bench.bench_prompts

The fused linears of a block, NVFP4 weights and bf16 inputs, each linear alone in a CUDA graph; its copies take turns,
so no weight is in the cache when its turn comes again. ``prompts/block`` adds up a block's linears: the fewest tokens
from which "dequantised" is faster there, at every larger number as well, is ``costs.DEQUANTISED_FROM``, which the last
line proposes. Nothing is measured without Humming.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import partial
from statistics import median

import torch
from torch import Tensor

from qerl_pl.kernels import costs
from qerl_pl.quant.tile_order import TILE
from qerl_pl.rollout.vllm import humming, patches
from tests.bench.bench_schedules import CALLS, COMPUTE, LOCKS, random_linear, rounds
from tests.bench.harness import check, emit, relative_error, timed
from tests.random_models import FUSED, SIZES, linear_shapes

CACHE_BYTES, NEVER = 3e8, 2**31


def by_humming(config: str, locks: Tensor, x: Tensor, linear: dict[str, Tensor]) -> Tensor:
    """Compute [T, K] -> [T, N] with the schedule of Humming's rule, as the engine does."""
    from qerl_pl.rollout.vllm.nvfp4 import nvfp4_linear

    weights = linear["weight"], linear["weight_scale"], linear["weight_scale_2"]
    return nvfp4_linear(x, *weights, None, locks, config, COMPUTE, None, [], [], None, None)


def dequantised(x: Tensor, linear: dict[str, Tensor]) -> Tensor:
    """Compute [T, K] -> [T, N] with the weight dequantised to scratch memory."""
    from qerl_pl.rollout.vllm.nvfp4 import dequantised_linear

    return dequantised_linear(x, linear["weight"], linear["weight_scale"], linear["weight_scale_2"], None)


def compare(model: str, tokens: int, repeats: int) -> dict[str, float]:
    """Time each fused linear in both ways; returns the seconds of a block by way."""
    block: dict[str, float] = dict.fromkeys(("humming", "dequantised"), 0.0)
    for name, parts in FUSED.items():
        rows, columns = zip(*(linear_shapes(model)[part] for part in parts), strict=True)
        assert sum(rows) % TILE == 0, rows
        config, tensors = random_linear(sum(rows), columns[0])
        size = sum(tensor.nbytes for tensor in tensors.values())
        copies = [
            {key: value.clone() for key, value in tensors.items()} for _ in range(max(1, int(CACHE_BYTES / size)))
        ]
        x = torch.randn(tokens, columns[0], device="cuda").bfloat16()
        locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")
        ways = {"humming": partial(by_humming, config.to_str(), locks, x), "dequantised": partial(dequantised, x)}
        exact = ways["humming"](tensors)
        check([(f"{name}, dequantised", relative_error(ways["dequantised"](tensors), exact), 2**-6)])
        for way, seconds in timed({way: rounds(run, copies) for way, run in ways.items()}, repeats=repeats).items():
            each = [second / CALLS / len(copies) for second in seconds]
            block[way] += median(each)
            emit(f"prompts/{way}", {"model": model, "linear": name, "tokens": tokens}, "bfloat16", each)
    for way, seconds in block.items():
        ratio = block["humming"] / seconds
        emit("prompts/block", {"model": model, "way": way, "tokens": tokens}, "bfloat16", [seconds], ratio=ratio)
    return block


def threshold(blocks: dict[int, list[dict[str, float]]]) -> int:
    """Return the fewest tokens from which dequantising is faster for every model, or ``NEVER``.

    Args:
        blocks: seconds of a block by way, one for each model, by number of tokens.
    """
    fewest = NEVER
    for tokens in sorted(blocks, reverse=True):
        if any(block["dequantised"] > block["humming"] for block in blocks[tokens]):
            break
        fewest = tokens
    return fewest


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["7B", "14B"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[264, 512, 768, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or importlib.util.find_spec("humming") is None:
        print("prompts: nothing is measured without a CUDA GPU and Humming", file=sys.stderr)
        return
    patches.humming_schedules()
    humming.load_operators()
    costs.DEQUANTISED_FROM = NEVER
    blocks = {tokens: [compare(model, tokens, args.repeats) for model in args.sizes] for tokens in args.tokens}
    print(f"DEQUANTISED_FROM = {threshold(blocks)}")


if __name__ == "__main__":
    main()
