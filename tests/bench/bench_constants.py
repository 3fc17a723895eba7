"""Measure the constants of qerl_pl/hopper/costs.py again: python -m tests.bench.bench_constants

Prints one JSON line for each constant: ``today`` is the value in the file, and ``measured`` the value on this GPU. The
file is not changed. Constants that the file calls thresholds between two alternatives are not measured. Needs a GPU of
compute capability 9.0 and takes about a minute.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qerl_pl.hopper import costs, driver, lora_hopper, nvfp4_batch
from qerl_pl.hopper.nvfp4_batch import K_BLOCK, TILE, Schedule, Variant
from tests.bench.bench_decode import random_weights
from tests.bench.bench_schedules import CACHE_BYTES, CALLS, rounds
from tests.bench.harness import RANK, captured, emit, native_kernels_run, parser_with, timed

DEPTHS = (2048, 4096, 8192)  # inputs K
CLUSTERS_OF_EIGHT = 14
MOST_COPIES = 512


class Constant(NamedTuple):
    """One constant of ``costs``."""

    name: str
    today: float
    measured: float


class GemmTime(Protocol):
    """Function that returns the seconds of the GEMM of ``nvfp4_batch`` with a given schedule; with ``fuses_lora`` the
    GEMM also adds an adapter."""

    def __call__(
        self, schedule: Schedule, num_tokens: int, outputs: int, inputs: int, *, fuses_lora: bool = False
    ) -> float: ...


def fitted(variant: Variant, gemm_s: GemmTime, *, tiles: int | None = None) -> tuple[float, float]:
    """Fit a line over K, the number of inputs, to the seconds of one wave (as many thread blocks as the GPU runs at the
    same time). Each thread block computes ``tiles`` tiles of 64 outputs, by default as many as the kernel variant
    allows. Returns the slope, in cycles of an SM per tile and k-block (16 inputs), and the intercept in seconds."""
    schedule, tiles = Schedule(variant, 1, costs.SMS), tiles or variant.tiles
    outputs = costs.SMS * tiles * TILE
    slope, rest = linear_regression(DEPTHS, [gemm_s(schedule, variant.tokens, outputs, K) for K in DEPTHS])
    return slope * K_BLOCK / tiles * costs.CLOCK_HZ, rest


def gemm_constants(gemm_s: GemmTime) -> Iterator[Constant]:
    """Compute the constants of the batch GEMM from its times."""
    fits = {tokens: fitted(Variant(tokens, 2 if tokens == 256 else 4), gemm_s) for tokens in costs.K_BLOCK_CYCLES}
    for tokens, (cycles, _) in fits.items():
        yield Constant(f"K_BLOCK_CYCLES[{tokens}]", costs.K_BLOCK_CYCLES[tokens], cycles)
    yield Constant("LONE_TILE", costs.LONE_TILE, fitted(Variant(256, 2), gemm_s, tiles=1)[0] / fits[256][0])
    yield Constant("BLOCK_S", costs.BLOCK_S, fmean(rest for _, rest in fits.values()))
    yield Constant("TWO_TILES", costs.TWO_TILES, fitted(Variant(128, 2), gemm_s)[0] / fits[128][0])

    # 112 thread blocks with equal work form clusters of 1, 2 and 8 thread blocks. The thread blocks of a cluster add up
    # their partial sums of 256 outputs x 128 tokens, so the times differ only by what a cluster and its sums cost.
    variant, blocks, depth = Variant(128, 4), 8 * CLUSTERS_OF_EIGHT, DEPTHS[0]
    one, two, eight = (
        gemm_s(Schedule(variant, splits, blocks // splits), 128, blocks // splits * 4 * TILE, depth * splits)
        for splits in (1, 2, 8)
    )
    sums = (eight - two) / (7 / 8 - 1 / 2)
    yield Constant("CLUSTER_S", costs.CLUSTER_S, two - one - sums / 2)
    yield Constant("SUMS_S", costs.SUMS_S, sums)

    def adapter_s(variant: Variant) -> float:
        shape = Schedule(variant, 1, costs.SMS), variant.tokens, costs.SMS * variant.tiles * TILE, DEPTHS[1]
        return gemm_s(*shape, fuses_lora=True) - gemm_s(*shape)

    for (tokens, tiles), today in costs.ADAPTER_S.items():
        extra = adapter_s(Variant(tokens, tiles)) - adapter_s(Variant(128, 4))
        yield Constant(f"ADAPTER_S[{tokens}, {tiles}]", today, extra)


def shrink_constants(shrink_s: Callable[[int, int], float]) -> Iterator[Constant]:
    """Fit the constants with which ``costs`` predicts the time of the kernel for x A^T, the adapter's first product.
    ``shrink_s(n, K)`` gives the seconds of a launch with n matrices A, such as 3 for q, k and v, and K inputs."""
    for slices, (constant, per_input) in costs.SHRINK_TILE_S.items():
        slope, rest = linear_regression(DEPTHS, [shrink_s(slices, inputs) for inputs in DEPTHS])
        yield Constant(f"SHRINK_TILE_S[{slices}] constant", constant, rest)
        yield Constant(f"SHRINK_TILE_S[{slices}] per input", per_input, slope)


def time_gemm(
    schedule: Schedule, num_tokens: int, outputs: int, inputs: int, *, fuses_lora: bool = False, repeats: int
) -> float:
    """Return the median seconds of the GEMM of ``nvfp4_batch`` with random operands. Consecutive calls use different
    weights, so no weight is in the GPU's cache when it is read."""
    driver.prepare([nvfp4_batch.kernel(schedule.variant)], torch.device("cuda", torch.cuda.current_device()))
    x, one = torch.randn(num_tokens, inputs, device="cuda").bfloat16(), torch.ones(1, device="cuda")
    update = None
    if fuses_lora:
        hidden = torch.randn(1, num_tokens, RANK, device="cuda").bfloat16()
        update = lora_hopper.Update(hidden, [torch.randn(outputs, RANK, device="cuda").bfloat16()])

    def run(weight: tuple[Tensor, Tensor]) -> Tensor:
        return nvfp4_batch.batch_linear(x, *weight, one, None, schedule=schedule, update=update)

    copies = random_weights(outputs, inputs)
    seconds = timed({"gemm": rounds(run, copies)}, repeats=repeats)["gemm"]
    return median(seconds) / (CALLS * len(copies))


