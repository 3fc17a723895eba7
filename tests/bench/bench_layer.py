"""Decoding through the linears of a block, with adapters and without: python -m tests.bench.bench_layer

What a change of their kernels is worth in place, in seconds and without an engine: layers one after another in a CUDA
graph, NVFP4 weights by Humming, elementwise kernels where norms and attention would be. Nothing is measured without
Humming. ``ours`` has the engine's adapter kernels. ``late`` starts no kernel before the last one has ended, ``beside``
computes x A^T on a second stream while the base runs, ``before`` computes it first, ``matmul`` leaves adapters to
cuBLAS, and the others have other blocks than the rule's.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.kernels import lora
from qerl_pl.rollout.vllm_humming import decoding_schedule
from tests.bench.bench_schedules import LOCKS, multiply, random_linear
from tests.bench.harness import FUSED, RANK, captured, emit, linear_shapes, timed

REPLAYS = 8
Add = Callable[["Linear", Tensor, Tensor], Tensor]


class Linear(NamedTuple):
    """A fused NVFP4 linear and its adapter."""

    config: Any
    tensors: dict[str, Tensor]
    locks: Tensor
    a: list[Tensor]
    b: list[Tensor]

    def base(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        rule = import_module("humming.tune").get_heuristics_config(self.config, len(x), gemm_type="dense")
        shape = {"outputs": sum(map(len, self.b)), "inputs": x.shape[1], "tokens": len(x)}
        return multiply(self.config, self.tensors, decoding_schedule(rule, **shape), self.locks, x)


def random_layer(size: str, locks: Tensor) -> dict[str, Linear]:
    """The fused linears of a block, by name."""
    shapes, layer = linear_shapes(size), {}
    for name, parts in FUSED.items():
        widths, inputs = [shapes[part][0] for part in parts], shapes[parts[0]][1]
        a = [torch.randn(RANK, inputs, device="cuda").bfloat16() for _ in widths]
        b = [torch.randn(width, RANK, device="cuda").bfloat16() for width in widths]
        layer[name] = Linear(*random_linear(sum(widths), inputs), locks, a, b)
    return layer


def variants() -> dict[str, Add]:
    """Who multiplies by base and adapter: of a linear, its input and an index for each token."""
    side = torch.cuda.Stream()

    def none(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        del indices
        return linear.base(x)

    def ours(linear: Linear, x: Tensor, indices: Tensor, *, early: bool = True, **change: Any) -> Tensor:
        widths = [len(matrix) for matrix in linear.b]
        shrink = lora.shrink_blocks(len(x), x.shape[1], RANK, len(widths))
        expand = lora.expand_blocks(len(x), widths)
        if splits := change.get("splits"):
            shrink = shrink._replace(chunk=shrink.depth * -(-x.shape[1] // (shrink.depth * splits)))
        shrink = shrink._replace(warps=change.get("shrink_warps", shrink.warps))
        columns = max(change.get("columns", 0), expand.columns)
        expand = expand._replace(columns=columns, warps=change.get("expand_warps", expand.warps))
        y = linear.base(x)
        lora.expand(y, lora.shrink(x, linear.a, shrink, early=early), linear.b, indices, expand, early=early)
        return y

    def beside(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            partials = lora.shrink(x, linear.a, early=False)
        y = linear.base(x)
        torch.cuda.current_stream().wait_stream(side)
        lora.expand(y, partials, linear.b, indices, early=False)
        return y

    def before(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        partials = lora.shrink(x, linear.a)
        y = linear.base(x)
        lora.expand(y, partials, linear.b, indices, early=False)
        return y

    def matmul(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        y = linear.base(x)
        lora.add_lora_by_matmul(y, x, linear.a, linear.b, indices)
        return y

    return {
        "none": none,
        "ours": ours,
        "late": partial(ours, early=False),
        "beside": beside,
        "before": before,
        "matmul": matmul,
        "8-splits": partial(ours, splits=8),
        "16-splits": partial(ours, splits=16),
        "shrink-2-warps": partial(ours, shrink_warps=2),
        "shrink-8-warps": partial(ours, shrink_warps=8),
        "expand-2-warps": partial(ours, expand_warps=2),
        "expand-8-warps": partial(ours, expand_warps=8),
        "32-columns": partial(ours, columns=32),
        "64-columns": partial(ours, columns=64),
    }


def decode(layers: Sequence[dict[str, Linear]], add: Add, x: Tensor, indices: Tensor) -> Tensor:
    """[T, H] through all layers; tanh stands where norms and attention would, and keeps it finite."""
    for layer in layers:
        heads = add(layer["qkv"], x, indices)[:, : x.shape[1]].tanh()
        gate, up = add(layer["gate_up"], add(layer["o"], heads, indices).tanh(), indices).chunk(2, dim=1)
        x = add(layer["down"], (gate * up).tanh(), indices).tanh()
    return x


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="7B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or importlib.util.find_spec("humming") is None:
        print("layer: nothing is measured without a CUDA GPU and Humming", file=sys.stderr)
        return
    locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")
    layers = [random_layer(args.size, locks) for _ in range(args.layers)]
    for tokens in args.tokens:
        x = torch.randn(tokens, linear_shapes(args.size)["q_proj"][1], device="cuda").bfloat16()
        indices = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        runs = {name: captured(partial(decode, layers, add, x, indices)) for name, add in variants().items()}
        for name, seconds in timed(runs, repeats=args.repeats, inner=REPLAYS).items():
            each = [second / args.layers for second in seconds]
            emit(f"layer/{name}", {"model": args.size, "tokens": tokens, "layers": args.layers}, "bfloat16", each)


if __name__ == "__main__":
    main()
