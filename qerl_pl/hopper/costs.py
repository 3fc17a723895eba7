"""Constants by which schedules of the Hopper kernels are chosen, measured on an NVIDIA H200 (132 SMs, 1.755 GHz).

No kernel can be timed while a CUDA graph is captured, so a schedule is chosen by arithmetic over these numbers. They
decide which of several correct schedules of a kernel runs, and so its speed. Each is either measured again by ``python
-m tests.bench.bench_constants``, or is a threshold between two alternatives, set where the named benchmark found both
equally fast. ``docs/kernels.md`` says how to fit them to another GPU of compute capability 9.0.
"""

SMS, CLOCK_HZ = 132, 1.755e9

# The constants of the batch GEMM (nvfp4_batch) come from a sweep over the linear layers of Qwen2.5-7B to 32B with 64,
# 128 and 256 tokens at commit 7d881c1. For each layer, the schedule chosen with them was the fastest or within 1 %.
# Those for thread blocks of 256 tokens come from a second sweep over Qwen2.5-3B to 32B with 192 to 2048 tokens on an
# H100, which `bench_batch` repeats: each chosen schedule was the fastest of those measured or within 9 % of it.
K_BLOCK_CYCLES = {64: 48, 96: 61, 128: 74, 256: 130}
"""Cycles that an SM needs to multiply one k-block (16 inputs) of one tile (64 outputs), by the tokens per thread block;
``bench_constants`` fits them and ``BLOCK_S`` to the times of one wave of thread blocks at several K. A GPU at its power
limit needs 16 to 21 more (on an H100), so that thread blocks of 256 tokens are better than predicted."""
TWO_TILES = 1.2
"""Factor of ``K_BLOCK_CYCLES`` in thread blocks of two tiles and at most 128 tokens, whose two warpgroups cannot keep
the tensor cores busy: the slope of the GEMM's time over K with two tiles, divided by that with more tiles."""
LONE_TILE = 1.5
"""Time of a thread block of one tile, divided by the time per tile of a thread block of two tiles: the slope of the
GEMM's time over K with one tile of 256 tokens, divided by half of that with two. Assumed to be the same with fewer
tokens, where such thread blocks were never the fastest."""
BLOCK_S = 3e-6
"""Seconds that a thread block takes in addition to its products: start, filling the pipeline, storing the sums."""
CLUSTER_S, SUMS_S = 1e-6, 4e-6
"""Seconds to start a cluster instead of single thread blocks, and to add up its fp32 sums of 256 outputs x 128 tokens,
of which a cluster of ``splits`` thread blocks takes the share (splits - 1) / splits; solved from the times of equal
work in 2 and in 8 splits."""
RESIDENT_CLUSTERS = {1: 132, 2: 60, 3: 36, 4: 30, 5: 20, 6: 14, 7: 14, 8: 14}
"""Clusters that run at the same time according to the driver (``cuOccupancyMaxActiveClusters``), by thread blocks per
cluster, with one thread block per SM. For some sizes more run in fact, see ``CONCURRENT_CLUSTERS``."""
CONCURRENT_CLUSTERS = {**RESIDENT_CLUSTERS, 2: 66, 8: 15}
"""Clusters that were measured to run at the same time: in a sweep of `bench_layer` at commit 443f568, in which a second
kernel's clusters fill SMs that the first leaves, and from the time of 64 clusters of two on an H100."""
ADAPTER_S = {(128, 5): 2.5e-6, (256, 2): 2.5e-6}
"""Extra seconds of the batch GEMM if it also adds an adapter's h B^T, by (tokens, tiles) of a thread block; 0 for all
others. With 128 x 5, few registers are free, so less of B and h is loaded at a time; with 256 x 2, a thread block has
half as many warps."""

