"""GEMM y = x W^T of bf16 inputs and NVFP4 weights for up to 2048 tokens on Hopper, for large batches and prompts.

With this many tokens the GEMM can keep the tensor cores busy if they do not wait for weights to be converted. Each
warpgroup therefore computes outputs that no other warpgroup computes, converts their weights in registers and does not
wait for other warpgroups. TMA copies inputs, weights and scales to shared memory. Sums are fp32 in a fixed order: equal
inputs give equal bits.

A k-block is 16 inputs; a tile is 64 outputs, computed by one warpgroup; a token tile is the set of tokens for which a
thread block computes its outputs; a wave is a set of thread blocks that the GPU runs at the same time. Letters: T
tokens, K inputs, N outputs. ``tile_order`` has the weight layout, and `docs/kernels.md` the overview.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache, lru_cache
from heapq import heapreplace
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from qerl_pl.hopper import costs, driver, lora_hopper

MOST_TOKENS = 2048
"""Largest number of tokens that this kernel multiplies; with more, dequantising the weight and multiplying by cuBLAS
take as long or less.

This kernel converts the weights again for every token tile, while dequantising converts them only once. On an H100,
dequantising and cuBLAS together take 1.37 to 1.5 times as long as this kernel for the linear layers of Qwen2.5-7B to
32B with 512 tokens, 1.2 times with 1024, 1.0 to 1.04 times with 2048, and 0.95 to 1.0 times with 3072. `bench_batch`
measures both.
"""
TILE, K_BLOCK, STAGE_INPUTS = 64, 16, 128  # outputs per warpgroup; inputs per scale and per pipeline stage;
X_BOX_INPUTS = 64  # inputs of x that one TMA copy transfers; K must be a multiple of it
SHARED_BYTES = 227 * 1024  # shared memory that a thread block can use
MOST_DECODED, MOST_TOKEN_TILES = 256, 2  # with up to 256 tokens, a GEMM has at most 2 token tiles
MOST_WAVES = 3  # numbers of waves that are tried for a variant


class Variant(NamedTuple):
    """Template parameters of the batch GEMM kernel."""

    tokens: int  # tokens per thread block: 64, 96, 128 or 256
    tiles: int
    """Tiles of 64 outputs per thread block, 2 to 5, each computed by one warpgroup. With 256 tokens there are two,
    because the sums for 256 tokens take half of an SM's registers."""

    def token_tiles(self, num_tokens: int) -> int:
        """Count the thread blocks that compute the same outputs for different tokens."""
        return -(-num_tokens // self.tokens)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that one pipeline stage takes: x, codes and scales for 128 inputs."""
        return -(-(self.tokens * 2 * STAGE_INPUTS + self.tiles * 576 * STAGE_INPUTS // K_BLOCK) // 1024) * 1024

    @property
    def stages(self) -> int:
        """Pipeline stages in shared memory."""
        return min(6, (SHARED_BYTES - self._other_bytes) // (self.stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per thread block."""
        stages = self.stages * (self.stage_bytes + 16) + self._other_bytes
        return max(stages, self.tokens * (self.tiles * TILE + 4) * 4)

    @property
    def _other_bytes(self) -> int:
        """Bytes of shared memory per thread block for the block scales that its warps have converted to bf16."""
        return self.tiles * 4 * STAGE_INPUTS * 2


class Schedule(NamedTuple):
    """Division of one GEMM among thread blocks."""

    variant: Variant
    splits: int
    """Number of parts into which the K inputs are divided. The thread blocks that compute these parts for the same
    outputs and tokens form a cluster."""
    blocks: int
    """Number of thread blocks among which the outputs are divided. If K is not split, the last ones may have one tile
    of 64 outputs fewer than the others."""

    def wide(self, outputs: int) -> int:
        """Count the thread blocks that compute as many tiles of 64 outputs as the kernel variant allows. They compute
        the outputs with the lowest indices; the other thread blocks compute one tile less."""
        narrower = self.blocks * (self.variant.tiles - 1)
        return self.blocks if self.splits > 1 else min(self.blocks, max(0, outputs // TILE - narrower))


VARIANTS = [*(Variant(tokens, tiles) for tokens in (64, 96, 128) for tiles in range(2, 6)), Variant(256, 2)]
PROMPTS = [variant for variant in VARIANTS if variant.tokens >= 128]  # for more than ``MOST_DECODED`` tokens
FULL_TILES = [64, 96, 128, 192, *range(MOST_DECODED, MOST_TOKENS + 1, 128)]
"""Numbers of tokens for which schedules are chosen; each fills the last token tile of some variant. A number of tokens
between them uses the schedule of the next larger one."""


def choose_schedule(num_tokens: int, outputs: int, inputs: int, *, fuses_lora: bool = False) -> Schedule | None:
    """Choose the schedule of the batch GEMM, for a product with or without a LoRA adapter, such that its predicted time
    is shortest. Returns None if the kernel cannot compute the product."""
    if not 0 < num_tokens <= MOST_TOKENS or outputs % TILE or inputs % X_BOX_INPUTS:
        return None
    return _fastest(FULL_TILES[bisect_left(FULL_TILES, num_tokens)], outputs, inputs, fuses_lora)


@cache
def _fastest(num_tokens: int, outputs: int, inputs: int, fuses_lora: bool) -> Schedule:
    """Return the schedule of the shortest predicted time."""

    def cost(schedule: Schedule) -> tuple[float, int]:
        adapter = costs.ADAPTER_S.get(schedule.variant, 0.0) * _waves(schedule, num_tokens) if fuses_lora else 0.0
        return seconds(schedule, num_tokens, outputs, inputs) + adapter, schedule.blocks

    tried = (one for variant in variants_for(num_tokens) for one in schedules(variant, num_tokens, outputs))
    return min(tried, key=cost)


@cache
def spare_sms(schedule: Schedule, num_tokens: int, outputs: int, inputs: int) -> lora_hopper.SpareSMs:
    """Predict how many SMs the batch GEMM leaves idle for ``lora_hopper.shrink``, and for how many seconds. If SMs run
    several thread blocks one after another, the GEMM may take as long without some of the SMs. Their time is counted as
    that of more SMs which are idle only while the others compute their first thread block."""
    _, splits, blocks = schedule
    whole, waves = seconds(schedule, num_tokens, outputs, inputs), _waves(schedule, num_tokens)
    if splits > 1:
        left = max(0, costs.CONCURRENT_CLUSTERS[splits] - _clusters(schedule, num_tokens)) * splits
        return lora_hopper.SpareSMs(left, whole)
    token_tiles = schedule.variant.token_tiles(num_tokens)
    needed = _tiles_in_turn(schedule, token_tiles, outputs, costs.SMS)
    counts = range(1, costs.SMS + 1)
    fewest = next(count for count in counts if _tiles_in_turn(schedule, token_tiles, outputs, count) <= needed)
    first = whole if waves == 1 else outputs / TILE / blocks * _tile_s(schedule, inputs) + costs.BLOCK_S
    return lora_hopper.SpareSMs(int((costs.SMS - fewest) * whole / first), first)


def variants_for(num_tokens: int) -> list[Variant]:
    """Return the kernel variants among which the schedule for this number of tokens is chosen."""
    few = [variant for variant in VARIANTS if variant.tokens * MOST_TOKEN_TILES >= num_tokens]
    return few if num_tokens <= MOST_DECODED else PROMPTS


def schedules(variant: Variant, num_tokens: int, outputs: int) -> Iterator[Schedule]:
    """Yield candidate divisions of a GEMM among thread blocks, for one kernel variant. First, for each number of parts
    into which the K inputs may be split (1: no split), the division into the fewest thread blocks. Then divisions
    without a split into the most thread blocks that fit into a number of waves, on all SMs or on those that one cluster
    of ``lora_hopper.shrink`` leaves; each of these thread blocks computes n or n - 1 tiles of 64 outputs, where n is
    the most that the variant allows."""
    tiles, token_tiles = outputs // TILE, variant.token_tiles(num_tokens)
    fewest, most = -(-tiles // variant.tiles), tiles // (variant.tiles - 1)
    yield from (Schedule(variant, splits, fewest) for splits in costs.RESIDENT_CLUSTERS)
    # A schedule for the smaller number of SMs leaves room for one cluster of ``shrink`` at the same time.
    for sms in (costs.SMS, costs.SMS - lora_hopper.SPLITS) if num_tokens <= MOST_DECODED else (costs.SMS,):
        first = fewest * token_tiles // sms + 1
        for waves in range(first, first + MOST_WAVES):
            if fewest < (blocks := waves * sms // token_tiles) <= most:
                yield Schedule(variant, 1, blocks)


def _clusters(schedule: Schedule, num_tokens: int) -> int:
    return schedule.blocks * schedule.variant.token_tiles(num_tokens)


def _waves(schedule: Schedule, num_tokens: int) -> int:
    return -(-_clusters(schedule, num_tokens) // costs.CONCURRENT_CLUSTERS[schedule.splits])


@cache
def _tiles_in_turn(schedule: Schedule, token_tiles: int, outputs: int, sms: int) -> float:
    """Return the largest number of tiles of 64 outputs that one of ``sms`` SMs computes one after another, if an SM
    starts the next thread block when its previous one has ended. The thread blocks of ``schedule`` compute as many
    tiles as its kernel variant allows, n, or n - 1; if n is 2, a thread block with one tile counts as
    ``costs.LONE_TILE`` tiles, because it takes longer than half the time of a thread block with two."""
    wide, tiles = schedule.wide(outputs), schedule.variant.tiles
    widths = [tiles] * wide + [costs.LONE_TILE if tiles == 2 else tiles - 1] * (schedule.blocks - wide)
    ends = [0.0] * sms
    for width in widths * token_tiles:
        heapreplace(ends, ends[0] + width)
    return max(ends)


def _stages(inputs: int) -> int:
    return -(-inputs // STAGE_INPUTS)


def _tile_s(schedule: Schedule, inputs: int) -> float:
    """Predict the seconds that an SM needs to compute one tile of 64 outputs from the inputs that a thread block
    multiplies: all K inputs, or one of the parts into which ``schedule`` divides them."""
    (tokens, tiles), splits, _ = schedule
    k_blocks = -(-_stages(inputs) // splits) * STAGE_INPUTS // K_BLOCK
    factor = costs.TWO_TILES if tiles == 2 and tokens < 256 else 1
    return k_blocks * costs.K_BLOCK_CYCLES[tokens] * factor / costs.CLOCK_HZ


def seconds(schedule: Schedule, num_tokens: int, outputs: int, inputs: int) -> float:
    """Predict the seconds that a GEMM takes on the GPU of ``costs``; infinity for a ``schedule`` that splits the K
    inputs into more parts than K has pipeline stages."""
    (tokens, tiles), splits, _ = schedule
    waves = _waves(schedule, num_tokens)
    if splits == 1:
        in_turn = _tiles_in_turn(schedule, schedule.variant.token_tiles(num_tokens), outputs, costs.SMS)
        return in_turn * _tile_s(schedule, inputs) + waves * costs.BLOCK_S
    if splits > _stages(inputs):
        return math.inf
    sums = costs.SUMS_S * (splits - 1) / splits * tiles * tokens / 512
    return waves * (tiles * _tile_s(schedule, inputs) + costs.BLOCK_S + costs.CLUSTER_S + sums)


@cache
def kernel(variant: Variant) -> driver.Kernel:
    """Return the instance of the kernel template for a variant."""
    name = "nvfp4_batch_" + "_".join(map(str, variant))
    code = f"""
extern "C" __global__ void __launch_bounds__({variant.tiles * 128}, 1)
    {name}(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
    const __grid_constant__ TensorMap scale, const float *global_scale, const u16 *bias, u16 *y, int tokens, int N,
    int K, int splits, int wide, {lora_hopper.PARAMETERS}) {{
  nvfp4_batch<{variant.tokens}, {variant.tiles}, {variant.stages}>(&x, &weight, &scale, global_scale, bias, y, tokens,
                                                                   N, K, splits, wide, {lora_hopper.ADAPTER});
}}
"""
    return driver.Kernel("nvfp4_batch.cu", name, code, variant.shared_bytes)


def kernels_for(outputs: int, inputs: int) -> list[driver.Kernel]:
    """List every instance of the kernel that a linear layer of this shape may need, over all numbers of tokens."""
    decoded = [most for most in FULL_TILES if most <= MOST_DECODED]
    schedules = (
        choose_schedule(most, outputs, inputs, fuses_lora=fuses) for most in decoded for fuses in (False, True)
    )
    chosen = [schedule.variant for schedule in schedules if schedule]
    return [kernel(variant) for variant in (*chosen, *PROMPTS) if chosen]


def batch_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    schedule: Schedule,
    out: Tensor | None = None,
    update: lora_hopper.Update | None = None,
) -> Tensor:
    """Compute y = x W^T + bias by the batch GEMM, plus a LoRA adapter's h B^T if ``update`` gives h and B, and round
    the sum to bf16 once: [T, N] bf16.

    All arguments before ``update`` are those of ``nvfp4_decode.decode_linear`` with the same names. The CUDA driver
    refuses (RuntimeError) an x whose address is no multiple of 16.
    """
    x = x.contiguous()
    (num_tokens, inputs), outputs = x.shape, scales.shape[1]
    (tokens, tiles), splits, blocks = schedule
    y = x.new_empty(num_tokens, outputs) if out is None else out
    k_blocks, all_tiles = inputs // K_BLOCK, outputs // TILE
    # TMA copies the activations x in rows of 128 bytes, swizzled as wgmma expects. For 16 inputs, a tile of 64 outputs
    # has 512 bytes of 4-bit weights and 64 bytes of scales.
    x_map = _tensor_map(
        x.data_ptr(), (X_BOX_INPUTS, num_tokens, inputs // X_BOX_INPUTS), (inputs * 2, 128), (64, tokens, 2), True
    )
    weight_map = _tensor_map(weight.data_ptr(), (64, all_tiles, k_blocks), (512, outputs * 8), (64, tiles, 8), False)
    scale_map = _tensor_map(scales.data_ptr(), (8, all_tiles, k_blocks), (64, outputs), (8, tiles, 8), False)
    driver.launch(
        kernel(schedule.variant),
        grid=(blocks, splits, schedule.variant.token_tiles(num_tokens)),
        threads=128 * tiles,
        cluster=splits,
        device=x.device,
        arguments=[
            *(x_map, weight_map, scale_map, global_scale, bias, y, num_tokens, outputs, inputs, splits),
            schedule.wide(outputs),
            *lora_hopper.arguments(update),
        ],
        pdl=update is not None,
    )
    return y


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzled_bf16: bool
) -> Any:
    """Build a TMA descriptor of a 3-D tensor. Sizes and ``box``, which one copy transfers, are in elements, the
    contiguous dimension first; ``strides`` of the others are in bytes. If ``swizzled_bf16``, elements are bf16 with the
    128-byte swizzle; else they have 8 bytes and no swizzle."""
    cuda: Any = import_module("cuda.bindings.driver")
    kinds, swizzles = cuda.CUtensorMapDataType, cuda.CUtensorMapSwizzle
    [tensor_map] = driver.checked(
        cuda.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if swizzled_bf16 else kinds.CU_TENSOR_MAP_DATA_TYPE_INT64,
            len(sizes),
            address,
            [cuda.cuuint64_t(size) for size in sizes],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1)] * len(sizes),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled_bf16 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return tensor_map
