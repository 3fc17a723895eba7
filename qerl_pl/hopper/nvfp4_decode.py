"""GEMM y = x W^T of bf16 inputs and NVFP4 weights for up to 64 tokens on Hopper, for decoding small batches.

These GEMMs take most of the time of a decoding step. Reading the weights should bound their time, but a straightforward
conversion of 4-bit weights to bf16 takes more instructions than an SM can issue in that time. So the bits of each
packed 32-bit word are ordered such that one to three instructions move the bits of two weights to their places in bf16
numbers. Each scale is converted by one lane only, and each ``wgmma`` or ``mma`` takes the weights from registers. Sums
are fp32 in a fixed order: equal inputs give equal bits.

Weights are in tile order (``tile_order``), the layout of humming-kernels 0.1.17 except for the order of the bits in a
word. `docs/kernels.md` has the overview. Letters: T tokens, K inputs, N outputs.
"""

from functools import cache
from typing import NamedTuple

from torch import Tensor

from qerl_pl.hopper import costs, driver, lora_hopper

BITS = [*([6 + 3 * j, 7 + 3 * j, 8 + 3 * j, 15 + 3 * j] for j in range(3)), [3, 4, 0, 1]]
"""Positions of the bits of the first four of the eight codes in an int32 word, for each code the mantissa bit first and
the sign bit last; those of the last four codes are 16 higher, modulo 32. `nvfp4.cuh` gives the reason."""
FEW_TOKENS, MOST_TOKENS = 32, 64  # most tokens for all linears, and for linears that fill the GPU;
BLOCK_OUTPUTS, TILE, K_BLOCK = 256, 64, 16  # outputs per thread block and warp; inputs per wgmma and block scale;
MOST_SPLITS = 8  # largest cluster, in thread blocks, that every Hopper GPU can run;
CACHE_LINE = 128  # bytes


