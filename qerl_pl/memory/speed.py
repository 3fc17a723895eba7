"""How long a training pass takes, relative to others: enough to choose between micro-batches and recomputation.

The constants are of a 7B on one H200 (NVFP4, LoRA of rank 32, packed rows): passes that keep everything and passes that
recompute every block fit  time = (tokens + OVERHEAD) * (1 + share)  within 1 % from 4096 to 16384 tokens. Dequantising
and launching, which make the overhead, grow with the parameters as the products do, so other sizes are close.
"""

from __future__ import annotations

from qerl_pl.policy.recompute import Recompute

OVERHEAD = 600
"""Tokens that take as long as what a pass does once, whatever its size."""
WHOLE = 0.33
"""Time of recomputing every block, as a share of a pass that keeps everything. A block's last product is not made."""
SELECTIVE = 0.09
"""Likewise of recomputing norms, rotations, activations and sums alone."""
FUSED_WHOLE, FUSED_SELECTIVE = 0.31, 0.03
"""Likewise where norms, rotations and SwiGLU are single kernels; the second is an estimate."""
OFFLOAD = 0.07
"""Share by which a pass that recomputes every block gets slower when the blocks' inputs go to the host and back."""


def extra_work(how: Recompute, num_layers: int, *, fused: bool = False) -> float:
    """Time that recomputation adds to a pass, as a share of one that keeps everything."""
    if not how.selective:
        return 0.0
    whole = how.blocks / num_layers
    all_blocks, selective = (FUSED_WHOLE, FUSED_SELECTIVE) if fused else (WHOLE, SELECTIVE)
    extra = whole * all_blocks + (1 - whole) * selective
    return (1 + extra) * (1 + OFFLOAD) - 1 if how.offload else extra


def time_per_token(how: Recompute, num_layers: int, tokens: int, *, fused: bool = False) -> float:
    """Time of a pass for each of its tokens; 1 where everything is kept and passes are endless."""
    return (1 + extra_work(how, num_layers, fused=fused)) * (1 + OVERHEAD / tokens)
