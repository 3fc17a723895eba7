"""Check that trainer and engine have the same base weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from qerl_pl import native
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.files import in_bytes
from qerl_pl.quant.experts import PARTS
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4, scale_divisor

EXPERT_PARTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
"""Linear layers of an expert in the trainer's model, by the prefix of the names of vLLM's parameters that hold their
weights."""

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


class Fused(NamedTuple):
    """Linear layer of vLLM's model, with the trainer's linear layers that are fused in it, such as q, k and v_proj."""

    name: str
    layer: Any
    members: list[str]  # names of ``parts`` in the trainer's model
    parts: list[FrozenLinear]


def fused_linears(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> Iterator[Fused]:
    """Yield the linear layers of vLLM's model whose weights are packed 4-bit weights in the trainer's model
    (``linears``, by names such as ``model.layers.0.mlp.up_proj``)."""
    members = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase):
            continue
        parent, dot, leaf = name.removesuffix(".base_layer").rpartition(".")
        names = [f"{parent}{dot}{member}" for member in members.get(leaf, [leaf])]
        if all(member in linears for member in names):
            yield Fused(name, layer, names, [linears[member] for member in names])


def expert_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the mixture-of-experts (MoE) layers of vLLM's model. Yields, for each, the name of the trainer's module with
    the same experts, and vLLM's layer."""
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            yield name.removesuffix(".routed_experts").removesuffix(".base_layer"), layer


def fused_experts(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> Iterator[Fused]:
    """Find the experts in MoE layers of vLLM's model whose weights are packed 4-bit weights in the trainer's model
    (``linears``, by name). Yields a ``Fused`` for gate and up of each expert, and one for down; ``Fused.layer`` has
    views of the expert's current weights in vLLM as attributes, named as the parameters of a linear layer. MoE layers
    whose weights vLLM has rearranged, or that use the trainer's memory, are left out."""
    for parent, layer in expert_layers(model):
        if hasattr(layer, "loaded_sums") or hasattr(layer, "adopted"):
            continue
        parameters = dict(layer.named_parameters(recurse=False))
        for (matrix, parts), expert in product(EXPERT_PARTS.items(), range(layer.moe_config.num_experts)):
            names = [f"{parent}.{expert}.{part}" for part in parts]
            if all(member in linears for member in names):
                held = {
                    key.removeprefix(f"{matrix}_"): parameter[expert]
                    for key, parameter in parameters.items()
                    if key.startswith(f"{matrix}_")
                }
                view = SimpleNamespace(**held)
                yield Fused(f"{parent}.{expert}.{'+'.join(parts)}", view, names, [linears[member] for member in names])


def check_same_base(
    model: nn.Module, linears: Mapping[str, FrozenLinear], base: str, *, unread: Collection[str] = ()
) -> int:
    """Check that the NVFP4 weights that vLLM has just read from the folder ``base`` equal the trainer's (``linears``);
    called before vLLM rearranges them. Returns the number of the trainer's linear layers that were compared. For layers
    of vLLM whose names are in ``unread``, only tensor scales are compared, because vLLM has read nothing else. Raises
    ValueError if a weight differs, which means that the folder has changed since the trainer read it."""
    compared = 0
    for name, layer, _, parts in chain(fused_linears(model, linears), fused_experts(model, linears)):
        codes = packed_codes(layer)
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
            _is_same_scale(part.packed, factor) and (name in unread or _is_same(part.packed, *matrices))
            for part, matrices, factor in zip(parts, read, factors, strict=True)
        ]
        if not all(same):
            raise ValueError(
                f"the base has changed while the run was starting: vLLM has read another {name} from {base} than the "
                "trainer; start the run again"
            )
        compared += len(parts)
    return compared


def log_copies(worker: WorkerBase, linears: Mapping[str, FrozenLinear]) -> None:
    """Log how many bytes of 4-bit base weights trainer and vLLM share, that is, have in memory only once. Nothing is
    logged for a base that is not quantised."""
    if not linears:
        return
    size = sum(_size(linear) for linear in linears.values())
    model = worker.get_model()
    adopted = (fused for fused in fused_linears(model, linears) if hasattr(fused.layer, "adopted"))
    shared = sum(_size(part) for fused in adopted for part in fused.parts)
    shared += sum(layer.adopted.nbytes for _, layer in expert_layers(model) if hasattr(layer, "adopted"))
    if shared:
        rank_zero_info(f"trainer and vLLM use one copy of {in_bytes(shared)} of {in_bytes(size)} of packed weights")
    else:
        rank_zero_info(
            f"vLLM has its own copy of the base, next to the trainer's {in_bytes(size)} of packed weights, because its"
            " kernels cannot read those here"
        )