# The decode GEMM (nvfp4_decode).
WIDE = 64
"""A linear is wide if it has more blocks of 256 outputs than this: it fills the GPU almost without dividing K."""
WIDE_BLOCKS = {8: 430, 16: 430, 32: 375}
"""Thread blocks of a wide linear, by the largest number of tokens of the kernel variant: K is divided into the number
of parts that comes closest. Thresholds of the decode GEMM are from `bench_decode`, Qwen2.5-3B to 32B on an H200, 8 to
32 tokens."""
FIVE_PER_SM = range(36096, 42241)
"""Outputs N of wide linears that use, for up to 8 tokens, smaller thread blocks, of which five run on an SM: with K in
4 parts they fill the GPU almost exactly. Gate and up of Qwen2.5-7B take 27.8 us instead of 28.6."""
GPCS, SMS_OF_GPC = 8, 16
"""Number of GPCs, and of SMs per GPC, by which a narrow linear is scheduled; a cluster has to fit in one GPC."""
FEW_SPLITS, NARROW_BLOCKS = 4, 198
"""A narrow linear whose K one thread block per SM would divide into at most FEW_SPLITS parts uses up to NARROW_BLOCKS
thread blocks instead, two on some SMs: q, k and v of Qwen2.5-14B take 4 to 14 % less time."""
LONG_INPUTS, FULL_NARROW = 8192, 0.8
"""A narrow linear with more inputs K than LONG_INPUTS uses larger thread blocks if the usual ones would occupy less
than the share FULL_NARROW of the SMs: ``down`` of Qwen2.5-14B and 32B takes 3 to 30 % less time with larger ones. That
of 7B, whose usual ones occupy 0.85 of the SMs, would take 1 % more."""
FULL_WAVE = 0.75
"""Smallest share of the GPU that a wide linear's thread blocks have to occupy, with K in one or two parts, for the
decode GEMM to run it with 33 to 64 tokens. Threshold: `bench_schedules`."""
FETCHED_AHEAD = 8 * 2**20
"""Most bytes of the next linear's weight that the decode GEMM fetches to L2, which has 50 MiB.

From a sweep of 0 to 32 MiB over layers of Qwen2.5-3B to 32B on an H200, 8 to 32 tokens: 4 MiB are best, and 8 MiB up to
1 % slower, but attention, which reads little memory, leaves more time between linears than the sweep does, so 8 MiB are
used. In a 7B engine on an H100, decoding steps of 1 and 8 sequences take 2 % less time than with 0 here, those of 32
the same."""

# Fused LoRA (lora_hopper): sweeps of `bench_layer` over Qwen2.5-3B to 32B at commits d14877c and 443f568.
SHRINK_TILE_S = {1: (4e-6, 0.55e-9), 2: (4e-6, 0.6e-9), 3: (4.2e-6, 0.9e-9)}
"""Seconds for h = x A^T of one tile of tokens while a base GEMM runs, by the number of slices (linears that are fused
into one): a constant, and seconds per input. ``bench_constants`` fits both with no other kernel running, which gives a
lower bound."""
IN_TIME, TOO_LATE = 0.8, 1.1
"""Bounds on the time for h = x A^T, as a share of the time until the base GEMM first needs h: up to ``IN_TIME``, more
clusters for h gain nothing; above ``TOO_LATE``, adding the adapter after the GEMM is faster. Thresholds:
`bench_layer`, ``together`` against ``apart``."""
WIDE_OUTPUTS, WIDE_TOKENS = range(16384, 40961), 16
"""Outputs N for which fusing the adapter into the GEMM pays although the GEMM leaves no SM idle, and the tokens per
tile of h for such N, all of which are computed at the same time. With more outputs, thread blocks of the base GEMM
would wait for an SM. Threshold: `bench_layer`."""

# Speculation (draft_guard).
VERIFICATION = {
    1: {7: 1.05, 15: 1.18},
    4: {3: 1.13, 7: 1.28},
    8: {3: 1.26, 7: 1.59},
    16: {1: 1.12, 3: 1.41},
    32: {1: 1.24, 3: 1.60},
    64: {1: 1.27},
}
"""Time of a decoding step with k drafts for each of n sequences, divided by that of a step without drafts, by n and k;
for a 7B model in NVFP4 and 1000 tokens of context. Measured by `bench_speculation` on an H200; up to 14 % more than was
computed from the times of the linears and of reading keys and values."""
