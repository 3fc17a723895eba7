"""y = x W^T for NVFP4 weights and up to 256 tokens: the decoding of large batches, on Hopper.

So many tokens keep the tensor cores busy, if turning weights into bf16 does not hold them up. So each warpgroup has
outputs of its own, converts them in registers and waits for no other one; the copy engine (TMA) brings tokens, weights
and scales. Sums are fp32 and added up in a fixed order: equal inputs give equal bits. T tokens, K inputs, N outputs.

Weights lie as Humming 0.1.17 lays them out: see ``nvfp4_decode.fragments``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from heapq import heapreplace
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from qerl_pl.kernels import hopper, lora_hopper

MOST_TOKENS = 256
COLUMN, SLAB, STAGE_INPUTS = 64, 16, 128  # outputs of a warpgroup; inputs of a scale; of what is copied at a time
SHARED_BYTES = 227 * 1024  # of a block, at most
TILES, MOST_ROUNDS = 2, 8  # of tokens, at most

# What costs how much on an H200. A sweep over the linears of Qwen2.5-7B to 32B with 64, 128 and 256 tokens found these:
# for each of them the rule chooses the fastest schedule or one 1 % from it.
SLAB_CYCLES = {64: 48, 96: 61, 128: 74}  # by a block's tokens: a warpgroup's share of a multiprocessor for a slab
HERTZ, FEW_COLUMNS = 1.755e9, 1.2  # two warpgroups do not keep a multiprocessor busy
BLOCK_S, CLUSTER_S, SUM_S = 3e-6, 1e-6, 4e-6  # of any block; of a cluster; of its sums, for 4 columns of 128 tokens
# Clusters of so many blocks that run at a time, where a multiprocessor has room for one block.
AT_A_TIME = {1: 132, 2: 60, 3: 36, 4: 30, 5: 20, 6: 14, 7: 14, 8: 14}
BESIDE = {**AT_A_TIME, 2: 66, 8: 15}  # the same where clusters of another kernel have the rest
# What an adapter's part adds to a block, where registers are few and so less of it is loaded at a time.
ADAPTER_S = {(128, 5): 2.5e-6}
# A large linear of more tokens than a block has is left to Humming where blocks would leave more of the GPU idle than
# this: Humming's share what is left over (`bench_schedules`, 14B with 256 tokens).
LARGE, FULL = 50e6, 0.83  # N x K; of the multiprocessors


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    tokens: int
    """64, 96 or 128: of a block."""
    columns: int
    """2 to 5, each 64 outputs: of a block. Each has a warpgroup."""

    def tiles(self, num_tokens: int) -> int:
        """Blocks for the tokens of one range of outputs."""
        return -(-num_tokens // self.tokens)

    @property
    def stage_bytes(self) -> int:
        """What is copied at a time: 128 inputs of tokens, weights and scales."""
        return -(-(self.tokens * 2 * STAGE_INPUTS + self.columns * 576 * STAGE_INPUTS // SLAB) // 1024) * 1024

    @property
    def stages(self) -> int:
        """In shared memory at a time."""
        return min(6, (SHARED_BYTES - self._other_bytes) // (self.stage_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        stages = self.stages * (self.stage_bytes + 16) + self._other_bytes
        return max(stages, self.tokens * (self.columns * COLUMN + 4) * 4)

    @property
    def _other_bytes(self) -> int:
        """The bf16 scales of each warp."""
        return self.columns * 4 * STAGE_INPUTS * 2


class Schedule(NamedTuple):
    """How a kernel shares its work."""

    variant: Variant
    splits: int
    """Blocks that share the inputs of the same outputs and tokens."""
    blocks: int
    """Along the outputs. Without splits some may be narrower than the others, by a column."""

    def wide(self, outputs: int) -> int:
        """How many blocks are not narrower: the first ones."""
        narrower = self.blocks * (self.variant.columns - 1)
        return self.blocks if self.splits > 1 else min(self.blocks, max(0, outputs // COLUMN - narrower))


VARIANTS = [Variant(tokens, columns) for tokens in SLAB_CYCLES for columns in range(2, 6)]
FULL_TILES = sorted({tokens * tiles for tokens in SLAB_CYCLES for tiles in range(1, TILES + 1)})


@cache
def schedule(num_tokens: int, outputs: int, inputs: int, *, alone: bool = True) -> Schedule | None:
    """What to run; None where this kernel cannot, or, if it is ``alone`` and adds no adapter, Humming's is faster."""
    if not 0 < num_tokens <= MOST_TOKENS or outputs % COLUMN or inputs % STAGE_INPUTS:
        return None

    def cost(how: Schedule) -> tuple[float, int]:
        adapter = 0.0 if alone else ADAPTER_S.get(how.variant, 0.0) * _rounds(how, num_tokens)
        return seconds(how, num_tokens, outputs, inputs) + adapter, how.blocks

    fitting = [variant for variant in VARIANTS if variant.tokens * TILES >= num_tokens]
    best = min((how for variant in fitting for how in _schedules(variant, num_tokens, outputs)), key=cost)
    busy = _clusters(best, num_tokens) * best.splits / (_rounds(best, num_tokens) * AT_A_TIME[1])
    is_hummings = alone and num_tokens > max(SLAB_CYCLES) and outputs * inputs > LARGE and busy < FULL
    return None if is_hummings else best