def check_rows(
    worker: WorkerBase, linears: Mapping[str, FrozenLinear], routers: Mapping[str, Tensor] | None = None
) -> int:
    """Check that vLLM still holds the trainer's base weights (4-bit ``linears`` and MoE ``routers``, by name), and
    return the number of layers and routers that were compared:

    - the first row of each linear layer that vLLM holds dequantised;
    - all rows of experts that vLLM holds dequantised, and of routers;
    - a checksum of all weights of layers of which trainer and vLLM share one copy (vLLM's layer has the attribute
      ``adopted``);
    - checksums of experts whose 4-bit weights vLLM has rearranged, in comparison with those at the end of loading
      (``note_experts``).

    Other rearranged layers are left out. Raises CheckFailed if a weight differs, or has changed since loading.
    """
    model, same = worker.get_model(), {}
    for name, layer, _, parts in fused_linears(model, linears):
        weight = getattr(layer, "weight", None)
        if adopted := getattr(layer, "adopted", None):
            same[name] = adopted.holds(layer, parts)
        elif weight is not None and weight.is_floating_point() and len(weight) == sum(p.out_features for p in parts):
            rows = weight.detach().split([part.out_features for part in parts])
            equal = [(_first_row(part, row) == row[0]).all() for part, row in zip(parts, rows, strict=True)]
            same[name] = torch.stack(equal).all()
    for name, layer, _, parts in fused_experts(model, linears):
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.is_floating_point():
            rows = weight.split([part.out_features for part in parts])
            equal = [(part.dense(row.dtype).to(row.device) == row).all() for part, row in zip(parts, rows, strict=True)]
            same[name] = torch.stack(equal).all()
    for name, layer in expert_layers(model):
        if adopted := getattr(layer, "adopted", None):
            same[name] = adopted.holds([linears[f"{name}.0.{part}"] for part in PARTS])
        elif hasattr(layer, "loaded_sums"):
            same[name] = expert_sums(layer).eq(layer.loaded_sums).all()
    for name, weight in (routers or {}).items():
        same[name] = (model.get_parameter(name) == weight.to(model.get_parameter(name))).all()
    if same and not all(results := torch.stack([*same.values()]).tolist()):
        wrong = [name for name, is_same in zip(same, results, strict=True) if not is_same]
        listed = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
        raise CheckFailed(
            f"the rollout engine does not compute with the trainer's base: {len(wrong)} of {len(same)} linears differ "
            f"from what was loaded: {listed}"
        )
    return len(same)


def note_experts(model: nn.Module) -> None:
    """Store checksums of the experts of each MoE layer whose 4-bit weights vLLM has rearranged. They become the layer's
    attribute ``loaded_sums``, with which ``check_rows`` finds later changes."""
    for _, layer in expert_layers(model):
        weight = getattr(layer, "w13_weight", None)  # some of vLLM's kernels rename it
        if not hasattr(layer, "adopted") and (weight is None or not weight.is_floating_point()):
            layer.loaded_sums = expert_sums(layer)


def expert_sums(layer: nn.Module) -> Tensor:
    """Return checksums of all parameters of an MoE layer of vLLM with E experts, [parameters * E] int64."""
    return bit_sums(parameter.detach() for parameter in layer.parameters(recurse=False))


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """Return checksums, one per tensor and expert, of tensors [E, ...] of E experts: [tensors * E] int64. A checksum is
    the sum of the expert's bits, read as 32-bit words, or as bytes if their number is no multiple of 4. The checksums
    change if one word changes or if experts are exchanged with each other, but not if words are exchanged within one
    expert."""
    rows = (tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1) for tensor in tensors)
    sizes = ((row, row.shape[1] * row.element_size()) for row in rows)
    words = (row.view(torch.uint8 if size % 4 else torch.int32) for row, size in sizes)
    return torch.cat([word.sum(1, dtype=torch.int64) for word in words])


def packed_codes(layer: Any) -> Any:
    """Return the parameter of vLLM's ``layer`` that holds 4-bit weights as the checkpoint stores them (uint8, two codes
    per byte); None if there is none, for example because vLLM has converted the weights."""
    codes = getattr(layer, "weight_packed", getattr(layer, "weight", None))
    return codes if codes is not None and codes.dtype == torch.uint8 else None


def _first_row(linear: FrozenLinear, like: Tensor) -> Tensor:
    """Dequantise the first row of a packed linear to the dtype and device of ``like``."""
    weight = linear.packed
    if weight.codes.dtype == torch.uint8:  # in another order a row is not a slice
        weight = PackedWeight(weight.codes[:1], weight.block_scale[:1], weight.global_scale)
    return linear.fmt.dequantize(weight, like.dtype)[0].to(like.device)


def _size(linear: FrozenLinear) -> int:
    return linear.codes.nbytes + linear.block_scale.nbytes


def _factors(layer: Any, count: int) -> Sequence[Tensor | None]:
    """Return the tensor scales of a layer's NVFP4 weights that vLLM has read, as the reciprocals that checkpoints of
    compressed-tensors store: [n] fp32 for each of the ``count`` linear layers that are fused in the layer, or None for
    each if vLLM has no such scales. n is 1, except for the first linear layer of a gated delta net: it computes
    queries, keys and values, for which vLLM holds three scales that should be equal."""
    divisors = getattr(layer, "weight_global_scale", None)
    if divisors is None or divisors.numel() < count:
        return [None] * count
    return divisors.detach().flatten().split([divisors.numel() - count + 1, *[1] * (count - 1)])


def _is_same_scale(weight: PackedWeight, divisor: Tensor | None) -> bool:
    return divisor is None or bool((divisor == scale_divisor(weight.global_scale).item()).all())


def _is_same(weight: PackedWeight, codes: Tensor, block_scale: Tensor) -> bool:
    weight = native.row_order(weight)
    device = weight.codes.device  # a GPU, if there is one, where comparing is faster
    same_codes = torch.equal(weight.codes, codes.to(device))
    return same_codes and torch.equal(weight.block_scale, block_scale.to(device))
