"""LoRA kernels for vLLM's CUDA platform, which are used if vLLM has only one adapter slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.library import Library
from vllm.config.lora import LoRAConfig
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.utils.torch_utils import async_tensor_h2d, direct_register_custom_op

from qerl_pl.kernels import lora, lora_experts

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # torch unregisters a Library's operators when the Library object is deleted


class OneAdapterKernels(PunicaWrapperGPU):  # pyright: ignore[reportGeneralTypeIssues]  # vLLM calls it final
    """LoRA kernels for vLLM on CUDA with one adapter slot: y += x A^T B^T, by ``kernels.lora`` for linear layers and,
    in forward passes of few tokens, by ``kernels.lora_experts`` for experts.

    A tensor with an index per token tells the kernels which tokens use the adapter, so one CUDA graph serves requests
    with and without the adapter. If no token of a pass uses it, no LoRA kernel is launched for linear layers.
    """

    def update_metadata(
        self, mapping: LoRAMapping, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: object
    ) -> None:
        """Write the adapter index of each token of the next forward passes to the GPU, given the adapter id of each
        token (``mapping``; 0 or less for none) and the adapter id in each slot.

        vLLM's class also sorts and counts the tokens by adapter on the GPU and reads the results back. Whenever a
        sequence ends, the host would then wait for the GPU to finish a step, and afterwards the GPU for the host.
        """
        ids = np.asarray(mapping.index_mapping, dtype=np.int64)
        indices = np.full(len(ids), -1)
        for adapter in {*ids[ids > 0].tolist()}:
            indices[ids == adapter] = lora_index_to_id.index(adapter)
        async_tensor_h2d(indices, out=self._token_lora_indices[: len(ids)])
        self.token_mapping_meta.no_lora_flag_cpu.fill_(not (ids > 0).any())
        if self.with_experts:
            self.token_mapping_meta.token_lora_mapping[: len(ids)].copy_(self._token_lora_indices[: len(ids)])

    with_experts = False
    """Whether there are adapters on experts. In passes of many tokens, vLLM's own kernels compute these adapters, and
    read the adapter index of each token in int32."""

    def prepare_for_experts(self) -> None:
        """Set, once, the metadata that vLLM's LoRA kernels for experts read besides the adapter index of each token."""
        self.with_experts, meta = True, self.token_mapping_meta
        meta.token_lora_mapping.fill_(-1)
        meta.active_lora_ids.copy_(torch.tensor([0, -1]))

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise NotImplementedError for adapters of other layers, such as embeddings: their kernels need metadata that
        only vLLM's own class writes."""
        raise NotImplementedError(
            "these adapter kernels are for linears and experts; vLLM's are used if max_loras is above 1"
        )

    add_shrink = add_expand = add_lora_embedding = add_lora_logits = refuse  # pyright: ignore[reportAssignmentType]

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: object,
    ) -> None:
        """Add the output of a linear layer's LoRA adapter of rank R to y [T, N] in place, for x [T, K]. Each of the
        layers that are fused into it has A [1, 1, R, K] and, for its n outputs, B [1, 1, n, R], which includes LoRA's
        scaling, so ``scale`` must be 1."""
        assert scale == 1, scale
        torch.ops.qerl_pl.add_lora(y, x, slots(lora_a_stacked), slots(lora_b_stacked), *self.tokens)

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        *rest: Any,
        add_inputs: bool = True,
        token_lora_mapping: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Add the output of the LoRA adapters of the experts' gate and up to y [T, k, N] or [T k, N] in place, for x
        [T, K] and the k experts of each token, ``topk_ids`` [T, k]. Gate and up have one A [1, E, R, K] and one B [1,
        E, n, R] each, for E experts and rank R. For many tokens, and in cases that ``kernels.lora_experts`` does not
        support, vLLM's own method does this.

        Returns four values, which vLLM passes on to ``add_lora_w2``: those of vLLM's method, which describe the tokens
        sorted by expert; or, if vLLM's method was not called, None, the experts' ids [T k], None and the adapter index
        of each token.
        """
        sorts = expert_map is not None or self.lora_config.fully_sharded_loras or not add_inputs
        if sorts or not lora_experts.is_faster(topk_ids, lora_a_stacked[0][0]):
            operands = y, x, lora_a_stacked, lora_b_stacked, topk_ids, topk_weights, expert_map, *rest
            return super().add_lora_w13(*operands, add_inputs=add_inputs, token_lora_mapping=token_lora_mapping)
        _w1, _w2, _num_tokens, _k, _max_loras, enabled, *_ = rest
        self._add_lora_to_experts(y, x, lora_a_stacked, lora_b_stacked, enabled, topk_ids.contiguous())
        return None, topk_ids.flatten(), None, token_lora_mapping

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        *rest: Any,
        add_inputs: bool = True,
    ) -> None:
        """Add the output of the LoRA adapters of the experts' down, times ``topk_weights`` [T, k], to y [T, k, N] in
        place, for x [T k, K]. A is [1, E, R, K] and B [1, E, N, R], for E experts and rank R; ``rest`` begins with the
        four values that ``add_lora_w13`` has returned."""
        sorted_rows, ids, _, _, _num_tokens, _w1, _w2, _k, _max_loras, enabled, *_ = rest
        if sorted_rows is not None or not add_inputs or not lora_experts.is_faster(ids, lora_a_stacked[0][0]):
            super().add_lora_w2(y, x, lora_a_stacked, lora_b_stacked, topk_weights, *rest, add_inputs=add_inputs)
        else:
            rest = enabled, ids.view(topk_weights.shape), topk_weights.contiguous()
            self._add_lora_to_experts(y, x, lora_a_stacked, lora_b_stacked, *rest)

    def _add_lora_to_experts(self, y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], *rest: Any) -> None:
        indices, no_lora = self.tokens
        if not no_lora.item():
            matrices = [matrix[0] for matrix in a], [matrix[0] for matrix in b]
            lora_experts.add_lora(y.view(-1, y.shape[-1]), x, *matrices, indices, *rest)

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Tensors that say which tokens use the adapter: the adapter index of each token, int64, -1 for none, with an
        entry for each of the most tokens that a pass can have; and a flag, [1] bool on the host, True if no token uses
        it."""
        return self._token_lora_indices, self.token_mapping_meta.no_lora_flag_cpu


