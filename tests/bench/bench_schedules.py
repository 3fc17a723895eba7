"""Time linear layers with NVFP4 weights by Humming's kernels and by this project's: python -m
tests.bench.bench_schedules

Humming is the library whose kernels vLLM would use for few tokens. The fused linear layers of a transformer block are
timed with bf16 inputs, each alone in a CUDA graph of many calls. The calls use copies of the weight in turn, so no
weight is in the cache when it is used again. Nothing is measured without Humming.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor

from qerl_pl.hopper import driver, nvfp4_batch, nvfp4_decode
from qerl_pl.hopper.tile_order import words_in_tile_order
from qerl_pl.quant.formats import pack
from tests.bench.harness import captured, check, emit, parser_with, relative_error, timed
from tests.random_models import FUSED, SIZES, fused_shape

COMPUTE = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "dense"})
CACHE_BYTES, CALLS, LOCKS = 3e8, 12, 4096


def random_linear(outputs: int, inputs: int) -> tuple[Any, dict[str, Tensor]]:
    """Make a linear layer with random weights by ``humming_linear``."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    return humming_linear(codes, (torch.rand(outputs, inputs // 16, device="cuda") + 0.5).to(torch.float8_e4m3fn))


def humming_linear(codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Make the configuration and the tensors with which vLLM calls Humming for an NVFP4 linear layer. The global scale
    is 1.

    Args:
        codes: [N, K] uint8, an e2m1 code in the lower four bits.
        scales: [N, K / 16] e4m3.
        bias: [N] bf16.
    """
    schema: Any = import_module("humming.schema")  # optional
    prepare: Any = import_module("humming.transform").prepare_and_transform_humming_tensors
    about = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "type": "float", "num_bits": 4}
    weights = schema.BaseWeightSchema.from_config({**about, "strategy": "group", "group_size": 16})
    packed = {"weight_packed": pack(codes), "weight_scale": scales, "weight_global_scale": torch.ones(1, device="cuda")}
    outputs, inputs = codes.shape
    weights, tensors = weights.convert_humming(
        tensors=packed, shape_n_stacks=[outputs], shape_k_stacks=[inputs], param_dtype=torch.bfloat16
    )
    return prepare(
        tensors=tensors if bias is None else {**tensors, "bias": bias},
        shape_n=outputs,
        shape_k=inputs,
        weight_schema=weights,
        input_schema=schema.HummingInputSchema(),
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        has_bias=bias is not None,
        torch_dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )


def multiply(config: Any, tensors: dict[str, Tensor], schedule: dict[str, Any], locks: Tensor, x: Tensor) -> Tensor:
    """[T, K] -> [T, N] with one schedule."""
    forward: Any = import_module("humming.forward").humming_forward
    options = {"locks": locks, "tuning_config": json.dumps(schedule), "compute_config": COMPUTE}
    names = "weight", "weight_scale", "weight_scale_2"
    return forward(config, inputs=x, **{name: tensors.get(name) for name in names}, **options)


def rounds(run: Callable[[Any], Tensor], copies: Sequence[object]) -> Callable[[], object]:
    """``CALLS`` rounds over all copies in one CUDA graph."""

    def calls() -> None:
        for _ in range(CALLS):
            for operands in copies:
                run(operands)

    return captured(calls)


def compare(model: str, name: str, tokens: int, repeats: int) -> None:
    """Multiply by one linear layer with this project's kernels and with Humming's; check that the products agree, and
    time both."""
    rule: Any = import_module("humming.tune").get_heuristics_config
    widths, inputs = fused_shape(model, name)
    outputs = sum(widths)
    config, tensors = random_linear(outputs, inputs)
    size = sum(tensor.nbytes for tensor in tensors.values())
    tensors["in tile order"] = words_in_tile_order(tensors["weight"])
    copies = [{key: value.clone() for key, value in tensors.items()} for _ in range(max(1, int(CACHE_BYTES / size)))]
    locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    theirs = rule(config, tokens, gemm_type="dense")
    schedules = {"rule": theirs}
    products: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
        "rule": lambda operands: multiply(config, operands, theirs, locks, x)
    }
    native = {"decode": (nvfp4_decode, nvfp4_decode.decode_linear), "batch": (nvfp4_batch, nvfp4_batch.batch_linear)}
    for key, (kernel, linear) in native.items():
        if schedule := kernel.choose_schedule(tokens, outputs, inputs):
            driver.prepare(kernel.kernels_for(outputs, inputs), x.device)
            products[key] = lambda operands, linear=linear, schedule=schedule: linear(
                x, operands["in tile order"], operands["weight_scale"], operands["weight_scale_2"], None, schedule
            )
            about = schedule._asdict()
            schedules[key] = {**about.pop("variant")._asdict(), **about}
    exact = multiply(config, tensors, theirs, locks, x)
    torch.cuda.synchronize()  # the locks are shared
    check((key, relative_error(run(tensors), exact), 2**-6) for key, run in products.items())  # sums in another order
    runs = {key: rounds(run, copies) for key, run in products.items()}
    for key, seconds in timed(runs, repeats=repeats).items():
        of_a_call = [second / CALLS / len(copies) for second in seconds]
        shape = {"model": model, "linear": name, "tokens": tokens}
        emit(f"schedules/{key}", shape, "bfloat16", of_a_call, schedule=schedules[key])


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, tokens=[8, 32, 64, 128, 256], repeats=7)
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["7B", "14B"])
    parser.add_argument("--linears", nargs="*", choices=FUSED, default=list(FUSED))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or importlib.util.find_spec("humming") is None:
        print("schedules: nothing is measured without a CUDA GPU and Humming", file=sys.stderr)
        return
    for model, name, tokens in product(args.sizes, args.linears, args.tokens):
        compare(model, name, tokens, args.repeats)


if __name__ == "__main__":
    main()
