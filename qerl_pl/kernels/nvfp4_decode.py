"""y = x W^T for NVFP4 weights and few tokens: what a decoding step spends most of its time on, on Hopper.

At so few tokens reading the weights should take all of the time, but turning them into bf16 takes more: these kernels
are bound by the instructions that they issue. So the CUDA source beside this file has few of them: one multiplication
moves the bits of two weights to where bf16 has them, a scale is converted once and not by each lane, and the tensor
cores take 64 outputs at a time from registers (wgmma). Sums are fp32 and added up in a fixed order: equal inputs give
equal bits. T tokens, K inputs, N outputs.

Weights lie as Humming 0.1.17 lays them out, whose kernels serve prompts; ``fragments`` says how. `nvfp4_batch.py` has
the kernel for more tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from qerl_pl.kernels import hopper, lora_hopper

FEW_TOKENS, MOST_TOKENS = 32, 64  # of any linear; of one that fills the GPU well
BLOCK_OUTPUTS, SLAB = 256, 16  # of a block of threads; inputs of a tensor core's product, and of a scale
WIDE, WIDE_SPLITS = 64, 4  # more blocks of outputs than these have enough to do without splitting K finely
PROCESSORS, CLUSTERS, CLUSTER_PROCESSORS = 132, 8, 16  # multiprocessors; groups of them that can hold a cluster, each
MOST_SPLITS = 8  # blocks of a portable cluster
FULL = 0.75  # of the GPU, by one or two blocks that share inputs


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    tokens: int
    """8, 16, 32 or 64: at most so many."""
    groups: int
    """Of four warps, which share the inputs of a stage."""
    slabs: int
    """4 or 8, each 16 inputs: what a warp has of a stage."""
    stages: int
    """On their way from memory at a time."""
    blocks: int
    """On a multiprocessor at a time: registers are limited for so many."""

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        warps = 4 * self.groups
        stage = self.tokens * 32 * self.slabs * self.groups + warps * self.slabs * 576
        return max(self.stages * stage + warps * self.slabs * 128, self.tokens * 260 * 4)


class Schedule(NamedTuple):
    """A kernel, and how many blocks share the inputs of the same 256 outputs."""

    variant: Variant
    splits: int


MANY_BLOCKS = [Variant(8, 1, 8, 2, 4), Variant(16, 1, 8, 2, 4), Variant(32, 1, 8, 2, 4), Variant(64, 1, 8, 2, 2)]
FEW_BLOCKS = [Variant(8, 2, 8, 2, 2), Variant(16, 2, 8, 2, 2), Variant(32, 2, 4, 4, 2)]


def schedule(num_tokens: int, outputs: int, inputs: int) -> Schedule | None:
    """What to run; None where this kernel cannot or another one is faster (`docs/performance.md`)."""
    if not 0 < num_tokens <= MOST_TOKENS or outputs % BLOCK_OUTPUTS or inputs % (8 * SLAB):
        return None
    blocks = outputs // BLOCK_OUTPUTS
    wide = blocks > WIDE
    variant = next((v for v in (MANY_BLOCKS if wide else FEW_BLOCKS) if num_tokens <= v.tokens), None)
    if variant is None:
        return None
    if not wide:
        # One block on a multiprocessor, and whole clusters on each group of them.
        splits = next(s for s in range(MOST_SPLITS, 0, -1) if CLUSTERS * (CLUSTER_PROCESSORS // s) >= blocks)
    elif num_tokens <= FEW_TOKENS:
        splits = WIDE_SPLITS
    else:
        places = PROCESSORS * variant.blocks
        splits = places // blocks
        if splits not in (1, 2) or splits * blocks < FULL * places:
            return None
    return Schedule(variant, min(splits, inputs // SLAB // (variant.slabs * variant.groups) or 1))


@cache
def kernel(variant: Variant) -> hopper.Kernel:
    """An instance of the template in `nvfp4_decode.cu`."""
    name, parameters = "nvfp4_decode_" + "_".join(map(str, variant)), ", ".join(map(str, variant[:-1]))
    code = f"""
