"""Constants of an NVIDIA H200 (132 SMs, 1.755 GHz), by which the CUDA kernels of this project choose how to divide
their work among thread blocks (their schedules).

No kernel can be timed while a CUDA graph is captured, so a schedule is chosen by arithmetic over these numbers. They
decide only the speed of a kernel. Each constant is either measured again by ``python -m tests.bench.bench_constants``,
or is a threshold between two alternatives, set where the benchmark named in its description found both equally fast.
``docs/kernels.md`` says how to fit them to another GPU of compute capability 9.0.

The decode GEMM (``nvfp4_decode``) and the batch GEMM (``nvfp4_batch``) multiply by NVFP4 weights, for few and for many
tokens. A linear layer is wide if it has more than ``WIDE`` blocks of 256 outputs, and narrow otherwise. Letters: K
inputs and N outputs of a linear layer, A and B the matrices of its LoRA adapter.
"""

SMS, CLOCK_HZ = 132, 1.755e9

# The constants of the batch GEMM (nvfp4_batch) come from a sweep over the linear layers of Qwen2.5-7B to 32B with 64,
# 128 and 256 tokens at commit 7d881c1. For each layer, the schedule chosen with them was the fastest or within 1 %.
# Those for thread blocks of 256 tokens come from a second sweep over Qwen2.5-3B to 32B with 192 to 2048 tokens on an
# H100, which `bench_batch` repeats: each chosen schedule was the fastest of those measured or within 9 % of it.
K_BLOCK_CYCLES = {64: 48, 96: 61, 128: 74, 256: 130}
"""Clock cycles that an SM needs to multiply one k-block (16 inputs) of one tile (64 outputs), by the number of tokens
per thread block. ``bench_constants`` fits these numbers together with ``BLOCK_S``. At its power limit, an H100 needs 16
to 21 cycles more, so thread blocks of 256 tokens are then better than predicted."""
TWO_TILES = 1.2
"""Factor of ``K_BLOCK_CYCLES`` in thread blocks of two tiles and at most 128 tokens, whose two warpgroups cannot keep
the tensor cores busy: the time per tile that a further input adds to the batch GEMM with two tiles per thread block,
divided by that with more tiles."""
LONE_TILE = 1.5
"""Time of a thread block of one tile (64 outputs), divided by the time per tile of a thread block of two tiles.
Measured with 256 tokens, as the slope of the batch GEMM's time over the number of inputs with one tile, divided by half
of the slope with two. The same value is assumed for fewer tokens, where thread blocks of one tile were never the
fastest."""
BLOCK_S = 3e-6
"""Seconds that a thread block of the batch GEMM takes to start, to fill the pipeline, and to store its results."""
CLUSTER_S, SUMS_S = 1e-6, 4e-6
"""Seconds that the batch GEMM takes longer if K is split among the thread blocks of clusters: ``CLUSTER_S`` to start a
cluster instead of single thread blocks, and the share (splits - 1) / splits of ``SUMS_S`` to add up the fp32 sums of
256 outputs x 128 tokens over ``splits`` thread blocks. Both are solved from the times of equal work without a split, in
2 splits and in 8 splits."""
RESIDENT_CLUSTERS = {1: 132, 2: 60, 3: 36, 4: 30, 5: 20, 6: 14, 7: 14, 8: 14}
"""Number of clusters that run at the same time according to the driver (``cuOccupancyMaxActiveClusters``), by thread
blocks per cluster, with one thread block per SM."""
CONCURRENT_CLUSTERS = {**RESIDENT_CLUSTERS, 2: 66, 8: 15}
"""Number of clusters that run at the same time as measured, by thread blocks per cluster. The measurements are a sweep
of `bench_layer` at commit 443f568, where a second kernel's clusters fill SMs that the first kernel leaves idle, and the
time of 64 clusters of two thread blocks on an H100."""
ADAPTER_S = {(128, 5): 2.5e-6, (256, 2): 2.5e-6}
"""Extra seconds of the batch GEMM if it also adds a LoRA adapter's product h B^T, by (tokens, tiles) of a thread block;
0 for all others. With 128 tokens and 5 tiles, few registers are free, so less of B and h is loaded at a time; with 256
tokens and 2 tiles, a thread block has half as many warps."""