def add_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], indices: Tensor, no_lora: Tensor) -> None:
    """Add the output of a linear layer's LoRA adapter to y in place: a custom operator, which torch.compile does not
    trace. ``a`` and ``b`` are views of the adapter's slot, made by the caller in compiled code, because that is faster.
    ``no_lora``, True if no token has the adapter, is a tensor, because a bool would become a constant of the compiled
    graph."""
    if not no_lora.item():
        lora.add_lora(y, x, a, b, indices)


direct_register_custom_op("add_lora", add_lora, mutates_args=["y"], fake_impl=lambda *_: None, target_lib=_LIBRARY)


def compile_kernels(a: Sequence[Tensor], b: Sequence[Tensor], fewest: int = 1) -> None:
    """Compile the Triton kernels that a linear layer's adapter may need in forward passes of ``fewest`` tokens or more.
    This takes seconds, so it is done before rollouts, for several layers in different threads."""
    if len(a) > lora.MOST_SLICES:  # ``lora.add_lora`` splits more slices than MOST_SLICES in the same way
        compile_kernels(a[: lora.MOST_SLICES], b[: lora.MOST_SLICES], fewest)
        compile_kernels(a[lora.MOST_SLICES :], b[lora.MOST_SLICES :], fewest)
        return
    first, second = slots(a), slots(b)
    (rank, K), widths = first[0].shape, tuple(map(len, second))
    if lora.is_matmul_faster(first[0][:1], first):
        return
    with torch.accelerator.device_index(first[0].device.index):  # a new thread's current device is the first GPU
        for num_tokens in lora.token_counts(K, widths, rank, fewest=fewest):
            # One row in memory stands for all tokens.
            x, y = (first[0].new_zeros(1, size).expand(num_tokens, -1) for size in (K, sum(widths)))
            lora.add_lora(y, x, first, second, torch.full((num_tokens,), -1, device=x.device))


def adapter_kernels(
    max_num_batched_tokens: int, max_batches: int, device: torch.device, *, lora_config: LoRAConfig
) -> PunicaWrapperGPU:
    """Create the object with which vLLM computes LoRA adapters on CUDA: ``OneAdapterKernels`` if vLLM has a single
    adapter slot, else an object of vLLM's own class. vLLM imports this function by its name (``patches``)."""
    if lora_config.max_loras != 1:
        return PunicaWrapperGPU(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
    kernels = OneAdapterKernels(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
    if "experts" in (lora_config.target_modules or ()):
        kernels.prepare_for_experts()
    return kernels


def slots(stacked: Sequence[Tensor]) -> list[Tensor]:
    """Return the LoRA matrices of a linear's only adapter slot, one for each slice of its outputs."""
    return [matrix.view(matrix.shape[2:]) for matrix in stacked]
