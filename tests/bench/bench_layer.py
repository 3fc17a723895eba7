"""Time decoding through the linear layers of a block, with adapters and without: python -m tests.bench.bench_layer

Shows within seconds and without an engine what a change of the kernels is worth: several blocks run one after another
in a CUDA graph, with NVFP4 weights, the engine's kernels, and elementwise kernels in the place of norms and attention.
Nothing is measured without Humming and vLLM. The results are named after the ways to add the adapter. ``together`` is
what the engine does: where possible, the kernel that multiplies by the NVFP4 weight also adds the adapter, and it
fetches the weight of the next linear layer to L2. ``unfetched`` is the same without fetching the next weight. ``apart``
adds the adapter by the separate kernels that are used where the base has another format; ``matmul`` adds it with
cuBLAS, and ``none`` has no adapter.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.kernels import lora
from tests.bench.bench_schedules import random_linear
from tests.bench.harness import RANK, captured, check, emit, parser_with, relative_error, timed
from tests.random_models import FUSED, fused_shape, linear_shapes

REPLAYS = 8
Add = Callable[["Linear", Tensor, Tensor], Tensor]


class Linear(NamedTuple):
    """Fused NVFP4 linear and its adapter."""

    operands: tuple[Any, ...]  # of the engine's operator after x
    a: list[Tensor]
    b: list[Tensor]


def random_layer(size: str) -> dict[str, Linear]:
    """Make the fused linear layers of a block, by name, and prepare their kernels."""
    layer = {}
    for name in FUSED:
        widths, inputs = fused_shape(size, name)
        a = [torch.randn(RANK, inputs, device="cuda").bfloat16() * inputs**-0.5 for _ in widths]
        b = [torch.randn(width, RANK, device="cuda").bfloat16() for width in widths]
        _, tensors = random_linear(sum(widths), inputs)
        weights = tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"]
        import_module("qerl_pl.hopper.native_linear").prepare(sum(widths), inputs, weights[0].device)
        layer[name] = Linear((*weights, None, None), a, b)
    return layer


def in_turn(layers: Sequence[dict[str, Linear]]) -> list[dict[str, Linear]]:
    """Return copies of the layers in which each linear layer also has the weight of the linear layer that is computed
    next (None for the last), so that its kernel can fetch this weight to the L2 cache."""
    weights = iter([linear.operands[0] for layer in layers for linear in layer.values()][1:])

    def told(linear: Linear) -> Linear:
        return linear._replace(operands=(*linear.operands[:-1], next(weights, None)))

    return [{name: told(linear) for name, linear in layer.items()} for layer in layers]


def variants() -> dict[str, Add]:
    """Return the ways to multiply by a base weight and its adapter that the module's docstring names. Each is a
    function of a linear layer, the layer's input, and per token the index of the token's adapter."""
    native: Any = import_module("qerl_pl.hopper.native_linear")
    no_lora = torch.tensor([False])

    def none(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        del indices
        return native.nvfp4_linear(x, *linear.operands, False, [], [], None, None)

    def together(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        return native.nvfp4_linear(x, *linear.operands, False, linear.a, linear.b, indices, no_lora)

    def unfetched(linear: Linear, x: Tensor, indices: Tensor) -> Tensor:
        return together(linear._replace(operands=(*linear.operands[:-1], None)), x, indices)

    def after(linear: Linear, x: Tensor, indices: Tensor, *, add: Callable[..., None]) -> Tensor:
        y = none(linear, x, indices)
        add(y, x, linear.a, linear.b, indices)
        return y

    matmul = partial(after, add=lora.add_lora_by_matmul)
    apart = partial(after, add=lora.add_lora)
    return {"none": none, "together": together, "unfetched": unfetched, "apart": apart, "matmul": matmul}


def decode(layers: Sequence[dict[str, Linear]], add: Add, x: Tensor, indices: Tensor) -> Tensor:
    """Compute the linear layers of all blocks for x [T, H]. Norms and attention are replaced by tanh, so that values
    stay finite."""
    for layer in layers:
        heads = add(layer["qkv"], x, indices)[:, : x.shape[1]].tanh()
        gate, up = add(layer["gate_up"], add(layer["o"], heads, indices).tanh(), indices).chunk(2, dim=1)
        x = add(layer["down"], (gate * up).tanh(), indices).tanh()
    return x


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, sizes=["7B", "14B"], tokens=[1, 8, 32, 64, 128, 256], layers=6, repeats=7)
    args = parser.parse_args(argv)
    missing = [package for package in ("humming", "vllm") if importlib.util.find_spec(package) is None]
    if not torch.cuda.is_available() or missing:
        print("layer: nothing is measured without a CUDA GPU, Humming and vLLM", file=sys.stderr)
        return
    adds = variants()
    for size in args.sizes:
        layers = in_turn([random_layer(size) for _ in range(args.layers)])
        for tokens in args.tokens:
            x = torch.randn(tokens, linear_shapes(size)["q_proj"][1], device="cuda").bfloat16()
            indices = torch.zeros(tokens, dtype=torch.int64, device="cuda")
            products = {name: add(layers[0]["qkv"], x, indices) for name, add in adds.items()}
            check((name, relative_error(products[name], products["matmul"]), 2**-6) for name in ("together", "apart"))
            runs = {name: captured(partial(decode, layers, add, x, indices)) for name, add in adds.items()}
            for name, seconds in timed(runs, repeats=args.repeats, inner=REPLAYS).items():
                shape = {"model": size, "tokens": tokens, "layers": args.layers}
                emit(f"layer-ours/{name}", shape, "bfloat16", [second / args.layers for second in seconds])
        del layers, runs


if __name__ == "__main__":
    main()
