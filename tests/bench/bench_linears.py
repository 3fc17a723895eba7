"""Forward and backward of the linears of one 7B block with LoRA: python -m tests.bench.bench_linears

Linears that read one activation in the model read one here. ``ratio`` is the median over that of ``bf16``, the same
LoRA on a dense base. ``*+lora`` bases carry PEFT's formula with the adapter in bf16, as a graph of separate nodes.
``device_s`` is the time of the kernels alone: where the median is far above it, the host could not keep up.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from peft import LoraConfig
from torch import Tensor, nn

from qerl_pl.policy.lora import LoraLinear
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import NVFP4, dequantize_reference
from tests.bench.harness import CUDA, DEVICE, RANK, check, device_seconds, emit, parser_with, relative_error, timed
from tests.bench.rivals import DecompressingLinear, Lora, nf4_linear
from tests.packed import frozen_linear
from tests.random_models import PROJECTION_INPUTS, dense_linear, linear_shapes, random_weight

Wrap = Callable[[PackedWeight], nn.Module]


def adapted(base: nn.Module) -> LoraLinear:
    """Put this repository's LoRA layer around a base, with B not zero."""
    config = LoraConfig(r=RANK, lora_alpha=RANK)
    layer = LoraLinear(base, "default", config, r=RANK, lora_alpha=RANK).to(DEVICE)
    nn.init.normal_(layer.lora_B["default"].get_parameter("weight"), std=0.01)
    return layer


def separate(make: Wrap) -> Wrap:
    """Put PEFT's formula around the base that ``make`` makes."""

    def wrap(weight: PackedWeight) -> nn.Module:
        rows, cols = weight.codes.shape[0], 2 * weight.codes.shape[1]
        return Lora(make(weight), rows, cols, RANK, dtype=torch.bfloat16, device=DEVICE)

    return wrap


def bases() -> dict[str, Wrap]:
    """Name the layers that are compared; bitsandbytes is left out where it is not installed."""
    found: dict[str, Wrap] = {
        "nvfp4": lambda weight: adapted(frozen_linear(weight)),
        "bf16": lambda weight: adapted(dense_linear(NVFP4.dequantize(weight, torch.bfloat16))),
        "nvfp4+lora": separate(frozen_linear),
        "bf16+lora": separate(lambda weight: dense_linear(NVFP4.dequantize(weight, torch.bfloat16))),
        "compressed-tensors+lora": separate(DecompressingLinear),
    }
    if importlib.util.find_spec("bitsandbytes"):
        found["bitsandbytes-nf4+lora"] = separate(lambda weight: nf4_linear(NVFP4.dequantize(weight, torch.bfloat16)))
    return found


def errors(wrap: Wrap, weight: PackedWeight) -> Iterator[tuple[str, float, float]]:
    """Compare output and input gradient with fp64, adapter included."""
    layer = wrap(weight)
    parameters = {name.split(".")[0][-1].lower(): p for name, p in layer.named_parameters() if p.requires_grad}
    exact = dequantize_reference(weight).double() + parameters["b"].double() @ parameters["a"].double()
    x = torch.randn(96, exact.shape[1], device=DEVICE).bfloat16().requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    yield "output", relative_error(y, x.double() @ exact.t()), 4 * 2**-8
    yield "input gradient", relative_error(dx, dy.double() @ exact), 4 * 2**-8


def block_pass(layers: dict[str, nn.Module], activations: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Do forward and backward through the linears of a block."""
    outputs = [layers[name](activations[source]) for name, source in PROJECTION_INPUTS.items()]
    torch.autograd.backward(outputs, [gradients[name] for name in PROJECTION_INPUTS])
    for tensor in (*activations.values(), *(p for layer in layers.values() for p in layer.parameters())):
        tensor.grad = None


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, "--size")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192] if CUDA else [64])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    shapes = linear_shapes(args.size)
    weights = {name: random_weight(*shape, DEVICE) for name, shape in shapes.items()}
    wraps = bases()
    for name, wrap in wraps.items():
        if "nf4" not in name:  # other weights
            check((f"{name}: {what}", error, bound) for what, error, bound in errors(wrap, weights["k_proj"]))
    blocks = {name: {part: wrap(weight) for part, weight in weights.items()} for name, wrap in wraps.items()}
    for tokens in args.tokens:
        activations = {
            source: torch.randn(tokens, shapes[name][1], device=DEVICE).bfloat16().requires_grad_()
            for name, source in PROJECTION_INPUTS.items()
        }
        gradients = {name: torch.randn(tokens, rows, device=DEVICE).bfloat16() for name, (rows, _) in shapes.items()}
        runs = {name: partial(block_pass, layers, activations, gradients) for name, layers in blocks.items()}
        device = {name: device_seconds(run) for name, run in runs.items()}
        with torch.autograd.set_multithreading_enabled(False):  # small passes gain from backward in the caller's thread
            seconds = timed(runs, repeats=args.repeats, inner=5 if CUDA else 1)
        shape = {"model": args.size, "tokens": tokens, "rank": RANK}
        for name, found in seconds.items():
            ratio = median(found) / median(seconds["bf16"])
            emit(f"linears/{name}", shape, "bfloat16", found, ratio=ratio, device_s=device[name])


if __name__ == "__main__":
    main()
