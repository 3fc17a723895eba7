"""Time the NVFP4 GEMM for up to 64 tokens, in every variant and division of K: python -m tests.bench.bench_decode

This GEMM is the one of ``qerl_pl/hopper/nvfp4_decode.py``; K is the number of inputs, and a schedule is a variant of
the kernel together with the number of parts into which K is divided among thread blocks. The results decide the
constants of ``qerl_pl/hopper/costs.py`` from which a schedule is chosen. ``decode/alone`` times each fused linear layer
of a transformer block with its adapter, in a CUDA graph that uses copies of the weight in turn, so that no weight is in
the cache. A schedule that is fastest when the layer runs alone need not be fastest between other layers, so
``decode/layer`` times all linear layers of a block as ``bench_layer`` does: with the chosen schedules, and with each of
the fastest schedules of one linear layer instead of the chosen one. Each result, a JSON line, names the schedule that
was measured and says whether ``nvfp4_decode.choose_schedule`` chooses it. A model size takes about a minute;
``decode/layer`` needs vLLM.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qerl_pl.hopper import costs, driver, lora_hopper, nvfp4_decode
from qerl_pl.hopper.nvfp4_decode import Schedule, Variant
from tests.bench.harness import RANK, captured, check, emit, native_kernels_run, parser_with, relative_error, timed
from tests.random_models import FUSED, SIZES, fused_shape, linear_shapes

CACHE_BYTES, LAYERS, FASTEST = 3e8, 6, 4
REGISTERS = {8: 96, 16: 96, 32: 120, 64: 168}  # registers per thread, by the variant's number of tokens
SM_REGISTERS, SM_SHARED, BLOCK_SHARED, RESERVED = 65536, 228 * 1024, 227 * 1024, 1024  # of Hopper; bytes
GROUPS, K_BLOCKS, STAGES, BLOCKS = (1, 2, 4), (4, 8), (2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)


def variants(size: int) -> Iterator[Variant]:
    """Yield the kernel's variants for up to ``size`` tokens that fit the registers and the shared memory of an SM."""
    for parameters in product(GROUPS, K_BLOCKS, STAGES, BLOCKS):
        variant = Variant(size, *parameters)
        registers = variant.blocks * variant.threads * REGISTERS[size]
        shared = variant.blocks * (variant.shared_bytes + RESERVED)
        if registers <= SM_REGISTERS and shared <= SM_SHARED and variant.shared_bytes <= BLOCK_SHARED:
            yield variant


def schedules(size: int, outputs: int, inputs: int) -> Iterator[Schedule]:
    """Yield the schedules to try for a linear layer: those with at most twice as many thread blocks as run at the same
    time and, unless K cannot be divided further, at least one thread block per two SMs."""
    blocks = outputs // nvfp4_decode.BLOCK_OUTPUTS
    for variant, splits in product(variants(size), range(1, nvfp4_decode.MOST_SPLITS + 1)):
        stages = inputs // nvfp4_decode.K_BLOCK // (variant.k_blocks * variant.groups)
        enough = splits == min(stages, nvfp4_decode.MOST_SPLITS) or blocks * splits >= costs.SMS / 2
        if enough and splits <= stages and blocks * splits <= 2 * costs.SMS * variant.blocks:
            yield Schedule(variant, splits)


