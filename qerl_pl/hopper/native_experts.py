"""Let vLLM compute the experts of mixture-of-experts (MoE) layers from the trainer's NVFP4 weights, by the kernels of
``grouped_nvfp4``, so that vLLM needs no copy of these weights.

The trainer stores the weights of one linear layer (gate, up or down) of all experts of a block as one stacked tensor,
in the layout of checkpoints (``quant.experts.StackedLinear``). ``lend`` gives these tensors to vLLM's MoE layers after
vLLM has read the checkpoint. When vLLM then wants to convert a layer's weights for its own kernels, ``install``
replaces the kernels and frees vLLM's weights.

Letters: T tokens, k experts per token, S = T k rows, E experts, H hidden size, I inner size of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe import modular_kernel as modular
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import make_nvfp4_moe_kernel
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as with_nvfp4,
)

from qerl_pl.quant.experts import PARTS
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.vllm.base_weights import bit_sums, expert_layers

MATRICES = "w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"
"""Names of vLLM's parameters for codes and block scales of experts, before vLLM converts them."""


class Stacks(NamedTuple):
    """NVFP4 weights of all experts of a block; the tensor scales of each linear layer are [E] fp32."""

    gate: PackedWeight
    """[E, I, H]"""
    up: PackedWeight
    """[E, I, H]"""
    down: PackedWeight
    """[E, H, I]"""

    @property
    def digest(self) -> Tensor:
        """Checksums of the weights of E experts, [6 E] int64: for gate, up and down, E of codes, then E of block scales
        (``bit_sums``)."""
        return bit_sums(tensor for stack in self for tensor in (stack.codes, stack.block_scale))


class Adopted(NamedTuple):
    """Value of the attribute ``adopted``, which marks experts in vLLM that use the trainer's memory."""

    stacks: Stacks
    """The weights that the kernel reads."""
    digest: Tensor
    """[6 E] int64, their digest when the model was loaded."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and block scales, which vLLM does not have a second time."""
        return sum(stack.codes.nbytes + stack.block_scale.nbytes for stack in self.stacks)

    def holds(self, linears: Sequence[FrozenLinear]) -> Tensor:
        """Return, as a tensor [] bool, whether the kernel of this MoE layer still reads the trainer's memory, and the
        checksums of its weights, computed again, equal those taken when the model was loaded. ``linears`` are gate, up
        and down of the trainer's first expert; their addresses, at which the memory of all experts starts, are compared
        with the kernel's."""
        firsts = zip(self.stacks, linears, strict=True)
        is_shared = all(stack.codes.data_ptr() == linear.codes.data_ptr() for stack, linear in firsts)
        return (self.stacks.digest == self.digest).all() & is_shared