@cache
def room(how: Schedule, num_tokens: int, outputs: int, inputs: int) -> lora_hopper.Room:
    """For ``lora_hopper.shrink``. Where a multiprocessor has several blocks, it may have later ones' time earlier."""
    _, splits, blocks = how
    whole, rounds = seconds(how, num_tokens, outputs, inputs), _rounds(how, num_tokens)
    if splits > 1:
        return lora_hopper.Room(max(0, BESIDE[splits] - _clusters(how, num_tokens)) * splits, whole)
    tiles, multiprocessors = how.variant.tiles(num_tokens), range(1, AT_A_TIME[1] + 1)
    needed = _columns_in_turn(how, tiles, outputs, AT_A_TIME[1])
    fewest = next(count for count in multiprocessors if _columns_in_turn(how, tiles, outputs, count) <= needed)
    first = whole if rounds == 1 else outputs / COLUMN / blocks * _column_s(how, inputs) + BLOCK_S
    return lora_hopper.Room(int((AT_A_TIME[1] - fewest) * whole / first), first)


def _schedules(variant: Variant, num_tokens: int, outputs: int) -> Iterator[Schedule]:
    columns, tiles = outputs // COLUMN, variant.tiles(num_tokens)
    fewest, most = -(-columns // variant.columns), columns // (variant.columns - 1)
    yield from (Schedule(variant, splits, fewest) for splits in AT_A_TIME)
    for multiprocessors in (AT_A_TIME[1], AT_A_TIME[1] - lora_hopper.SPLITS):  # all, and all but a cluster of another's
        for rounds in range(1, MOST_ROUNDS + 1):
            if fewest < (blocks := rounds * multiprocessors // tiles) <= most:
                yield Schedule(variant, 1, blocks)


def _clusters(how: Schedule, num_tokens: int) -> int:
    return how.blocks * how.variant.tiles(num_tokens)


def _rounds(how: Schedule, num_tokens: int) -> int:
    """How often the GPU is filled with clusters."""
    return -(-_clusters(how, num_tokens) // AT_A_TIME[how.splits])


@cache
def _columns_in_turn(how: Schedule, tiles: int, outputs: int, multiprocessors: int) -> int:
    """The most columns that a multiprocessor has one block after another; it takes the next block when one ends."""
    wide = how.wide(outputs)
    widths = [how.variant.columns] * wide + [how.variant.columns - 1] * (how.blocks - wide)
    ends = [0] * multiprocessors
    for width in widths * tiles:
        heapreplace(ends, ends[0] + width)
    return max(ends)


def _column_s(how: Schedule, inputs: int) -> float:
    """Seconds that a block has for each of its columns."""
    (tokens, columns), splits, _ = how
    slabs = -(-(inputs // STAGE_INPUTS) // splits) * STAGE_INPUTS // SLAB
    return slabs * SLAB_CYCLES[tokens] * (FEW_COLUMNS if columns == 2 else 1) / HERTZ


def seconds(how: Schedule, num_tokens: int, outputs: int, inputs: int) -> float:
    """How long the kernel takes on an H200, about."""
    (tokens, columns), splits, _ = how
    rounds = _rounds(how, num_tokens)
    if splits == 1:
        in_turn = _columns_in_turn(how, how.variant.tiles(num_tokens), outputs, AT_A_TIME[1])
        return in_turn * _column_s(how, inputs) + rounds * BLOCK_S
    if rounds > 1 or splits > inputs // STAGE_INPUTS:
        return math.inf  # more clusters than fit at a time were never faster
    sums = SUM_S * (splits - 1) / splits * columns * tokens / 512
    return columns * _column_s(how, inputs) + BLOCK_S + CLUSTER_S + sums


@cache
def kernel(variant: Variant) -> hopper.Kernel:
    """An instance of the template in `nvfp4_batch.cu`."""
    name = "nvfp4_batch_" + "_".join(map(str, variant))
    code = f"""
extern "C" __global__ void __launch_bounds__({variant.columns * 128}, 1)
    {name}(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
    const __grid_constant__ TensorMap scale, const float *global_scale, const u16 *bias, u16 *y, int tokens, int N,
    int K, int splits, int wide, {lora_hopper.PARAMETERS}) {{
  nvfp4_batch<{variant.tokens}, {variant.columns}, {variant.stages}>(&x, &weight, &scale, global_scale, bias, y, tokens,
                                                                     N, K, splits, wide, {lora_hopper.ADAPTER});
}}
"""
    return hopper.Kernel("nvfp4_batch.cu", name, code, variant.shared_bytes)


def kernels_for(outputs: int, inputs: int) -> list[hopper.Kernel]:
    """What a linear may need, whatever the number of tokens: fewer have the schedule of the next full tiles."""
    all_of_them = (schedule(most, outputs, inputs, alone=alone) for most in FULL_TILES for alone in (True, False))
    return [kernel(how.variant) for how in all_of_them if how]


def batch_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    how: Schedule,
    out: Tensor | None = None,
    update: lora_hopper.Update | None = None,
) -> Tensor:
    """x W^T + bias, and an adapter's h B^T, rounded to bf16 once: [T, N] bf16.

    Args:
        x: [T, K] bf16, from an address that is a multiple of 16.
        weight, scales, global_scale, bias, out, update: as of ``nvfp4_decode.decode_linear``.
        how: of ``schedule``.

    Raises:
        RuntimeError: the driver refuses x for its address.
    """
    x = x.contiguous()
    (num_tokens, inputs), outputs = x.shape, scales.shape[1]
    (tokens, columns), splits, blocks = how
    y = x.new_empty(num_tokens, outputs) if out is None else out
    slabs, all_columns = inputs // SLAB, outputs // COLUMN
    # Rows of 128 bytes of x, swizzled as wgmma reads them; 512 bytes of weights and 64 of scales of a column and slab.
    x_map = _tensor_map(x.data_ptr(), (64, num_tokens, inputs // 64), (inputs * 2, 128), (64, tokens, 2), True)
    weight_map = _tensor_map(weight.data_ptr(), (64, all_columns, slabs), (512, outputs * 8), (64, columns, 8), False)
    scale_map = _tensor_map(scales.data_ptr(), (8, all_columns, slabs), (64, outputs), (8, columns, 8), False)
    hopper.launch(
        kernel(how.variant),
        grid=(blocks, splits, how.variant.tiles(num_tokens)),
        threads=128 * columns,
        cluster=splits,
        device=x.device,
        arguments=[
            *(x_map, weight_map, scale_map, global_scale, bias, y, num_tokens, outputs, inputs, splits),
            how.wide(outputs),
            *lora_hopper.arguments(update),
        ],
        early=update is not None,
    )
    return y


@lru_cache(maxsize=4096)
def _tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzled_bf16: bool
) -> Any:
    """What the copy engine needs to know of a tensor: sizes and box in elements, bf16 or of 8 bytes; strides in bytes.

    Raises:
        RuntimeError: the driver refuses it, for an address that is not a multiple of 16, say.
    """
    driver: Any = import_module("cuda.bindings.driver")
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    [tensor_map] = hopper.checked(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if swizzled_bf16 else kinds.CU_TENSOR_MAP_DATA_TYPE_INT64,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled_bf16 else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return tensor_map
