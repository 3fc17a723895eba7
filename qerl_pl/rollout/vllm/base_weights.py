"""Check that trainer and engine, which read the same folder one after the other, compute with the same base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4, scale_divisor
from qerl_pl.quant.tile_order import is_in_tile_order, to_row_order


class Fused(NamedTuple):
    """Linear of vLLM with the trainer's linears that it consists of, e.g. q/k/v."""

    name: str
    layer: Any
    parts: list[FrozenLinear]


def fused_linears(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> Iterator[Fused]:
    """Find vLLM's linears that consist of packed linears of the trainer.

    Args:
        model: vLLM's model.
        linears: the trainer's packed linears by name (``model.layers.0.mlp.up_proj``).
    """
    members = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        parent, dot, leaf = name.removesuffix(".base_layer").rpartition(".")
        names = [f"{parent}{dot}{member}" for member in members.get(leaf, [leaf])]
        if all(member in linears for member in names):
            yield Fused(name, layer, [linears[member] for member in names])


def check_same_base(model: nn.Module, linears: Mapping[str, FrozenLinear], base: str) -> int:
    """Compare the NVFP4 weights that vLLM has read with the trainer's, before vLLM converts them.

    Args:
        model: vLLM's model.
        linears: the trainer's packed linears by name.
        base: folder that both have read.

    Returns:
        Number of the trainer's linears that were compared.

    Raises:
        ValueError: a weight differs.
    """
    compared = 0
    for name, layer, parts in fused_linears(model, linears):
        codes = getattr(layer, "weight_packed", getattr(layer, "weight", None))
        if parts[0].fmt is not NVFP4 or codes is None or codes.dtype != torch.uint8:
            continue
        rows = [part.out_features for part in parts]
        if sum(rows) != len(codes):
            raise ValueError(
                f"{name} has {len(codes)} outputs in vLLM; the trainer's linears that it fuses have {rows}"
            )
        read = zip(codes.split(rows), layer.weight_scale.view(torch.uint8).split(rows), strict=True)
        factors = _factors(layer, len(parts))
        same = [
            _is_same(part.packed, own_codes, own_scales, factor)
            for part, (own_codes, own_scales), factor in zip(parts, read, factors, strict=True)
        ]
        if not all(same):
            raise ValueError(
                f"the base has changed while the run was starting: vLLM has read another {name} from {base} than the "
                "trainer; start the run again"
            )
        compared += len(parts)
    return compared


def _factors(layer: Any, count: int) -> Sequence[Tensor | None]:
    """Return the divisor [] fp32 of each part; None where vLLM has another parameter than compressed-tensors' one."""
    divisors = getattr(layer, "weight_global_scale", None)
    return [None] * count if divisors is None or divisors.numel() != count else [*divisors.detach().flatten()]


def _is_same(weight: PackedWeight, codes: Tensor, block_scale: Tensor, divisor: Tensor | None) -> bool:
    weight = to_row_order(weight) if is_in_tile_order(weight) else weight
    same = torch.equal(weight.codes, codes) and torch.equal(weight.block_scale, block_scale)
    return same and (divisor is None or bool(scale_divisor(weight.global_scale) == divisor))
