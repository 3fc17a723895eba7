"""Triton kernels that dequantise 4-bit weights; ``qerl_pl.quant.formats`` defines the formats and computes the same in
plain PyTorch.

Each thread converts one 32-bit word of codes, which is eight weights: a warp reads 128 bytes of codes, and each of its
threads writes 16 bytes of a 16-bit dtype, coalesced. Each call allocates memory for its result. torch's caching
allocator gives the next layer the memory of the previous one, which, unlike a static buffer, is safe with several
streams, threads and recomputation.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# Triton's type hints do not have its launch options and scalars.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import launch

WORDS, WARPS = 1024, 8  # WORDS: 32-bit words of codes per program; WARPS: warps per program


def dequantize_nvfp4(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise an NVFP4 weight to [N, K] of ``dtype``, rounded once. Codes [N, K/2] and block scales [N, K/16] are
    contiguous uint8, as in checkpoints. The tensor scale, fp64 or fp32, is [], or [E] for E concatenated weights of N /
    E outputs each."""
    assert block_scale.is_contiguous(), block_scale.stride()
    out, words = _output_and_words(codes, dtype)
    grid, words_a_scale = (triton.cdiv(words.numel(), WORDS),), words.numel() // global_scale.numel()
    arguments = words, block_scale, global_scale, out, words.numel(), words_a_scale
    with torch.cuda.device_of(codes):
        launch(_nvfp4_kernel, grid, arguments, {"STACKED": global_scale.ndim, "WORDS": WORDS}, num_warps=WARPS)
    return out


def dequantize_table(codes: Tensor, scale: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise a weight in any 4-bit format to [N, K] of ``dtype``; ``values`` [16] fp32 are the values of its codes.
    Codes [N, K/2] uint8 and scales [N, K/block] fp32 are contiguous, and block is a multiple of 8. The result equals
    ``formats.decode`` bit for bit. For NVFP4, ``dequantize_nvfp4`` takes a quarter less time."""
    assert scale.is_contiguous(), scale.stride()
    out, words = _output_and_words(codes, dtype)
    with torch.cuda.device_of(codes):
        grid = (triton.cdiv(words.numel(), WORDS),)
        words_a_block = words.numel() // scale.numel()
        _table_kernel[grid](words, scale, values, out, words.numel(), words_a_block, WORDS=WORDS, num_warps=WARPS)
    return out


def _output_and_words(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert codes.is_contiguous(), codes.stride()
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    return out, codes.view(torch.int32)


@triton.jit
def _nvfp4_kernel(
    words, block_scale, global_scale, out, num_words, words_a_scale, STACKED: tl.constexpr, WORDS: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    inside = word < num_words - start
    packed = tl.load(words + start + word, mask=inside, other=0)
    bits = tl.load(block_scale + start // 2 + word // 2, mask=inside, other=0).to(tl.int32)
    # An e4m3 value's exponent and mantissa, moved to the exponent and the top mantissa bits of an fp32, give the value
    # times 2^-120, subnormals included. The product of this value and the tensor scale is computed in fp64 and rounded
    # to fp32 once, as in ``nvfp4.effective_scale``.
    scaled_down = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    if STACKED:
        factor = tl.load(global_scale + (start + word) // words_a_scale, mask=inside, other=0)
    else:
        factor = tl.load(global_scale)
    scale = (scaled_down * (factor.to(tl.float64) * 2.0**120)).to(tl.float32)
    scale = tl.where((bits & 0x7F) == 0x7F, float("nan"), scale)
    # An E2M1 code's sign, exponent and mantissa, moved to bits 31 and 24 to 22 of an fp32, give the code's value times
    # 2^-126.
    column = tl.arange(0, 8)
    value = ((packed[:, None] << (28 - 4 * column)[None, :]) >> 6) & -0x7E400000  # [WORDS, 8]
    value = value.to(tl.float32, bitcast=True) * 2.0**126
    _store(out, start, word, column, value * scale[:, None], inside)


@triton.jit
def _table_kernel(words, scale, values, out, num_words, words_a_block, WORDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    inside = word < num_words - start
    packed = tl.load(words + start + word, mask=inside, other=0)
    block_scale = tl.load(scale + (start + word) // words_a_block, mask=inside, other=0.0)
    column = tl.arange(0, 8)
    code = (packed[:, None] >> (4 * column)[None, :]) & 0xF  # [WORDS, 8]
    _store(out, start, word, column, tl.load(values + code) * block_scale[:, None], inside)


@triton.jit
def _store(out, start, word, column, value, inside):
    place = out + start * 8 + word[:, None] * 8 + column[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=inside[:, None])
