"""Base weights of trainer and engine: check that both have the same, and let both use one copy of them where possible.

The one copy is in the trainer's memory, outside vLLM's pool, so the engine cannot free or move it when it sleeps,
closes, fails to start or starts again. Before vLLM loads, the trainer's weights are put into the order that the native
decoding kernels read (``put_in_tile_order``). vLLM then does not read these weights from the checkpoint: before it
converts a linear, it gets a copy of the trainer's weight (``give``), and afterwards the linear's parameters are set to
the trainer's memory if both hold the same bits, and the copy is freed (``adopt``). Otherwise trainer and engine each
keep a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.files import in_bytes
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4, scale_divisor
from qerl_pl.quant.selection import fused_groups
from qerl_pl.quant.tile_order import TILE, fits, fused, is_in_tile_order, rows_of, to_row_order, whole_of

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


class Fused(NamedTuple):
    """Linear of vLLM's model, with the linears of the trainer's model whose weights it concatenates, e.g. q_proj,
    k_proj and v_proj."""

    name: str
    layer: Any
    members: list[str]
    """Names of ``parts`` in the trainer's model."""
    parts: list[FrozenLinear]


def fused_linears(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> Iterator[Fused]:
    """Find the linears of vLLM's model whose weights consist of packed linears of the trainer's model.

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
            yield Fused(name, layer, names, [linears[member] for member in names])


def unread(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> dict[str, list[str]]:
    """Find the linears of vLLM whose codes and block scales it need not read, because the trainer's weight is in tile
    order.

    Returns:
        Names of the trainer's linears that a linear of vLLM consists of, by the name of that.
    """
    found = fused_linears(model, linears)
    return {each.name: each.members for each in found if whole_of([part.packed for part in each.parts]) is not None}


def check_same_base(
    model: nn.Module, linears: Mapping[str, FrozenLinear], base: str, *, unread: Collection[str] = ()
) -> int:
    """Compare the NVFP4 weights that vLLM has read with the trainer's, before vLLM converts them to the layout of its
    kernels.

    Args:
        model: vLLM's model.
        linears: the trainer's packed linears by name.
        base: folder from which both have loaded the base, for the error message.
        unread: names of vLLM's linears of which it has read the tensor scales only.

    Returns:
        Number of the trainer's linears that were compared.

    Raises:
        ValueError: a weight differs.
    """
    compared = 0
    for name, layer, _, parts in fused_linears(model, linears):
        codes = _codes(layer)
        if parts[0].fmt is not NVFP4 or codes is None:
            continue
        rows = [part.out_features for part in parts]
        if sum(rows) != len(codes):
            raise ValueError(
                f"{name} has {len(codes)} outputs in vLLM; the trainer's linears that it fuses have {rows}"
            )
        read = zip(codes.split(rows), layer.weight_scale.view(torch.uint8).split(rows), strict=True)
        factors = _factors(layer, len(parts))
        same = [
            _is_same_scale(part.packed, factor) and (name in unread or _is_same(part.packed, own_codes, own_scales))
            for part, (own_codes, own_scales), factor in zip(parts, read, factors, strict=True)
        ]
        if not all(same):
            raise ValueError(
                f"the base has changed while the run was starting: vLLM has read another {name} from {base} than the "
                "trainer; start the run again"
            )
        compared += len(parts)
    return compared


def put_in_tile_order(linears: Mapping[str, FrozenLinear]) -> None:
    """Rearrange packed weights of the trainer to tile order, which the native decoding kernels read. Linears that vLLM
    fuses into one get one common buffer.

    Linears are not changed if their format is not NVFP4, or if their shapes do not fit (``tile_order.fits``). A second
    call changes nothing.

    Args:
        linears: the trainer's packed linears by name.
    """
    for group in fused_groups(list(linears), present=linears.keys()).values():
        parts = [linears[name] for name in group]
        weights = [part.packed for part in parts]
        if _fits(parts) and whole_of(weights) is None:
            rows = [to_row_order(weight) if is_in_tile_order(weight) else weight for weight in weights]
            for part, weight in zip(parts, fused(rows), strict=True):
                part.packed = weight
    if torch.cuda.is_available():
        # Release the memory of the replaced weights to vLLM, whose memory pool cannot use what torch keeps cached.
        torch.cuda.empty_cache()


def lend(model: nn.Module, linears: Mapping[str, FrozenLinear], *, unread: Collection[str] = ()) -> None:
    """Store in each linear of vLLM a reference to the trainer's weight, if that is in tile order (as the native
    decoding kernels read it). ``give`` and ``adopt`` use this reference.

    Args:
        model: vLLM's model.
        linears: the trainer's packed linears by name.
        unread: names of vLLM's linears that ``give`` fills. Until then their parameters are on the trainer's device and
            take no memory, so vLLM copies nothing between devices before and after it converts them.
    """
    for name, layer, _, parts in fused_linears(model, linears):
        layer.trainers_weight = whole = whole_of([part.packed for part in parts])
        if name in unread and whole is not None:
            layer.is_empty = True
            for parameter in (_codes(layer), layer.weight_scale):
                empty = torch.empty(1, dtype=parameter.dtype, device=whole.codes.device)
                parameter.data = empty.expand(parameter.shape)


def give(layer: Any) -> None:
    """Fill the parameters of a linear that vLLM has not read with a copy of the trainer's weight in row order, as they
    are in the checkpoint; called right before vLLM converts them."""
    if vars(layer).pop("is_empty", False):
        rows = to_row_order(layer.trainers_weight)
        codes, scales = _codes(layer), layer.weight_scale
        codes.data, scales.data = rows.codes, rows.block_scale.view(scales.dtype)


def adopt(layer: Any) -> bool:
    """Make the parameters of a linear, after vLLM has loaded and converted it, refer to the trainer's memory if this
    holds the same bits.

    Returns:
        Whether the trainer's memory is used; if not, trainer and engine keep separate copies.
    """
    lent = vars(layer).pop("trainers_weight", None)
    if lent is None:
        return False
    weight, scales = layer.weight, layer.weight_scale
    if (weight.dtype, weight.device) != (lent.codes.dtype, lent.codes.device) or scales.element_size() != 1:
        return False
    if not (torch.equal(weight, lent.codes) and torch.equal(scales.view(torch.uint8), lent.block_scale)):
        return False
    weight.data, scales.data = lent.codes, lent.block_scale.view(scales.dtype)
    layer.weight_digest = _digest(layer)
    return True


def place(model: nn.Module, linears: Mapping[str, FrozenLinear], device: torch.device) -> None:
    """Move those parameters of linears to the GPU that vLLM has left in host memory.

    If vLLM has created weights in host memory (``patches.packed_weights_on_host``), it converts them on the GPU and
    then moves parameters whose names have not changed back to host memory. Parameters that ``adopt`` had set to the
    trainer's memory on the GPU are set to it again; all others are copied to the GPU.

    Args:
        model: vLLM's model.
        linears: the trainer's packed linears by name.
        device: device that vLLM computes on.

    Raises:
        CheckFailed: a linear that vLLM has not read was not filled by ``give``.
    """
    for name, layer, _, parts in fused_linears(model, linears):
        if hasattr(layer, "is_empty"):
            raise CheckFailed(
                f"vLLM has converted {name} with a kernel that is not this project's, before it had its weights; set "
                "decoding_kernel to 'humming'"
            )
        weight = whole_of([part.packed for part in parts]) if hasattr(layer, "weight_digest") else None
        if weight is not None:
            layer.weight.data = weight.codes
            layer.weight_scale.data = weight.block_scale.view(layer.weight_scale.dtype)
    for layer in model.modules():
        if isinstance(layer, LinearBase):  # includes linears of vLLM that do not consist of the trainer's
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.to(device)


def log_copies(worker: WorkerBase, linears: Mapping[str, FrozenLinear]) -> None:
    """Log how many bytes of the packed base weights are shared by trainer and vLLM; nothing is logged for a base that
    is not quantised."""
    if not linears:
        return
    size = sum(_size(linear) for linear in linears.values())
    adopted = [
        each.parts for each in fused_linears(worker.get_model(), linears) if hasattr(each.layer, "weight_digest")
    ]
    shared = sum(_size(part) for parts in adopted for part in parts)
    if shared:
        rank_zero_info(f"trainer and vLLM use one copy of {in_bytes(shared)} of {in_bytes(size)} of packed weights")
    else:
        rank_zero_info(
            f"trainer and vLLM have a copy each of the base's {in_bytes(size)} of packed weights: vLLM's kernels read "
            "another order here"
        )


def check_rows(worker: WorkerBase, linears: Mapping[str, FrozenLinear]) -> int:
    """Compare every packed linear of vLLM with the trainer's: the first row of each part if both have copies, and a
    digest of the whole weight if they share one copy.

    Args:
        worker: vLLM's worker.
        linears: the trainer's packed linears by name.

    Returns:
        Number of vLLM's linears that were compared. Linears whose packed weights vLLM has rearranged for its kernels
        are not compared.

    Raises:
        CheckFailed: a linear differs from the trainer's, or has changed since it was loaded.
    """
    same = {}
    for name, layer, _, parts in fused_linears(worker.get_model(), linears):
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "weight_digest"):
            whole = whole_of([part.packed for part in parts])
            is_shared = whole is not None and whole.codes.data_ptr() == layer.weight.data_ptr()
            same[name] = (_digest(layer) == layer.weight_digest).all() & is_shared
        elif weight is not None and weight.is_floating_point() and len(weight) == sum(p.out_features for p in parts):
            rows = weight.detach().split([part.out_features for part in parts])
            equal = [(_first_row(part, own) == own[0]).all() for part, own in zip(parts, rows, strict=True)]
            same[name] = torch.stack(equal).all()
    if same and not all(found := torch.stack([*same.values()]).tolist()):
        wrong = [name for name, is_same in zip(same, found, strict=True) if not is_same]
        listed = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        raise CheckFailed(
            f"the rollout engine does not compute with the trainer's base: {len(wrong)} of {len(same)} linears differ "
            f"from what was loaded: {listed}"
        )
    return len(same)


def _first_row(linear: FrozenLinear, like: Tensor) -> Tensor:
    """Dequantise the first row of a packed linear to the dtype and device of the tensor ``like``."""
    weight = linear.packed
    if is_in_tile_order(weight):
        part = rows_of(weight, 0, TILE, weight.global_scale)
    else:
        part = PackedWeight(weight.codes[:1], weight.block_scale[:1], weight.global_scale)
    return linear.fmt.dequantize(part, like.dtype)[0].to(like.device)


def _digest(layer: Any) -> Tensor:
    """Compute a digest of vLLM's packed weight: the sum of its codes and the sum of its scales' bits, [2] int64."""
    weight, scales = layer.weight.detach(), layer.weight_scale.detach().view(torch.uint8)
    return torch.stack([weight.sum(dtype=torch.int64), scales.sum(dtype=torch.int64)])


def _size(linear: FrozenLinear) -> int:
    return linear.codes.nbytes + linear.block_scale.nbytes


def _fits(parts: Sequence[FrozenLinear]) -> bool:
    return all(part.fmt is NVFP4 for part in parts) and fits([(part.out_features, part.in_features) for part in parts])


def _factors(layer: Any, count: int) -> Sequence[Tensor | None]:
    """Return, for each part of a fused linear, its tensor scale as a divisor, [n] fp32, as compressed-tensors stores
    it; None for each part if the linear has no parameter ``weight_global_scale``.

    Each part has one divisor (n = 1), except in delta nets, whose first part has queries, keys and values with three
    equal divisors.
    """
    divisors = getattr(layer, "weight_global_scale", None)
    if divisors is None or divisors.numel() < count:
        return [None] * count
    return divisors.detach().flatten().split([divisors.numel() - count + 1, *[1] * (count - 1)])


def _codes(layer: Any) -> Any:
    """Return the parameter with a linear's codes in row order, by the name that it has in the checkpoint's format; None
    if it has none."""
    codes = getattr(layer, "weight_packed", getattr(layer, "weight", None))
    return codes if codes is not None and codes.dtype == torch.uint8 else None


def _is_same_scale(weight: PackedWeight, divisor: Tensor | None) -> bool:
    return divisor is None or bool((divisor == scale_divisor(weight.global_scale).item()).all())


def _is_same(weight: PackedWeight, codes: Tensor, block_scale: Tensor) -> bool:
    weight = to_row_order(weight) if is_in_tile_order(weight) else weight
    own, device = (weight.codes, weight.block_scale), weight.codes.device  # on a GPU, where comparing is faster
    return all(map(torch.equal, own, (codes.to(device), block_scale.to(device))))
