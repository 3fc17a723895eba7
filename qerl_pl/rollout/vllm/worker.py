"""Functions that run inside vLLM's worker and read or write its adapter slots and norm weights in place.

vLLM keeps every LoRA adapter in preallocated tensors (slots), padded with zeros, from which its kernels read. Here an
adapter is copied into these slots; since addresses do not change, CUDA graphs stay valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qerl_pl.common.checks import CheckFailed
from qerl_pl.model.family import FAMILIES
from qerl_pl.noise.norm_noise import is_noise_norm
from qerl_pl.policy.lora_experts import stacked
from qerl_pl.policy.lora_product import scaled
from qerl_pl.rollout.common import PEFT_PREFIX

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.worker_base import WorkerBase

ADAPTER_ID = 1
A_WEIGHT, B_WEIGHT = ".lora_A.weight", ".lora_B.weight"


class Slot(NamedTuple):
    """Adapter slot of vLLM: tensors with the LoRA adapter of one linear layer, or of one linear layer (such as down) of
    all E experts. The layer has K inputs and n outputs; R is the adapter's rank, rounded up to the next rank that vLLM
    supports."""

    a: Tensor  # [R, K] or [E, R, K], LoRA's matrix A; rows from the adapter's rank on are 0
    b: Tensor  # [n, R] or [E, n, R], n rows of the matrix B times LoRA's scaling; columns from the rank on are 0
    first: int = 0
    """Index, in the adapter's whole matrix B, of the row that is first in ``b``. It may differ from 0 where vLLM has
    several slots for one adapter of the trainer: for queries, keys and values of delta nets, and for gate and up of
    experts."""

    def views(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """View A and n rows of B, given in PEFT's shapes, in the shapes of the slot's tensors."""
        return (a, b) if self.a.ndim == 2 else stacked(a, b, len(self.a))

    def held(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the slot's A and B in PEFT's shapes, without the padding of the rank."""
        a, b = self.a[..., :rank, :], self.b[..., :rank]
        return (a, b) if a.ndim == 2 else (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))


def reserve_adapter(worker: WorkerBase, request: LoRARequest) -> None:
    """Make vLLM treat the adapter of a LoRA request as loaded, in slots filled with 0, into which ``write_adapter``
    copies. The LoRA model that is registered has no matrices, whereas vLLM's own ``add_dummy_lora`` would copy zeros
    from pinned memory."""
    from vllm.lora.lora_model import LoRAModel

    manager, index = _manager(worker)._adapter_manager, request.adapter_id
    manager._registered_adapters[index] = LoRAModel(index, rank=1, loras={})
    manager.activate_adapter(index)
    for enabled in _flags(worker).values():
        enabled.fill_(1)  # vLLM sets the flag to 0 for an adapter without matrices


def compile_adapter_kernels(worker: WorkerBase) -> None:
    """Compile the Triton kernels that rollouts need for the adapters of linear layers, for each set of shapes of A and
    B in a thread of its own."""
    from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, compile_kernels

    linears = {}
    for module in _manager(worker)._adapter_manager.modules.values():
        if isinstance(module.punica_wrapper, OneAdapterKernels) and not hasattr(module, "adapter_enabled"):
            a, b = module.lora_a_stacked, module.lora_b_stacked
            # for fewer than ``fewest`` tokens, the native GEMM of this linear adds the adapter itself
            native = getattr(module.base_layer, "native", None)
            fewest = native.fewest_unfused(module) if native else 1
            # Kernels depend on the shapes only, so one linear of each set of shapes is kept.
            linears[(fewest, *(matrix.shape for matrix in (*a, *b)))] = a, b, fewest
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_kernels, *zip(*linears.values(), strict=True)))


@torch.no_grad()
def write_adapter(worker: WorkerBase, adapter: Mapping[str, Tensor], scaling: float) -> None:
    """Copy an adapter, given as tensors by PEFT's names, into vLLM's adapter slots. The matrix B of each linear layer's
    adapter is multiplied by LoRA's ``scaling`` in fp32 and then rounded to the compute dtype, as in the trainer."""
    slots = _slots(worker)
    for name in [name for name in adapter if name.endswith(A_WEIGHT)]:
        linear = name.removesuffix(A_WEIGHT)
        for slot in slots[linear]:
            rows = adapter[linear + B_WEIGHT][slot.first : slot.first + slot.b.shape[-2]]
            a, b = slot.views(adapter[name], rows)
            slot.a[..., : a.shape[-2], :].copy_(a)
            slot.b[..., : a.shape[-2]].copy_(scaled(b, scaling, slot.b.dtype))