extern "C" __global__ void __launch_bounds__({variant.threads}, {variant.blocks})
    {name}(const u16 *x, const uint4 *weight, const uint4 *scale, const float *global_scale, const u16 *bias, u16 *y,
    int tokens, int N, int K, int splits, {lora_hopper.PARAMETERS}) {{
  nvfp4_decode<{parameters}>(x, weight, scale, global_scale, bias, y, tokens, N, K, splits, {lora_hopper.ADAPTER});
}}
"""
    return hopper.Kernel("nvfp4_decode.cu", name, code, variant.shared_bytes)


def kernels_for(outputs: int, inputs: int) -> list[hopper.Kernel]:
    """What a linear may need, whatever the number of tokens."""
    counts = [variant.tokens for variant in MANY_BLOCKS]  # the same for few blocks
    return [kernel(how.variant) for most in counts if (how := schedule(most, outputs, inputs))]


def decode_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    how: Schedule,
    out: Tensor | None = None,
    update: lora_hopper.Update | None = None,
) -> Tensor:
    """x W^T + bias, and an adapter's h B^T, rounded to bf16 once.

    Args:
        x: [T, K] bf16.
        weight: [K / 16, 2 N] int32, as ``fragments`` orders it.
        scales: [K / 16, N] e4m3, as ``fragments`` orders them; none is negative.
        global_scale: [1] fp32, by which all is multiplied.
        bias: [N] bf16 in Humming's order (``humming_bias``), or None.
        how: of ``schedule``.
        out: [T, N] bf16 to write to, contiguous.
        update: of the kernel that was launched last; x must have been complete before it started.

    Returns:
        [T, N] bf16.
    """
    x = x.contiguous()
    (num_tokens, inputs), outputs = x.shape, scales.shape[1]
    y = x.new_empty(num_tokens, outputs) if out is None else out
    arguments = [x, weight, scales, global_scale, bias, y, num_tokens, outputs, inputs, how.splits]
    arguments += lora_hopper.arguments(update)
    hopper.launch(
        kernel(how.variant),
        grid=(outputs // BLOCK_OUTPUTS, how.splits, 1),
        threads=how.variant.threads,
        cluster=how.splits,
        device=x.device,
        arguments=arguments,
        early=update is not None,
    )
    return y


def decode_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """[T, N] fp32 of the plain formula: weight [N, K] holds e2m1 values, scales [N, K / 16]."""
    return x.float() @ (weight.float() * scales.float().repeat_interleave(SLAB, 1)).T * global_scale


def fragments(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The layout, from rows of codes: what a lane of a warp needs of 64 outputs and 16 inputs lies side by side.

    Args:
        codes: [N, K] uint8, e2m1 in four bits.
        scales: [N, K / 16] e4m3.

    Returns:
        [K / 16, 2 N] int32 and [K / 16, N] e4m3. Of a lane's four words each has 16 outputs: from the lowest nibble on
        (row g, input 2c), (g, 2c + 8), (g + 8, 2c), (g + 8, 2c + 8), then the same of inputs one higher, where g is
        lane // 4 and c is lane % 4. Of 64 outputs' scales, output 8 j + g is at 8 g + j.
    """
    outputs, inputs = codes.shape
    parts = codes.view(outputs // 64, 4, 2, 8, inputs // SLAB, 2, 4, 2)  # 64s, word, half, g, slab, upper, c, parity
    order = parts.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(inputs // SLAB, -1, 8).long()
    words = (order << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    packed = (words - (words >> 31 << 32)).int()  # the highest bit is a sign to torch
    grouped = scales.view(torch.uint8).view(outputs // 64, 8, 8, -1).permute(3, 0, 2, 1)
    return packed, grouped.reshape(-1, outputs).contiguous().view(scales.dtype)


def humming_bias(bias: Tensor) -> Tensor:
    """[N] in the order in which Humming keeps a bias: of 32 those with remainder 0 or 1 by 8, then 2 or 3, ..."""
    return bias.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1)