class NativeExperts(LoRAExpertsMixin, modular.FusedMoEExpertsModular):
    """Class with which vLLM computes experts from NVFP4 weights in the trainer's layout. vLLM's kernels or, with one
    adapter slot, ``OneAdapterKernels`` add LoRA adapters."""

    stacks: Stacks
    """The weights; ``install`` sets them. vLLM's arguments ``w1`` and ``w2`` only tell shapes."""

    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: False)
    _supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
    _supports_activation = staticmethod(lambda activation: activation == MoEActivation.SILU)
    _supports_parallel_config = staticmethod(lambda moe_parallel_config: not moe_parallel_config.use_ep)

    @staticmethod
    def activation_format() -> modular.FusedMoEActivationFormat:
        """Tell vLLM that ``apply`` takes inputs [T, H] in the order of the tokens, not sorted by expert."""
        return modular.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> modular.TopKWeightAndReduce:
        """Tell vLLM that ``apply`` itself multiplies the experts' outputs by their weights and adds them up."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, *_: object
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Tell vLLM the shapes of two scratch tensors and of the output that ``apply`` needs, for M tokens, N outputs
        of gate and up together, K inputs (the hidden size), and ``topk`` experts per token. The first scratch tensor
        holds SwiGLU's product; vLLM lets the output overlap with it. The second holds the outputs of gate and up, and
        later those of down."""
        rows = M * topk
        return (rows, max(N // 2, K)), (rows * max(N, K),), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: modular.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write to ``output`` [T, H] for T tokens ``hidden_states`` [T, H] the sum of the outputs of the experts
        ``topk_ids`` [T, k], weighted by ``topk_weights`` [T, k] fp32."""
        from qerl_pl.hopper.grouped_nvfp4 import find_rows, multiply  # Triton's kernels, which only a run needs

        gate, up, down = self.stacks
        (tokens, chosen), inner, hidden = topk_ids.shape, gate.codes.shape[1], hidden_states.shape[1]
        size, scratch = tokens * chosen, workspace2.flatten()
        ids, shares = topk_ids.contiguous(), topk_weights.float().contiguous()
        rows = find_rows(ids, len(gate.codes))
        both = scratch[: size * 2 * inner].view(size, 2 * inner)
        multiply(hidden_states, [gate, up], rows, out=both)
        lora: dict[str, Any] = {"topk_weights": shares, "w1": w1, "w2": w2, "num_tokens": tokens, "top_k_num": chosen}
        adapters, found = self._lora_context, (None,) * 4
        if adapters is not None:
            found = self.apply_w13_lora(adapters, y=both, x=hidden_states, topk_ids=ids, expert_map=expert_map, **lora)
        gated = workspace13.flatten()[: size * inner].view(size, inner)
        self.activation(activation, gated, both)
        out = scratch[: size * hidden].view(size, hidden)
        multiply(gated, [down], rows, shares, out=out)
        out = out.view(tokens, chosen, hidden)
        if adapters is not None:
            names = "sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping"
            self.apply_w2_lora(adapters, y=out, x=gated, **lora, **dict(zip(names, found, strict=True)))
        torch.sum(out, dim=1, out=output)


def stack_of(linears: Sequence[FrozenLinear]) -> PackedWeight | None:
    """Return the weights of one linear layer of all experts as one stacked weight in the memory of ``linears``, the
    trainer's layers in the order of the experts; None if they are not in NVFP4, or do not follow each other in
    memory."""
    codes = _stacked([linear.codes for linear in linears])
    scales = _stacked([linear.block_scale for linear in linears])
    if codes is None or scales is None or any(linear.fmt is not NVFP4 for linear in linears):
        return None
    return PackedWeight(codes, scales, torch.stack([linear.packed.global_scale for linear in linears]).float())


def lent_layers(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> Iterator[tuple[str, Any, Stacks]]:
    """Yield the MoE layers of vLLM's model that can use the trainer's weights: the trainer's name of the experts'
    module, vLLM's layer, and the weights."""
    for parent, layer in expert_layers(model):
        names = [[f"{parent}.{expert}.{part}" for expert in range(layer.moe_config.num_experts)] for part in PARTS]
        if is_supported(layer) and all(name in linears for group in names for name in group):
            stacks = [stack_of([linears[name] for name in group]) for group in names]
            if all(stack is not None and stack.codes.is_cuda for stack in stacks):
                yield parent, layer, Stacks._make(stacks)


def is_supported(layer: RoutedExperts) -> bool:
    """Return whether ``NativeExperts`` can compute an MoE layer: it has the format of compressed-tensors, NVFP4
    weights, 16-bit activations and SwiGLU, and is not divided among GPUs."""
    method, config = layer.quant_method, layer.moe_config
    if type(method) is not with_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod:
        return False
    alone = config.num_local_experts == config.num_experts and config.moe_parallel_config.tp_size == 1
    gated = config.is_act_and_mul and config.activation == MoEActivation.SILU and config.swiglu_limit is None
    return alone and gated and method.use_a16 and layer.params_dtype == torch.bfloat16


def unread(model: nn.Module, linears: Mapping[str, FrozenLinear]) -> set[str]:
    """Return the trainer's names of the modules whose experts vLLM need not read from the checkpoint."""
    return {parent for parent, _, _ in lent_layers(model, linears)}


def lend(model: nn.Module, linears: Mapping[str, FrozenLinear], *, unread: Collection[str]) -> None:
    """Store a reference to the trainer's weights, for ``install``, in each MoE layer whose experts vLLM has not read
    from the checkpoint; ``unread`` has the names of these experts' linear layers, as in ``Fused.name``. The layer's
    parameters become placeholders on the GPU that take no memory, so that vLLM has nothing to copy to the GPU."""
    for parent, layer, stacks in lent_layers(model, linears):
        if f"{parent}.0.down_proj" in unread:
            layer.trainers_experts = stacks
            for parameter in map(layer.get_parameter, MATRICES):
                parameter.data = placeholder(parameter.shape, parameter.dtype, stacks.gate.codes.device)


def install(method: Any, layer: Any) -> bool:
    """Replace vLLM's kernel for the experts of an MoE layer by ``NativeExperts``, and free the weights that vLLM has
    allocated; called in place of vLLM's conversion of the weights. Returns False, and changes nothing, if ``lend`` has
    given the layer no weights; vLLM then converts its own.

    The trainer's tensors become parameters of the layer, so that ``rollout.vllm.memory.free`` drops these references
    when the engine ends, as it does for linear layers.
    """
    stacks: Stacks | None = vars(layer).pop("trainers_experts", None)
    if stacks is None:
        return False
    for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
        delattr(layer, name)
    stacks = Stacks._make(
        PackedWeight(*(nn.Parameter(tensor, requires_grad=False) for tensor in vars(stack).values()))
        for stack in stacks
    )
    for part, stack in zip(PARTS, stacks, strict=True):
        for kind, tensor in vars(stack).items():
            layer.register_parameter(f"{part}_{kind}", tensor)
    experts, inner, half = stacks.gate.codes.shape
    for name, shape in {"w13_weight": (experts, 2 * inner, half), "w2_weight": stacks.down.codes.shape}.items():
        only_shape = placeholder(shape, stacks.gate.codes.dtype, stacks.gate.codes.device)
        layer.register_parameter(name, nn.Parameter(only_shape, requires_grad=False))
    method.experts_cls, method.moe_quant_config = NativeExperts, FUSED_MOE_UNQUANTIZED_CONFIG
    method.moe_kernel = make_nvfp4_moe_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=method.moe,
        experts_cls=NativeExperts,
        backend=method.nvfp4_backend,
        routing_tables=layer._expert_routing_tables(),
    )
    experts_of_kernel: Any = method.moe_kernel.fused_experts
    experts_of_kernel.stacks = stacks
    layer.adopted = Adopted(stacks, stacks.digest)
    return True


def _stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """View tensors of one shape and dtype that follow each other in memory as one stacked tensor; None if they do
    not."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        place = first.data_ptr() + number * first.nbytes
        if (tensor.shape, tensor.dtype, tensor.data_ptr()) != (first.shape, first.dtype, place):
            return None
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose elements share the memory of one, for parameters of vLLM that are not read."""
    return torch.empty(1, dtype=dtype, device=device).expand(shape)
