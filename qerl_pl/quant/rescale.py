"""One tensor scale for NVFP4 linears that engines fuse, found without changing a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import E4M3_MAX, scale_divisor

ROUNDING = 2.0**-23
"""Relative; a tensor scale that is stored as its fp32 reciprocal is off by half of it at most."""


@dataclass(frozen=True)
class Scales:
    """A linear in NVFP4, and how its tensor scale is stored."""

    codes: Tensor
    """[N, K/2] uint8."""
    block_scale: Tensor
    """[N, K/16] uint8, bits of E4M3."""
    multiplier: Tensor
    """[] fp64: what ModelOpt stores, in fp32, and compressed-tensors the reciprocal of."""

    @property
    def weight(self) -> PackedWeight:
        """The packed weight."""
        return PackedWeight(self.codes, self.block_scale, self.multiplier)


def share_scale(members: Sequence[Scales]) -> tuple[Tensor, list[Tensor]] | None:
    """A divisor for all linears, and block scales [N, K/16] for each, with which they hold the same weights.

    Where all tensor scales are equal the block scales stay as they are. A difference is absorbed into the block scales
    where E4M3 holds each of them times the ratio, as it mostly does for powers of two.

    Returns:
        The divisor, [] fp32, and bits of the block scales; None if the difference cannot be absorbed.
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
    """[256] uint8: a block scale's bits to those under another multiplier; None if E4M3 lacks one that is needed."""
    used = member.block_scale.unique()
    wanted = used.view(torch.float8_e4m3fn).double() * (member.multiplier / multiplier)
    bits = wanted.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    if ((bits.double() - wanted).abs() > ROUNDING * wanted.abs()).any():
        return None
    table = torch.zeros(256, dtype=torch.uint8)
    table[used.long()] = bits.view(torch.uint8)
    return table
