"""Find a common tensor scale for NVFP4 linears that engines fuse, without changing any weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import E4M3_MAX, scale_divisor

ROUNDING = 2.0**-23
"""Relative tolerance for equal scales; a tensor scale that is stored as its fp32 reciprocal has at most half of this
relative error."""


@dataclass(frozen=True)
class Scales:
    """Packed weight of a linear in NVFP4."""

    codes: Tensor
    """[N, K/2] uint8."""
    block_scale: Tensor
    """[N, K/16] uint8, bits of E4M3 values."""
    multiplier: Tensor
    """[] fp64, tensor scale; ModelOpt stores the scale in fp32, and compressed-tensors stores its reciprocal in
    fp32."""

    @property
    def weight(self) -> PackedWeight:
        """The weight as ``PackedWeight``."""
        return PackedWeight(self.codes, self.block_scale, self.multiplier)


def share_scale(members: Sequence[Scales]) -> tuple[Tensor, list[Tensor]] | None:
    """Find one tensor scale for several linears, and new block scales, such that all dequantised weights stay the same.

    If all tensor scales are equal already, block scales do not change. Otherwise block scales are multiplied by the
    ratio of the old and new tensor scale. This is possible only if E4M3 represents all products exactly, as it mostly
    does if the ratios are powers of two.

    Returns:
        The reciprocal of the common tensor scale, [] fp32, and the bits of each linear's block scales, [N, K/16]; None
        if there is no common tensor scale.
    """
    multipliers = sorted({member.multiplier.item() for member in members}, reverse=True)
    if len(multipliers) == 1:
        return scale_divisor(members[0].multiplier), [member.block_scale for member in members]
    for multiplier in multipliers:
        tables = [_table(member, multiplier) for member in members]
        absorbed = [
            table[member.block_scale.int()] for table, member in zip(tables, members, strict=True) if table is not None
        ]
        if len(absorbed) == len(members):
            return scale_divisor(torch.tensor(multiplier, dtype=torch.float64)), absorbed
    return None


def _table(member: Scales, multiplier: float) -> Tensor | None:
    """Make a table [256] uint8 from the bits of a linear's block scales to their bits under another tensor scale; None
    if E4M3 does not have one of the new block scales."""
    used = member.block_scale.unique()
    wanted = used.view(torch.float8_e4m3fn).double() * (member.multiplier / multiplier)
    bits = wanted.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    if ((bits.double() - wanted).abs() > ROUNDING * wanted.abs()).any():
        return None
    table = torch.zeros(256, dtype=torch.uint8)
    table[used.long()] = bits.view(torch.uint8)
    return table