class Variant(NamedTuple):
    """Template parameters of the decode GEMM kernel."""

    tokens: int  # largest number of tokens that this variant computes: 8, 16, 32 or 64
    groups: int  # warpgroups per thread block; each multiplies a part of the inputs of every pipeline stage
    k_blocks: int  # K-blocks of 16 inputs that a warp multiplies per pipeline stage: 4 or 8
    stages: int  # pipeline stages in shared memory
    blocks: int  # thread blocks that run on an SM at the same time; the compiler limits the registers accordingly

    @property
    def x_stages(self) -> int:
        """Pipeline stages whose inputs x are copied together: few enough for the shared memory of an SM."""
        return {8: 4, 16: 2}.get(self.tokens, 1)

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per thread block."""
        warps = 4 * self.groups
        x = self.tokens * 32 * self.k_blocks * self.groups * self.x_stages * ((self.stages - 2) // self.x_stages + 2)
        weights = self.stages * warps * self.k_blocks * 576
        hidden = warps * self.tokens * (lora_hopper.BLOCK_RANKS + 4) * 4
        return max(x + weights + warps * self.k_blocks * 128, self.groups * self.tokens * 260 * 4, hidden)


class Schedule(NamedTuple):
    """Variant of the kernel, and number of parts into which the K inputs are divided."""

    variant: Variant
    splits: int
    """Number of parts into which K is divided; the thread blocks that compute these parts for the same outputs form a
    cluster."""


WIDE = {
    8: Variant(8, 1, 8, 2, 3),
    16: Variant(16, 1, 8, 2, 3),
    32: Variant(32, 1, 4, 3, 4),
    64: Variant(64, 1, 8, 2, 2),
}
WIDE_OF_8 = Variant(8, 1, 4, 3, 5)  # for outputs in ``costs.FIVE_PER_SM`` and up to 8 tokens
NARROW = {8: Variant(8, 2, 4, 3, 2), 16: Variant(16, 2, 4, 3, 2), 32: Variant(32, 2, 4, 3, 2)}
NARROW_LONG = {8: Variant(8, 4, 8, 2, 1), 16: Variant(16, 4, 8, 2, 1), 32: Variant(32, 4, 4, 2, 1)}
NARROW_FULL = {8: Variant(8, 2, 4, 6, 1), 16: Variant(16, 2, 4, 6, 1), 32: Variant(32, 2, 4, 5, 1)}
"""Kernel variants for narrow linear layers with many inputs, like ``down``. Their thread blocks start while the GEMM
before them is ending, and are so large that an SM has room for only one; with smaller ones, the SMs that are free first
would get two each, and other SMs none."""
HALF_STAGES = {8: WIDE_OF_8, 16: WIDE[32], 32: WIDE[32]}
"""Variants with pipeline stages of 4 k-blocks, for K that is no multiple of 8 k-blocks, as in SmolLM2-135M."""
VARIANTS = [*WIDE.values(), WIDE_OF_8, *NARROW.values(), *NARROW_LONG.values(), *NARROW_FULL.values()]


def choose_schedule(num_tokens: int, outputs: int, inputs: int) -> Schedule | None:
    """Choose how the decode GEMM divides a linear layer's product among thread blocks. Returns None if the kernel
    cannot compute it, or if another kernel is faster."""
    if not 0 < num_tokens <= MOST_TOKENS or outputs % TILE or inputs % (4 * K_BLOCK):
        return None
    size, blocks = next(most for most in WIDE if num_tokens <= most), -(-outputs // BLOCK_OUTPUTS)
    schedule = _choose_wide(size, blocks) if blocks > costs.WIDE else _choose_narrow(size, blocks, inputs)
    if schedule is not None and inputs % (8 * K_BLOCK):
        schedule = schedule._replace(variant=HALF_STAGES[size]) if size in HALF_STAGES else None
    if schedule is None:
        return None
    variant, splits = schedule
    return Schedule(variant, min(splits, inputs // K_BLOCK // (variant.k_blocks * variant.groups) or 1))


def _choose_wide(size: int, blocks: int) -> Schedule | None:
    """Choose the schedule of a layer whose ``blocks`` of 256 outputs fill the GPU with little or no division of K, for
    up to ``size`` tokens. Returns None if another kernel is faster."""
    if size > FEW_TOKENS:
        variant = WIDE[size]
        resident = costs.SMS * variant.blocks
        splits = resident // blocks
        full = splits in (1, 2) and splits * blocks >= costs.FULL_WAVE * resident
        return Schedule(variant, splits) if full else None
    if size == 8 and blocks * BLOCK_OUTPUTS in costs.FIVE_PER_SM:
        return Schedule(WIDE_OF_8, costs.SMS * WIDE_OF_8.blocks // blocks)
    return Schedule(WIDE[size], min(max(1, round(costs.WIDE_BLOCKS[size] / blocks)), MOST_SPLITS))


def _choose_narrow(size: int, blocks: int, inputs: int) -> Schedule | None:
    """Choose the schedule of a layer with few ``blocks`` of 256 outputs, which fill the GPU only if K is divided, too,
    for up to ``size`` tokens. Returns None if another kernel is faster."""
    if size > FEW_TOKENS:
        return None
    # Divide K into the largest number of parts with which all clusters run at the same time, one thread block per SM. A
    # cluster has one thread block per part, and its SMs must be in one GPC.
    fitting = (s for s in range(MOST_SPLITS, 0, -1) if costs.GPCS * (costs.SMS_OF_GPC // s) >= blocks)
    splits = next(fitting)
    if splits <= costs.FEW_SPLITS:
        return Schedule(NARROW[size], min(costs.NARROW_BLOCKS // blocks, MOST_SPLITS))
    if inputs <= costs.LONG_INPUTS:
        return Schedule(NARROW[size], splits)
    is_full = blocks * splits >= costs.FULL_NARROW * costs.SMS
    return Schedule(NARROW_FULL[size] if is_full else NARROW_LONG[size], splits)


@cache
def kernel(variant: Variant) -> driver.Kernel:
    """Return the instance of the kernel template for a variant."""
    name, parameters = (
        "nvfp4_decode_" + "_".join(map(str, variant)),
        ", ".join(map(str, (*variant[:-1], variant.x_stages))),
    )
    code = f"""
