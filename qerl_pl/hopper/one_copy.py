"""Let trainer and vLLM use one copy of the 4-bit weights of the base model's linear layers, on GPUs where the CUDA
kernels of this project compute vLLM's linear layers. (``native_experts`` does the same for the experts of MoE layers.)

The copy is in the trainer's memory, outside vLLM's pool, so the engine cannot free or move it when it sleeps, closes,
fails to start or starts again. Before vLLM loads its model, the trainer's weights are rearranged to the layout that the
kernels read (``tile_order``). vLLM does not read these weights from the checkpoint. Just before it would convert a
layer's weight to the kernels' layout, the layer gets a copy of the trainer's weight in the layout of checkpoints
(``give``). After the conversion, if the layer's weight and the trainer's have the same bits, the layer uses the
trainer's memory and the copy is freed (``adopt``).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from qerl_pl.common.checks import CheckFailed
from qerl_pl.hopper import native_experts
from qerl_pl.hopper.tile_order import fits, fused, is_in_tile_order, to_row_order, whole_of
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.selection import fused_groups
from qerl_pl.rollout.vllm.base_weights import expert_layers, fused_experts, fused_linears, packed_codes

Linears = Mapping[str, FrozenLinear]  # the trainer's packed linears by name


class Adopted(NamedTuple):
    """Value of the attribute ``adopted``, which marks linear layers of vLLM that use the trainer's memory."""

    digest: Tensor  # [2] int64, ``digest_of`` the linear when it was loaded

    def holds(self, layer: Any, parts: Sequence[FrozenLinear]) -> Tensor:
        """Return, as a tensor [] bool, whether a linear layer of vLLM still uses the memory of the trainer's layers
        ``parts`` that are fused in it, and the checksums of its weights, computed again, equal those taken when the
        model was loaded."""
        whole = whole_of([part.packed for part in parts])
        is_shared = whole is not None and whole.codes.data_ptr() == layer.weight.data_ptr()
        return (digest_of(layer) == self.digest).all() & is_shared


def digest_of(layer: Any) -> Tensor:
    """Compute a digest of a linear layer's weights, [2] int64: the sum of its codes and the sum of its scales' bits."""
    weight, scales = layer.weight.detach(), layer.weight_scale.detach().view(torch.uint8)
    return torch.stack([weight.sum(dtype=torch.int64), scales.sum(dtype=torch.int64)])


def put_in_tile_order(linears: Linears) -> None:
    """Rearrange the trainer's NVFP4 weights, in place, to tile order, where the kernels support a layer's shape.
    Weights that vLLM fuses, such as those of q, k and v, become views of one buffer. A second call changes nothing."""
    for group in fused_groups(list(linears), present=linears.keys()).values():
        parts = [linears[name] for name in group]
        weights = [part.packed for part in parts]
        takes = fits([(part.out_features, part.in_features) for part in parts])
        if takes and all(part.fmt is NVFP4 for part in parts) and whole_of(weights) is None:
            rows = [to_row_order(weight) if is_in_tile_order(weight) else weight for weight in weights]
            for part, weight in zip(parts, fused(rows), strict=True):
                part.packed = weight
    if torch.cuda.is_available():
        # Release the memory of the replaced weights to vLLM, whose memory pool cannot use what torch keeps cached.
        torch.cuda.empty_cache()


def unread(model: nn.Module, linears: Linears) -> dict[str, list[str]]:
    """Return the names of the linear layers and experts of vLLM's model whose codes and block scales vLLM need not read
    from the checkpoint, because the trainer has them in GPU memory, each with the names of the trainer's layers that
    are fused in it."""
    found = {
        name: members
        for name, _, members, parts in fused_linears(model, linears)
        if whole_of([part.packed for part in parts]) is not None
    }
    if parents := native_experts.unread(model, linears):
        for name, _, members, _ in fused_experts(model, linears):
            if members[0].rsplit(".", 2)[0] in parents:
                found[name] = members
    return found


def lend(model: nn.Module, linears: Linears, *, unread: Collection[str] = ()) -> None:
    """Store, in each linear layer of vLLM, a reference to the trainer's weight, or None if the trainer's weight is not
    in the layout of the CUDA kernels; ``give`` and ``adopt`` use the reference later. ``unread`` has the names of
    layers whose weights vLLM has not read from the checkpoint: their parameters become placeholders, which take no
    memory, on the device of the trainer's weights, so that vLLM has nothing to copy to the GPU. The experts of MoE
    layers are treated in the same way."""
    for name, layer, _, parts in fused_linears(model, linears):
        layer.trainers_weight = whole = whole_of([part.packed for part in parts])
        if name in unread and whole is not None:
            layer.is_empty = True
            for parameter in (packed_codes(layer), layer.weight_scale):
                device = whole.codes.device
                parameter.data = native_experts.placeholder(parameter.shape, parameter.dtype, device)
    native_experts.lend(model, linears, unread=unread)