def read_adapter(worker: WorkerBase, rank: int, expert_rank: int) -> dict[str, Tensor]:
    """Return the matrices in vLLM's adapter slots by PEFT's names, without the padding of the rank. Raises CheckFailed
    if slots that should hold the same matrix differ, or if a flag of vLLM turns the adapters of experts off."""
    if off := [name for name, enabled in _flags(worker).items() if not enabled.all()]:
        raise CheckFailed(
            f"the rollout engine computes {len(off)} of the model's mixtures of experts without their adapters "
            f"(adapter_enabled is 0): {', '.join(off[:4])}"
        )
    adapter = {}
    for linear, slots in _slots(worker).items():
        a, parts = slots[0].a, {slot.first: slot for slot in reversed(slots)}
        if any(not (torch.equal(slot.a, a) and torch.equal(slot.b, parts[slot.first].b)) for slot in slots[1:]):
            raise CheckFailed(f"vLLM holds different adapters in the {len(slots)} slots of {linear}")
        held = [parts[first].held(rank if a.ndim == 2 else expert_rank) for first in sorted(parts)]
        adapter[linear + A_WEIGHT] = held[0][0]
        adapter[linear + B_WEIGHT] = torch.cat([b for _, b in held])
    return adapter


def live_norms(worker: WorkerBase) -> dict[str, Tensor]:
    """Return, by name, the weights of those norms of vLLM's model that get noise; writing to them changes the model."""
    norms = FAMILIES[worker.model_config.hf_text_config.model_type].noise_norms
    return {name: weight.data for name, weight in worker.get_model().named_parameters() if is_noise_norm(name, norms)}


def linear_kernels(worker: WorkerBase) -> dict[str, int]:
    """Count the linear layers and mixture-of-experts layers of vLLM's model by the name of the class that computes
    them; layers of the class ``NativeLinear`` whose shapes this project's kernels do not support count as
    "NativeLinear, dequantised".
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    counts: Counter[str] = Counter()
    for module in worker.get_model().modules():
        if isinstance(module, LinearBase):
            # linears in formats other than compressed-tensors have no ``scheme``
            scheme = getattr(module, "scheme", module.quant_method)
            name = type(getattr(scheme, "kernel", scheme)).__name__
            counts[f"{name}, dequantised" if name == "NativeLinear" and not hasattr(module, "native") else name] += 1
        elif isinstance(module, RoutedExperts):
            # with adapters on experts, vLLM wraps the object that knows the kernel's class
            method = module.quant_method
            kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            counts[getattr(method, "experts_cls", type(kernel or method)).__name__] += 1
    return dict(counts)


def samples_by_keyed_noise(worker: WorkerBase) -> bool:
    """Return whether vLLM samples tokens with Gumbel noise that is a hash of the request's seed (``policy.margins``),
    as its model runner V2 does."""
    return type(worker.model_runner).__module__ == "vllm.v1.worker.gpu.model_runner"


def _manager(worker: WorkerBase) -> WorkerLoRAManager:
    # Both classes of vLLM's model runner have ``lora_manager``, but WorkerBase declares no type for ``model_runner``.
    return worker.model_runner.lora_manager  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


def _flags(worker: WorkerBase) -> dict[str, Tensor]:
    """Return, by the layer's name, the flag [1] of each mixture-of-experts layer with adapter slots; vLLM's kernels add
    the policy's adapter to a layer only if its flag is not 0."""
    manager = _manager(worker)._adapter_manager
    index = manager.lora_index_to_id.index(ADAPTER_ID)
    modules = manager.modules.items()
    return {name: m.adapter_enabled[index : index + 1] for name, m in modules if hasattr(m, "adapter_enabled")}


def _slots(worker: WorkerBase) -> dict[str, list[Slot]]:
    """Return, for each module that has LoRA matrices A and B, the tensors of vLLM that hold copies of them; keys are
    the modules' names in PEFT. A linear layer usually has one ``Slot``. It has two if its outputs serve as both keys
    and values of attention, and three if it computes queries, keys and values of a gated delta net. The experts of a
    layer have one for the gate, one for the up and one for the down projection."""
    manager = _manager(worker)._adapter_manager
    index = manager.lora_index_to_id.index(ADAPTER_ID)
    config = worker.model_config.hf_text_config
    # numbers of the blocks that have no v_proj and use their attention keys as values
    kinds = config.layer_types if FAMILIES[config.model_type].keys_as_values and config.attention_k_eq_v else ()
    keys_only = {str(number) for number, kind in enumerate(kinds) if kind == "full_attention"}
    slots: dict[str, list[Slot]] = {}
    for name, module in manager.modules.items():
        if hasattr(module, "adapter_enabled"):
            gate_up = zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
            slots[f"{PEFT_PREFIX}{name}.base_layer"] = [
                Slot(a[index], b[index], number * b.shape[2]) for number, (a, b) in enumerate(gate_up)
            ]
            slots[PEFT_PREFIX + name] = [Slot(module.w2_lora_a_stacked[0][index], module.w2_lora_b_stacked[0][index])]
            continue
        # each linear that vLLM has fused into this one, such as q_proj, has a slot
        parts = manager.packed_modules.get(name, [name])
        slices = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        # number of slices of the first part; all other parts have one slice each
        several = len(module.lora_b_stacked) - len(parts) + 1
        for number, part in enumerate(parts):
            block, _, leaf = part.partition(".self_attn.")
            if leaf == "v_proj" and block.rpartition(".")[2] in keys_only:
                part = f"{block}.self_attn.k_proj"
            first = 0
            for a, b in islice(slices, 1 if number else several):
                slots.setdefault(PEFT_PREFIX + part, []).append(Slot(a[index, 0], b[index, 0], first))
                first += b.shape[2]
    return slots