# The decode GEMM (nvfp4_decode).
WIDE = 64
"""Number of blocks of 256 outputs above which the decode GEMM treats a linear layer as wide: the blocks fill the GPU
almost without dividing K."""
WIDE_BLOCKS = {8: 430, 16: 430, 32: 375}
"""Number of thread blocks to aim for in a wide linear layer, by the largest number of tokens of the kernel variant: K
is divided into the number of parts with which the number of thread blocks comes closest to it. The thresholds of the
decode GEMM are from `bench_decode`, with Qwen2.5-3B to 32B on an H200 and 8 to 32 tokens."""
FIVE_PER_SM = range(36096, 42241)
"""Numbers of outputs N of wide linear layers for which the decode GEMM uses smaller thread blocks with up to 8 tokens.
Five of them run on an SM, and with K in 4 parts they fill the GPU almost exactly. Gate and up of Qwen2.5-7B take 27.8
us instead of 28.6."""
GPCS, SMS_OF_GPC = 8, 16
"""Number of GPCs of the GPU and of SMs per GPC, by which the decode GEMM schedules a narrow linear layer, because a
cluster has to fit in one GPC."""
FEW_SPLITS, NARROW_BLOCKS = 4, 198
"""Thresholds of the decode GEMM for narrow linear layers. If one thread block per SM would divide K into at most
FEW_SPLITS parts, up to NARROW_BLOCKS thread blocks are used instead, two on some SMs. With this, q, k and v of
Qwen2.5-14B take 4 to 14 % less time."""
LONG_INPUTS, FULL_NARROW = 8192, 0.8
"""Thresholds of the decode GEMM for narrow linear layers. A layer with more than LONG_INPUTS inputs K uses thread
blocks of four warpgroups if those of two would occupy less than the share FULL_NARROW of the SMs: ``down`` of
Qwen2.5-14B and 32B takes 3 to 30 % less time with four. ``down`` of Qwen2.5-7B, where thread blocks of two occupy 0.85
of the SMs, would take 1 % more."""
FULL_WAVE = 0.75
"""Smallest share of the GPU that a wide linear layer's thread blocks have to occupy, with K in one or two parts, for
the decode GEMM to be used with 33 to 64 tokens. Threshold from `bench_schedules`."""
FETCHED_AHEAD = 8 * 2**20
"""Largest number of bytes of the next linear layer's weight that the decode GEMM prefetches to L2, which has 50 MiB.

From a sweep of 0 to 32 MiB over layers of Qwen2.5-3B to 32B on an H200 with 8 to 32 tokens: 4 MiB are best, and 8 MiB
up to 1 % slower. In an engine, attention leaves more time between the layers, so 8 MiB are used: in a 7B engine on an
H100, decoding steps of 1 and of 8 sequences take 2 % less time than without prefetching, and steps of 32 sequences take
the same time.
"""

# Fused LoRA (lora_hopper): sweeps of `bench_layer` over Qwen2.5-3B to 32B at commits d14877c and 443f568.
SHRINK_TILE_S = {1: (4e-6, 0.55e-9), 2: (4e-6, 0.6e-9), 3: (4.2e-6, 0.9e-9)}
"""Seconds that the product h = x A^T of one tile of tokens takes while a base GEMM runs, by the number of linear layers
that are fused into one: a constant, and seconds per input. ``bench_constants`` fits a lower bound of both."""
IN_TIME, TOO_LATE = 0.8, 1.1
"""Bounds on the time of h = x A^T, as a share of the time until the base layer's GEMM first needs h. Below ``IN_TIME``,
more thread blocks for h gain nothing; above ``TOO_LATE``, adding the adapter after the GEMM is faster. Thresholds from
`bench_layer`, which compares adapters in the GEMM (``together``) with adapters after it (``apart``)."""
WIDE_OUTPUTS, WIDE_TOKENS = range(16384, 40961), 16
"""Numbers of outputs N for which it pays to fuse the adapter into the GEMM although the GEMM leaves no SM idle, and the
tokens per tile of h = x A^T, with which all tiles of h are computed at the same time. With more outputs, thread blocks
of the base GEMM would wait for an SM. Threshold from `bench_layer`."""

# Speculation (draft_guard).
VERIFICATION = {
    1: {7: 1.05, 15: 1.18},
    4: {3: 1.13, 7: 1.28},
    8: {3: 1.26, 7: 1.59},
    16: {1: 1.12, 3: 1.41},
    32: {1: 1.24, 3: 1.60},
    64: {1: 1.27},
}
"""Time of a decoding step that verifies k drafts for each of n sequences, divided by that of a step without drafts, by
n and k, for a 7B model in NVFP4 and 1000 tokens of context, by `bench_speculation` on an H200. The measured numbers are
up to 14 % higher than those computed from the times of the linear layers and of reading keys and values."""