extern "C" __global__ void __launch_bounds__({variant.threads}, {variant.blocks})
    {name}(const u16 *x, const uint4 *weight, const uint4 *scale, const float *global_scale, const u16 *bias, u16 *y,
    int tokens, int N, int K, int splits, int is_gated, const char *next, int parts, int stride, int blocks,
    int bytes, {lora_hopper.PARAMETERS}, {lora_hopper.SHRINK_PARAMETERS}) {{
  nvfp4_decode<{parameters}>(x, weight, scale, global_scale, bias, y, tokens, N, K, splits, is_gated,
                             Next{{next, parts, stride, blocks, bytes}}, {lora_hopper.ADAPTER},
                             {lora_hopper.SHRINK});
}}
"""
    return driver.Kernel("nvfp4_decode.cu", name, code, variant.shared_bytes)


def kernels_for(outputs: int, inputs: int) -> list[driver.Kernel]:
    """List every instance of the kernel that a linear layer of this shape may need, over all numbers of tokens."""
    schedules = (choose_schedule(most, outputs, inputs) for most in WIDE)
    return [kernel(schedule.variant) for schedule in schedules if schedule]


def decode_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    schedule: Schedule,
    out: Tensor | None = None,
    adapter: lora_hopper.Adapter | None = None,
    next_weight: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute a linear layer, y = x W^T + bias, for up to 64 tokens. A LoRA adapter's h B^T with h = x A^T is added if
    one is given. The sum is rounded to bf16 once.

    The kernel starts to copy the weight before the previous kernel of the stream has ended (programmatic dependent
    launch), so the previous kernel must not write ``weight`` or ``scales``. A few thread blocks compute h, and the
    others wait for h before they round their sums. The kernel has counters for this waiting in global memory, so two
    streams must not run these kernels at the same time.

    Args:
        x: [T, K] bf16.
        weight, scales: [K / 16, 2 N] int32 and [K / 16, N] e4m3, not negative, in tile order.
        global_scale: [1] fp32, tensor scale.
        bias: [N] bf16 in the order of ``humming_bias``, or None.
        out: bf16, contiguous, to write the result to; None allocates it.
        adapter: None, or an adapter that ``lora_hopper.fits_adapter`` accepts.
        next_weight: weight that the next call will multiply by: ``costs.FETCHED_AHEAD`` bytes of it are fetched to L2
            once this call has read ``weight``, so that memory is not idle until the next call.
        gated: W is the fused gate and up of an MLP, without a bias; return silu(gate) * up, where gate, up, silu(gate)
            and the product are rounded to bf16.

    Returns:
        [T, N] bf16; [T, N / 2] if ``gated``.
    """
    assert not (gated and bias is not None), "gate and up have no bias"
    x = x.contiguous()
    (num_tokens, inputs), outputs = x.shape, scales.shape[1]
    y = x.new_empty(num_tokens, outputs // 2 if gated else outputs) if out is None else out
    update, clusters = None, 0
    if adapter:
        update = lora_hopper.Update(x.new_empty(len(adapter.a), num_tokens, len(adapter.a[0])), adapter.b)
        clusters = lora_hopper.hidden_clusters(adapter)
    blocks = -(-outputs // BLOCK_OUTPUTS)
    arguments = [x, weight, scales, global_scale, bias, y, num_tokens, outputs, inputs, schedule.splits, int(gated)]
    arguments += [
        *_fetched(next_weight, num_tokens, blocks * schedule.splits),
        *lora_hopper.arguments(update),
        *lora_hopper.shrink_arguments(adapter),
    ]
    driver.launch(
        kernel(schedule.variant),
        grid=(clusters + blocks, schedule.splits, 1),
        threads=schedule.variant.threads,
        cluster=schedule.splits,
        device=x.device,
        arguments=arguments,
        pdl=True,
    )
    return y


def _fetched(weight: Tensor | None, num_tokens: int, blocks: int) -> tuple[Tensor | None, int, int, int, int]:
    """Choose which bytes of the next GEMM's weight the ``blocks`` thread blocks of this GEMM prefetch to L2: equally
    many from the start of each part into which the next GEMM divides K. Returns the fields of ``Next`` in
    nvfp4_decode.cu: the weight, the number of parts, the bytes from one part to the next, the number of thread blocks
    that prefetch, and the bytes of each."""
    if weight is None:
        return None, 1, 0, 0, 0
    k_blocks, words = weight.shape
    schedule = choose_schedule(num_tokens, words // 2, k_blocks * K_BLOCK)
    parts = schedule.splits if schedule else 1
    stride = k_blocks // parts * words * weight.element_size()
    of_part = max(1, blocks // parts)
    size = min(costs.FETCHED_AHEAD // parts, stride) // of_part // CACHE_LINE * CACHE_LINE
    return weight, parts, stride, of_part * parts if size else 0, size


def humming_bias(bias: Tensor) -> Tensor:
    """Reorder a bias [N] as this project's GEMM kernels and those of the library Humming read it: of every 32 outputs
    n, first those with n % 8 in (0, 1), then (2, 3), and so on. Applied twice, it gives the original order."""
    return bias.view(-1, 4, 4, 2).transpose(1, 2).reshape(-1)
