"""Verification of speculative decoding, as a Triton kernel: a drafted token is accepted if it equals the token that
would have been sampled without drafts.

vLLM's sampler on a GPU takes the token with the largest sum of logit and Gumbel noise, and the noise is a hash of the
request's seed, the position and the token. A step that computes logits for the last token of a sequence and for k
drafts after it samples one token per row of logits. A row's token is the one that would be sampled without drafts if
every draft up to this row equals the token sampled at its position. By induction, the tokens up to and including the
first one that differs from its draft are those of decoding without drafts, whatever the drafts are (drafter-invariant
speculative decoding, arXiv 2408.07978, without its draft model).
"""

# pyright: reportCallIssue=false
# Triton's type hints do not have its launch options.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import launch


def accept(sampled: Tensor, inputs: Tensor, rows: Tensor, starts: Tensor, most_drafts: int) -> tuple[Tensor, Tensor]:
    """Take the tokens that were sampled for each of S sequences, up to and including the first one that differs from
    the draft at its position.

    Args:
        sampled: [R] int64, the token sampled in each row of logits.
        inputs: [T] integers, the model's T input tokens.
        rows: [R] int64, for each row of logits the index in ``inputs`` of the token that it follows: a sequence's last
            token, or a draft.
        starts: [S + 1] int32, the first row of each sequence, followed by R. Each sequence has at least one row.
        most_drafts: most drafts of a sequence, which has a row for each draft and one more.

    Returns:
        Tokens, [S, 1 + most_drafts] int64, 0 after the last; and their number, [S] int32.
    """
    num, width = len(starts) - 1, 1 + most_drafts
    tokens = torch.empty(num, width, dtype=torch.int64, device=sampled.device)
    counts = torch.empty(num, dtype=torch.int32, device=sampled.device)
    if num:
        constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
        launch(_accept_kernel, (num,), (sampled, inputs, rows, starts, tokens, counts), constants, num_warps=1)
    return tokens, counts


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _accept_kernel(sampled, inputs, rows, starts, tokens, counts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    place = tl.arange(0, BLOCK)
    is_row, is_draft = place < num_rows, (place > 0) & (place < num_rows)
    draft = tl.load(inputs + tl.load(rows + start + place, mask=is_draft, other=0), mask=is_draft, other=0)
    due = tl.load(sampled + start + place - 1, mask=is_draft, other=0)
    count = tl.reduce(tl.where(is_draft & (draft != due), place, num_rows), 0, _least)
    token = tl.load(sampled + start + place, mask=is_row & (place < count), other=0)
    tl.store(tokens + sequence * WIDTH + place, token, mask=place < WIDTH)
    tl.store(counts + sequence, count)
