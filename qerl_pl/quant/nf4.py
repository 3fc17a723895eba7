"""NF4 (QLoRA, arXiv 2305.14314, appendix E): 16 quantiles of a normal distribution, with an fp32 scale per 64 columns.

    w = nf4(code) * scale,   scale = largest |w| of the 64 columns

NF4 takes 4.5 bits per weight, as NVFP4 does. Codes and scales equal those of bitsandbytes (block size 64, scales not
quantised) bit for bit. Row lengths must be multiples of 64, so that no block spans two rows.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format

# fmt: off
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_TINY = 1e-38  # smallest divisor, as in bitsandbytes


def round_block_scale(block_amax: Tensor, _global_scale: Tensor) -> Tensor:
    return block_amax.view(torch.int32)


def effective_scale(block_scale: Tensor, _global_scale: Tensor) -> Tensor:
    return block_scale.view(torch.float32)


def nf4_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the uint8 codes of the values nearest to weight / scale; a tie is rounded to the lower value."""
    values = weight * (1 / scale.clamp_min(_TINY))
    return torch.bucketize(values, _midpoints(values.device), out_int32=True).to(torch.uint8)


def nearby_block_scales(block_scale: Tensor) -> Iterator[Tensor]:
    """Yield the block scales that the quantiser tries for a smaller rounding error: the given ones times 1.00, 0.97,
    ... down to about 0.6, as bits in the shape of ``block_scale``. A smaller scale clips the block's largest weight and
    rounds its other weights more finely."""
    for percent in range(100, 58, -3):
        yield (block_scale.view(torch.float32) * (percent / 100)).view(torch.int32)


NF4 = Format(
    name="nf4",
    block=64,
    values=NF4_VALUES,
    scale_dtype=torch.int32,
    encode=nf4_codes,
    round_scale=round_block_scale,
    effective_scale=effective_scale,
    nearby_scales=nearby_block_scales,
)


@cache
def _midpoints(device: torch.device) -> Tensor:
    values = torch.tensor(NF4_VALUES, dtype=torch.float32, device="cpu")
    return ((values[1:] + values[:-1]) / 2).to(device)