def alone(size: str, name: str, tokens: int, repeats: int) -> list[Schedule]:
    """Time one fused linear layer and its adapter with every schedule. Prints the times of the schedule that
    ``nvfp4_decode.choose_schedule`` chooses and of the fastest schedules, and returns the fastest schedules."""
    widths, inputs = fused_shape(size, name)
    outputs = sum(widths)
    chosen = nvfp4_decode.choose_schedule(tokens, outputs, inputs)
    assert chosen is not None, (size, name, tokens)
    weights = random_weights(outputs, inputs)
    scale, x = torch.full((1,), inputs**-0.5, device="cuda"), torch.randn(tokens, inputs, device="cuda").bfloat16()
    a = [torch.randn(RANK, inputs, device="cuda").bfloat16() * inputs**-0.5 for _ in widths]
    b = [torch.randn(width, RANK, device="cuda").bfloat16() * 0.1 for width in widths]
    adapter = lora_hopper.Adapter(a, b, torch.zeros(tokens, dtype=torch.int64, device="cuda"))

    def run(schedule: Schedule) -> Tensor:
        linear = partial(nvfp4_decode.decode_linear, x, adapter=adapter)
        return [linear(*weight, scale, None, schedule) for weight in weights][-1]

    tried = dict.fromkeys([chosen, *schedules(chosen.variant.tokens, outputs, inputs)])
    driver.prepare({nvfp4_decode.kernel(schedule.variant) for schedule in tried}, x.device)
    exact = run(chosen)
    check((str(schedule), relative_error(run(schedule), exact), 2**-6) for schedule in tried)
    runs: dict[str, Callable[[], object]] = {str(schedule): captured(partial(run, schedule)) for schedule in tried}
    times = timed(runs, repeats=3)
    fastest = sorted(tried, key=lambda schedule: times[str(schedule)])[:FASTEST]
    again = timed({str(schedule): runs[str(schedule)] for schedule in {chosen, *fastest}}, repeats=repeats, inner=4)
    shape = {"model": size, "linear": name, "tokens": tokens}
    for schedule in dict.fromkeys([chosen, *fastest]):
        of_one = [seconds / len(weights) for seconds in again[str(schedule)]]
        emit("decode/alone", shape, "bfloat16", of_one, **about(schedule), chosen=schedule == chosen)
    return fastest


def layer(size: str, tokens: int, repeats: int, fastest: dict[str, list[Schedule]]) -> None:
    """Time all linear layers of a block with the schedules that ``nvfp4_decode.choose_schedule`` chooses. Then repeat
    this for each schedule in ``fastest``, used in one linear layer in place of the chosen one."""
    bench_layer: Any = import_module("tests.bench.bench_layer")  # with Triton's kernels, which a CPU interprets
    layers = bench_layer.in_turn([bench_layer.random_layer(size) for _ in range(LAYERS)])
    x = torch.randn(tokens, linear_shapes(size)["q_proj"][1], device="cuda").bfloat16()
    indices = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    decode = partial(bench_layer.decode, layers, bench_layer.variants()["together"], x, indices)
    choose, runs = nvfp4_decode.choose_schedule, {"chosen": captured(decode)}
    tried = {f"{name} {place}": (name, schedule) for name in fastest for place, schedule in enumerate(fastest[name])}
    for key, (name, schedule) in tried.items():
        widths, inputs = fused_shape(size, name)
        shape = tokens, sum(widths), inputs

        def instead(*asked: int, shape: tuple[int, ...] = shape, schedule: Schedule = schedule) -> Schedule | None:
            return schedule if asked == shape else choose(*asked)

        with patch.object(nvfp4_decode, "choose_schedule", instead):
            runs[key] = captured(decode)
    for key, seconds in timed(runs, repeats=repeats, inner=4).items():
        name, schedule = tried.get(key, (None, None))
        details: dict[str, Any] = about(schedule) if schedule else {"chosen": True}
        shape = {"model": size, "linear": name, "tokens": tokens}
        emit("decode/layer", shape, "bfloat16", [second / LAYERS for second in seconds], **details)


def random_weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Draw a weight and its scales in tile order."""
    words = torch.randint(-(2**31), 2**31 - 1, (inputs // 16, 2 * outputs), dtype=torch.int32, device="cuda")
    return words, (torch.rand(inputs // 16, outputs, device="cuda") + 0.5).to(torch.float8_e4m3fn)


def random_weights(outputs: int, inputs: int) -> list[tuple[Tensor, Tensor]]:
    """Draw several random weights of one shape: so many that, used in turn, none of them is still in the GPU's cache
    when it is used again."""
    return [random_weight(outputs, inputs) for _ in range(2 + int(CACHE_BYTES / (outputs * inputs * 0.5625)))]


def about(schedule: Schedule) -> dict[str, Any]:
    """Describe a schedule in a line."""
    return {"variant": schedule.variant._asdict(), "splits": schedule.splits}


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, repeats=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["7B", "14B"])
    parser.add_argument("--tokens", type=int, nargs="+", choices=range(1, 33), default=[8, 16, 32], metavar="T")
    args = parser.parse_args(argv)
    if not native_kernels_run("decode"):
        return
    for size, tokens in product(args.sizes, args.tokens):
        fastest = {name: alone(size, name, tokens, args.repeats) for name in FUSED}
        if importlib.util.find_spec("vllm"):
            layer(size, tokens, args.repeats, fastest)


if __name__ == "__main__":
    main()