def give(layer: Any) -> None:
    """Fill the weight of a linear layer of vLLM, if vLLM has not read it from the checkpoint, with a copy of the
    trainer's weight; otherwise change nothing. Called just before vLLM converts the layer's weight from the layout of
    checkpoints to that of the CUDA kernels, so the copy is in the layout of checkpoints."""
    if vars(layer).pop("is_empty", False):
        rows = to_row_order(layer.trainers_weight)
        codes, scales = packed_codes(layer), layer.weight_scale
        codes.data, scales.data = rows.codes, rows.block_scale.view(scales.dtype)


def adopt(layer: Any) -> bool:
    """Make a linear layer of vLLM use the trainer's memory for its weight, and free its copy in vLLM. Called after vLLM
    has converted the weight to the layout of the CUDA kernels, which is also that of the trainer's weight. Returns
    True; or False, without a change, if ``lend`` has stored no weight of the trainer in the layer, or if the bits of
    vLLM's weight and the trainer's differ."""
    lent = vars(layer).pop("trainers_weight", None)
    if lent is None:
        return False
    weight, scales = layer.weight, layer.weight_scale
    if (weight.dtype, weight.device) != (lent.codes.dtype, lent.codes.device) or scales.element_size() != 1:
        return False
    if not (torch.equal(weight, lent.codes) and torch.equal(scales.view(torch.uint8), lent.block_scale)):
        return False
    weight.data, scales.data = lent.codes, lent.block_scale.view(scales.dtype)
    layer.adopted = Adopted(digest_of(layer))
    return True


def loaded(model: nn.Module, linears: Linears, device: torch.device, *, one_adapter: bool) -> None:
    """Complete a model whose weights vLLM has loaded and converted: move parameters to the GPU, and let the kernel of
    each linear layer prefetch the next layer's weight. If vLLM has only one adapter slot (``one_adapter``), the kernel
    of gate and up adds the adapter itself, so it can also compute silu(gate) * up. With several slots, vLLM adds
    adapters to that kernel's output, so silu(gate) * up is computed afterwards."""
    place(model, linears, device)
    tell_next_weights(model)
    if one_adapter:
        move_activations(model)


def place(model: nn.Module, linears: Linears, device: torch.device) -> None:
    """Move the parameters that vLLM has left in host memory to the GPU.

    vLLM creates weights in host memory (``patches.packed_weights_on_host``), converts them on the GPU, and then moves a
    parameter back to host memory if the conversion has kept its name. Parameters of layers that share the trainer's
    memory are set to that memory again. Raises CheckFailed if vLLM has not read a layer's weight from the checkpoint
    and ``give`` has not copied the trainer's weight to it.
    """
    for name, layer, _, parts in fused_linears(model, linears):
        if hasattr(layer, "is_empty"):
            raise CheckFailed(
                f"vLLM has converted {name} with a kernel that is not this project's, before the linear had its "
                "weights; set decoding_kernel to 'humming'"
            )
        weight = whole_of([part.packed for part in parts]) if hasattr(layer, "adopted") else None
        if weight is not None:
            layer.weight.data = weight.codes
            layer.weight_scale.data = weight.block_scale.view(layer.weight_scale.dtype)
    for name, layer in expert_layers(model):
        if hasattr(layer, "trainers_experts"):
            raise CheckFailed(f"vLLM has not converted the experts of {name}, which have no weights of their own")
    for layer in model.modules():
        if isinstance(layer, LinearBase | RoutedExperts):  # also those that do not consist of the trainer's
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.to(device)


def tell_next_weights(model: nn.Module) -> None:
    """Give each linear layer that the CUDA kernels compute a reference to the weight of the next, to prefetch."""
    linears: list[Any] = [module for module in model.modules() if hasattr(module, "native")]
    for linear, following in pairwise(linears):
        linear.native = linear.native._replace(next_weight=following.weight)


def move_activations(model: nn.Module) -> None:
    """Let the kernel of each fused gate and up also compute silu(gate) * up, and replace vLLM's activation layer by the
    identity."""
    for mlp in model.modules():
        linear: Any = getattr(mlp, "gate_up_proj", None)
        if hasattr(linear, "native") and linear.bias is None and type(getattr(mlp, "act_fn", None)) is SiluAndMul:
            linear.native = linear.native._replace(gated=True)
            mlp.act_fn = nn.Identity()
