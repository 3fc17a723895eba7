"""Predict relative times of training passes, to choose a micro-batch size and a level of gradient checkpointing.

The constants were measured with a 7B model on one H200 (NVFP4, LoRA of rank 32, packed rows): times of passes are
within 1 % of (tokens + OVERHEAD) * (1 + share) times a constant, from 4096 to 16384 tokens. The overhead, the time of
dequantisation and kernel launches, grows with the number of parameters as the time of matrix products does, so the
constants are close to right for other model sizes.
"""

from __future__ import annotations

from qerl_pl.policy.recompute import Recompute

OVERHEAD = 600
"""Time of a pass that does not depend on its number of tokens, in units of the time per token."""
# Extra time as a share of the time of a pass without recomputation: of recomputing every block (less than forward's
# share, because a block's last matrix product is not recomputed), and of recomputing element-wise operations.
WHOLE, SELECTIVE = 0.33, 0.09
FUSED_WHOLE, FUSED_SELECTIVE = 0.31, 0.023  # if norms, rotary embeddings and SwiGLU are fused kernels
OFFLOAD = 0.07  # of copying the blocks' inputs to host memory and back, as a share of a pass that recomputes all


def extra_work(how: Recompute, num_layers: int, *, fused: bool = False, dropout: bool = False) -> float:
    """Return the time that recomputation adds to a training pass, as a share of one without recomputation."""
    if not how.selective:
        return 0.0
    whole = how.blocks / num_layers
    all_blocks, selective = (FUSED_WHOLE, FUSED_SELECTIVE) if fused else (WHOLE, SELECTIVE)
    # With LoRA dropout, a block that recomputes selectively repeats all of its forward pass except attention. It counts
    # as recomputed completely, which is a little too much; times with dropout were not measured.
    extra = whole * all_blocks + (1 - whole) * (all_blocks if dropout else selective)
    return (1 + extra) * (1 + OFFLOAD) - 1 if how.offload else extra


def time_per_token(
    how: Recompute, num_layers: int, tokens: int, *, fused: bool = False, dropout: bool = False
) -> float:
    """Return the time per token of a training pass, in units of the time per token of an infinitely long pass without
    recomputation."""
    return (1 + extra_work(how, num_layers, fused=fused, dropout=dropout)) * (1 + OVERHEAD / tokens)
