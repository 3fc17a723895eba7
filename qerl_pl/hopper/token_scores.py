"""Triton kernels for the log-probability of one token per row of logits [T, V], and its rank in the row. A decoding
step often has fewer rows than the GPU has SMs, so each program reads one block of the vocabulary of one row, and a
second kernel merges the blocks.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# Triton's type hints do not have its launch options and scalars.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import launch

BLOCK = 4096  # logits per program, a power of 2


def token_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, for one token per row of logits, its log-probability under softmax(logits), [T] fp32 in nats, and its
    rank, [T] int64: the number of logits in the row that are at least as high as the token's own.

    Args:
        logits: [T, V] of any float dtype, with stride 1 along V; -inf marks a token that cannot be sampled.
        tokens: [T] int64 in [0, V).
    """
    assert logits.stride(1) == 1, logits.stride()
    rows, vocabulary = logits.shape
    splits = triton.cdiv(vocabulary, BLOCK)
    partials = torch.empty(3, rows, splits, dtype=torch.float32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        tokens, stride, plane = tokens.contiguous(), logits.stride(0), rows * splits
        arguments = logits, tokens, partials, stride, vocabulary, plane
        launch(_blocks_kernel, (rows, splits), arguments, {"BLOCK": BLOCK}, num_warps=8)
        arguments = logits, tokens, partials, logprobs, ranks, stride, splits, plane
        launch(_merge_kernel, (rows,), arguments, {"SPLITS": triton.next_power_of_2(splits)}, num_warps=1)
    return logprobs, ranks


@triton.jit
def _max(values):
    return tl.reduce(values, 0, tl.standard._elementwise_max)  # not every version of Triton's interpreter has tl.max


@triton.jit
def _sum(values):
    return tl.reduce(values, 0, tl.standard._sum_combine)


@triton.jit(do_not_specialize=["plane"])
def _blocks_kernel(logits, tokens, partials, stride, V, plane, BLOCK: tl.constexpr):
    """Write, for each row and block of the vocabulary, the highest logit, the sum of exp(z - highest) over its logits
    z, and the number of logits that are at least as high as that of the row's token."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < V
    x = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    z = tl.load(logits + row * stride + col, mask=inside, other=float("-inf")).to(tl.float32)
    highest = _max(z)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # sum 0, not nan, if all are -inf
    place = partials + row * tl.num_programs(1) + tl.program_id(1)
    tl.store(place, highest)
    tl.store(place + plane, _sum(tl.exp(z - base)))
    tl.store(place + 2 * plane, _sum(tl.where(inside & (z >= x), 1.0, 0.0)))


@triton.jit(do_not_specialize=["plane"])
def _merge_kernel(logits, tokens, partials, logprobs, ranks, stride, splits, plane, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    place = partials + row * splits + split
    highest = tl.load(place, mask=inside, other=float("-inf"))
    total = tl.load(place + plane, mask=inside, other=0.0)
    above = tl.load(place + 2 * plane, mask=inside, other=0.0)
    top = _max(highest)
    log_total = tl.log(_sum(total * tl.exp(highest - top)))
    x = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(logprobs + row, x - top - log_total)
    tl.store(ranks + row, _sum(above).to(tl.int64))
