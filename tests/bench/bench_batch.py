"""Time the NVFP4 GEMM for up to 2048 tokens by schedule, and cuBLAS: python -m tests.bench.bench_batch

This GEMM is the one of ``qerl_pl/hopper/nvfp4_batch.py``. The results decide the constants of
``qerl_pl/hopper/costs.py`` from which its schedule is chosen, and its largest number of tokens, ``MOST_TOKENS``. Each
fused linear layer of a transformer block is measured without an adapter, in a CUDA graph that uses copies of the weight
in turn, so that no weight is in the cache. Results have the name ``batch/gemm`` for the chosen schedule and, for each
variant of the kernel, the schedule that is predicted to be the fastest, and ``batch/dequantised`` where the weight is
first dequantised to memory and then multiplied by cuBLAS. Each result, a JSON line, names the schedule that was
measured and says whether ``nvfp4_batch.choose_schedule`` chooses it. A model size takes about a minute.
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl_pl.hopper import driver, nvfp4_batch
from qerl_pl.hopper.dequantize import dequantize_tiles
from qerl_pl.hopper.nvfp4_batch import Schedule
from tests.bench.bench_decode import random_weights
from tests.bench.harness import captured, check, emit, native_kernels_run, parser_with, relative_error, timed
from tests.random_models import FUSED, SIZES, fused_shape

SAMPLE_S = 0.03


def candidates(tokens: int, outputs: int, inputs: int) -> list[Schedule]:
    """Return the schedule that ``nvfp4_batch.choose_schedule`` chooses and then, for each variant of the kernel, the
    schedule that is predicted to be the fastest."""
    chosen = nvfp4_batch.choose_schedule(tokens, outputs, inputs)
    assert chosen is not None, (tokens, outputs, inputs)
    best = (
        min(
            nvfp4_batch.schedules(variant, tokens, outputs),
            key=lambda schedule: nvfp4_batch.seconds(schedule, tokens, outputs, inputs),
        )
        for variant in nvfp4_batch.variants_for(tokens)
    )
    return list(dict.fromkeys([chosen, *best]))


def linear(size: str, name: str, tokens: int, repeats: int) -> None:
    """Check and time one fused linear layer with each schedule of ``candidates``, and by dequantising the weight and
    multiplying with cuBLAS."""
    widths, inputs = fused_shape(size, name)
    outputs = sum(widths)
    weights = random_weights(outputs, inputs)
    scale, x = torch.full((1,), inputs**-0.5, device="cuda"), torch.randn(tokens, inputs, device="cuda").bfloat16()
    chosen, *others = candidates(tokens, outputs, inputs)

    def multiply(schedule: Schedule) -> Tensor:
        return [nvfp4_batch.batch_linear(x, *weight, scale, None, schedule) for weight in weights][-1]

    def dequantised() -> Tensor:
        dense = (dequantize_tiles(codes, scales.view(torch.uint8), scale, x.dtype) for codes, scales in weights)
        return [F.linear(x, weight) for weight in dense][-1]

    driver.prepare({nvfp4_batch.kernel(schedule.variant) for schedule in (chosen, *others)}, x.device)
    exact = dequantised()
    check((str(one), relative_error(multiply(one), exact), 2**-6) for one in (chosen, *others))
    runs = {str(one): captured(partial(multiply, one)) for one in (chosen, *others)} | {"": captured(dequantised)}
    once = timed({"": runs[""]}, repeats=1)[""][0]
    times = timed(runs, repeats=repeats, inner=1 + int(SAMPLE_S / once))
    shape = {"model": size, "linear": name, "tokens": tokens}
    for schedule in (chosen, *others):
        of_one = [seconds / len(weights) for seconds in times[str(schedule)]]
        about = {"variant": schedule.variant._asdict(), "splits": schedule.splits, "blocks": schedule.blocks}
        emit("batch/gemm", shape, "bfloat16", of_one, **about, chosen=schedule == chosen)
    emit("batch/dequantised", shape, "bfloat16", [seconds / len(weights) for seconds in times[""]])


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, tokens=[128, 192, 256, 512, 1024, 2048], repeats=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["7B", "32B"])
    parser.add_argument("--linears", nargs="+", choices=FUSED, default=list(FUSED))
    args = parser.parse_args(argv)
    if not native_kernels_run("batch"):
        return
    for size, tokens, name in product(args.sizes, args.tokens, args.linears):
        linear(size, name, tokens, args.repeats)


if __name__ == "__main__":
    main()
