"""Constants by which schedules of the Hopper kernels are chosen, measured on an NVIDIA H200 (132 SMs, 1.755 GHz).

Nothing can be tried out while a CUDA graph is captured, so a schedule is chosen by arithmetic over these numbers. They
do not change any result, only which of several correct schedules runs. Each says how it was found:

- ``python -m tests.bench.bench_constants`` measures it again and prints the new value beside this one;
- or it is a threshold between two alternatives, placed where the named benchmark found them equally fast.

Other GPUs of compute capability 9.0 run the same kernels with the same schedules. For one with another number of SMs
or another clock, run the script there and edit this file; ``docs/kernels.md`` has the steps.
"""

from __future__ import annotations

SMS = 132
"""SMs of the GPU; ``bench_constants`` reads it from the driver."""
CLOCK_HZ = 1.755e9
"""The clock in which ``K_BLOCK_CYCLES`` counts."""

# The batch GEMM (nvfp4_batch): a sweep over the linears of Qwen2.5-7B to 32B with 64, 128 and 256 tokens at commit
# 7d881c1; for each linear the rule takes the fastest schedule or one within 1 % of it.
K_BLOCK_CYCLES = {64: 48, 96: 61, 128: 74}
"""Cycles in which an SM multiplies one k-block (16 inputs) of one tile (64 outputs) by 64, 96 or 128 tokens.

``bench_constants`` fits it, and ``BLOCK_S`` with it, to the times of one wave at several K."""
TWO_TILES = 1.2
"""Factor on ``K_BLOCK_CYCLES`` for thread blocks of two tiles: two warpgroups do not keep the tensor cores busy.

``bench_constants`` measures it as the ratio of two slopes."""
BLOCK_S = 3e-6
"""Seconds that a thread block takes besides its products: start, pipeline fill, writing its sums."""
CLUSTER_S, SUMS_S = 1e-6, 4e-6
"""Seconds that a cluster takes more than single blocks, and that it takes to add up 256 outputs x 128 tokens.

The latter counts (splits - 1) / splits of it. ``bench_constants`` solves for both from 2 and 8 splits of equal work."""
RESIDENT_CLUSTERS = {1: 132, 2: 60, 3: 36, 4: 30, 5: 20, 6: 14, 7: 14, 8: 14}
"""Clusters of so many thread blocks that run at a time, with one block on an SM.

``bench_constants`` prints what the driver says (``cuOccupancyMaxActiveClusters``) beside it."""
CONCURRENT_CLUSTERS = {**RESIDENT_CLUSTERS, 2: 66, 8: 15}
"""The same where clusters of a second kernel take the SMs that are left; a sweep of `bench_layer` at commit 443f568."""
ADAPTER_S = {(128, 5): 2.5e-6}
"""Seconds that adding an adapter costs a thread block of 128 tokens x 5 tiles more than other blocks.

It has few free registers, so less of B and h is loaded at a time. ``bench_constants`` measures it."""
LARGE, FULL = 50e6, 0.83
"""Linears above so many weights (N x K) are left to Humming above 128 tokens if less than this share of SMs had work.

Humming's stream-K schedules share what is left over. Threshold: `bench_schedules`, 14B, 256 tokens, at b8196c6."""

# The decode GEMM (nvfp4_decode).
WIDE, WIDE_SPLITS = 64, 4
"""Linears of more than so many thread blocks (256 outputs each) split K by this fixed number up to 32 tokens.

They fill the GPU without fine splits. Threshold: `bench_schedules`, 7B and 14B, 8 to 32 tokens."""
GPCS, SMS_OF_GPC = 8, 16
"""Groups of SMs (GPCs) that can hold a cluster, and SMs of each that narrow linears count on."""
FULL_WAVE = 0.75
"""From 33 to 64 tokens wide linears run here if one or two splits occupy this share of the GPU; `bench_schedules`."""

# Fused LoRA (lora_hopper): sweeps of `bench_layer` over Qwen2.5-3B to 32B at commits d14877c and 443f568.
SHRINK_TILE_S = {1: (4e-6, 0.55e-9), 2: (4e-6, 0.6e-9), 3: (4.2e-6, 0.9e-9)}
"""By number of slices: seconds for h = x A^T of one tile of tokens while a base GEMM runs, constant and per input.

``bench_constants`` fits both over K with nothing else running: a lower bound."""
IN_TIME, TOO_LATE = 0.8, 1.1
"""Shares of the seconds until the base GEMM first needs h. Up to the first, more clusters gain nothing; above the
second, adding the adapter in a pass of its own is faster. Thresholds: `bench_layer`, ``together`` against ``apart``."""
WIDE_OUTPUTS, WIDE_TOKENS = range(16384, 40961), 16
"""Outputs of linears for which x A^T of all tokens at once, in tiles of so many, pays though no SM is idle.

With fewer outputs a pass of its own is faster; with more, blocks of the base would queue behind it. `bench_layer`."""