def time_shrink(slices: int, inputs: int, *, repeats: int) -> float:
    """Return the median seconds of x A^T for one tile of tokens. Consecutive calls use different matrices A, so no
    matrix is in the GPU's cache when it is read."""
    tokens = max(lora_hopper.CHUNKS_IN_FLIGHT[slices])
    driver.prepare([lora_hopper.kernel(tokens, slices)], torch.device("cuda", torch.cuda.current_device()))
    x, indices = torch.randn(tokens, inputs, device="cuda").bfloat16(), torch.zeros(tokens, device="cuda").long()
    num_copies = min(MOST_COPIES, 1 + int(CACHE_BYTES / (2 * slices * RANK * inputs)))
    copies = [[torch.randn(RANK, inputs, device="cuda").bfloat16() for _ in range(slices)] for _ in range(num_copies)]

    def calls() -> None:
        for a in copies:
            lora_hopper.shrink(x, a, indices, lora_hopper.Schedule(tokens, 1))

    return median(timed({"shrink": captured(calls)}, repeats=repeats)["shrink"]) / num_copies


def gpu_constants() -> Iterator[Constant]:
    """Ask the driver for the number of SMs, and how many clusters of thread blocks run at the same time, by the size of
    the clusters."""
    device = torch.device("cuda", torch.cuda.current_device())
    yield Constant("SMS", costs.SMS, torch.cuda.get_device_properties(device).multi_processor_count)
    cuda: Any = import_module("cuda.bindings.driver")
    kernel = nvfp4_batch.kernel(Variant(128, 4))
    driver.prepare([kernel], device)
    for size, today in costs.RESIDENT_CLUSTERS.items():
        config, shape = cuda.CUlaunchConfig(), cuda.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = costs.SMS, size, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 4 * 128, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        shape.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = shape.value.clusterDim
        dimension.x, dimension.y, dimension.z = 1, size, 1
        config.attrs, config.numAttrs = [shape], 1
        [resident] = driver.checked(cuda.cuOccupancyMaxActiveClusters(driver.load(kernel, device.index), config))
        yield Constant(f"RESIDENT_CLUSTERS[{size}]", today, resident)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the constants."""
    args = parser_with(__doc__, repeats=7).parse_args(argv)
    if not native_kernels_run("constants"):
        return
    sources = (
        gpu_constants(),
        gemm_constants(partial(time_gemm, repeats=args.repeats)),
        shrink_constants(partial(time_shrink, repeats=args.repeats)),
    )
    for constants in sources:
        for constant in constants:
            emit(f"constants/{constant.name}", {}, "bfloat16", today=constant.today, measured=constant.measured)


if __name__ == "__main__":
    main()
