"""Dequantising the linears of one 7B block, ours and others': python -m tests.bench.bench_dequantize

``bytes`` are read and written, each once: codes, scales, and the bf16 result. ``gb_per_s`` is over the time of the
kernels, ``device_s``; the median has the host's launches in it too. Ceilings: ``copy`` moves as many bytes, half of
them read and half written; ``fill`` writes as many. Weights rotate, so none is in the cache when its turn comes again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from qerl_pl.quant.formats import PackedWeight, quantize
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4, dequantize_reference
from qerl_pl.quant.tile_order import to_tile_order
from tests.bench.harness import CUDA, DEVICE, check, device_seconds, emit, parser_with, relative_error, timed
from tests.bench.rivals import compressed_tensors_dequantize, nf4_dequantize, nf4_quantize
from tests.random_models import linear_shapes, random_weight


def num_bytes(weight: PackedWeight) -> int:
    """Read and written for a bf16 result."""
    return weight.codes.nbytes + weight.block_scale.nbytes + 4 * weight.codes.numel()


def contenders(weights: list[PackedWeight]) -> dict[str, Callable[[], object]]:
    """Each dequantises all of the weights, one after the other; what is installed competes."""

    def over(run: Callable[..., Tensor], items: list) -> Callable[[], object]:
        def all_of_them() -> None:
            for item in items:
                run(*item)

        return all_of_them

    dense = [NVFP4.dequantize(weight, torch.bfloat16) for weight in weights]
    found = {
        "nvfp4": over(NVFP4.dequantize, [(weight, torch.bfloat16) for weight in weights]),
        "nvfp4-tile-order": over(NVFP4.dequantize, [(to_tile_order(weight), torch.bfloat16) for weight in weights]),
        "nf4": over(NF4.dequantize, [(quantize(weight, NF4), torch.bfloat16) for weight in dense]),
        "compressed-tensors": over(compressed_tensors_dequantize, [(weight,) for weight in weights]),
    }
    if importlib.util.find_spec("bitsandbytes"):
        found["bitsandbytes-nf4"] = over(nf4_dequantize, [nf4_quantize(weight) for weight in dense])
    return found


def errors(weight: PackedWeight) -> Iterator[tuple[str, float, float]]:
    """Ours equals its definition; the others come near what they were given."""
    exact = dequantize_reference(weight)
    ours = NVFP4.dequantize(weight, torch.bfloat16)
    yield "nvfp4", float(not torch.equal(ours, exact.bfloat16())), 0
    tiles = NVFP4.dequantize(to_tile_order(weight), torch.bfloat16)
    yield "nvfp4-tile-order", float(not torch.equal(tiles, exact.bfloat16())), 0
    yield "compressed-tensors", relative_error(compressed_tensors_dequantize(weight), exact), 2**-7
    if importlib.util.find_spec("bitsandbytes"):
        yield "bitsandbytes-nf4", relative_error(nf4_dequantize(*nf4_quantize(ours)), exact), 0.2


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, "--size")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    block = {name: random_weight(*shape, DEVICE) for name, shape in linear_shapes(args.size).items()}
    check(errors(block["k_proj"]))
    total = sum(num_bytes(weight) for weight in block.values())
    source = torch.empty(total // 2, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    runs = contenders(list(block.values())) | {"copy": partial(target.copy_, source)}
    runs["fill"] = partial(torch.empty(total, dtype=torch.uint8, device=DEVICE).fill_, 1)
    seconds = timed(runs, repeats=args.repeats, inner=10 if CUDA else 1)
    shape = {"model": args.size, "linears": len(block)}
    for name, found in seconds.items():
        device = device_seconds(runs[name]) or median(found)
        ratio = median(found) / median(seconds["nvfp4"])
        speed = {"bytes": total, "gb_per_s": total / device / 1e9, "ratio": ratio, "device_s": device}
        emit(f"dequantize/{name}", shape, "bfloat16", found, **speed)


if __name__ == "__main__":
    main()
