"""What vLLM's CUDA platform lacks: adapters at a small price, where there is one adapter and not many.

Only vLLM and ``plugin`` import this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import Library
from vllm.config.lora import LoRAConfig
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import lora

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # operators live as long as it does


class OneAdapterKernels(PunicaWrapperGPU):  # pyright: ignore[reportGeneralTypeIssues]  # vLLM calls it final
    """y += x A^T B^T by our kernels for one adapter slot; what else vLLM's class can do is as it was.

    Rows are told apart by vLLM's index of each token, which it writes before every forward pass, so one CUDA graph
    serves requests with the adapter and without it. vLLM has graphs of its own for passes without any adapter, and
    ``no_lora`` keeps our kernels out of these.
    """

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
        """y: [T, N] in place; x: [T, K]; A and B: one [1, 1, R, K] and [1, 1, n, R] for each slice of N."""
        assert scale == 1, scale  # LoRA's scaling is in B
        torch.ops.qerl_pl.add_lora(y, x, lora_a_stacked, lora_b_stacked, *self.tokens)

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """[max T] int64, -1 for a token without the adapter; [1] bool on the host, True if that is every token."""
        return self._token_lora_indices, self.token_mapping_meta.no_lora_flag_cpu


def add_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], indices: Tensor, no_lora: Tensor) -> None:
    """``qerl_pl.kernels.lora.add_lora`` as an operator, which torch.compile does not look into.

    ``no_lora`` is a tensor because a flag would become a constant of the compiled graph.
    """
    if not no_lora.item():
        lora.add_lora(y, x, slots(a), slots(b), indices)


direct_register_custom_op("add_lora", add_lora, mutates_args=["y"], fake_impl=lambda *_: None, target_lib=_LIBRARY)


def compile_kernels(a: Sequence[Tensor], b: Sequence[Tensor], fewest: int = 1) -> None:
    """Compile what a linear may need, which would otherwise stop a rollout for seconds.

    Args:
        a: one [1, 1, R, K] for each slice.
        b: one [1, 1, n, R] for each slice.
        fewest: tokens for which these kernels are used; any number from there on.
    """
    first, second = slots(a), slots(b)
    (rank, K), widths = first[0].shape, [len(matrix) for matrix in second]
    if lora.is_matmul_faster(first[0][:1], first):
        return
    for num_tokens in lora.token_counts(K, widths, rank, fewest=fewest):
        x, y = first[0].new_zeros(num_tokens, K), first[0].new_zeros(num_tokens, sum(widths))
        lora.add_lora(y, x, first, second, torch.full((num_tokens,), -1, device=x.device))


def adapter_kernels(
    max_num_batched_tokens: int, max_batches: int, device: torch.device, *, lora_config: LoRAConfig
) -> PunicaWrapperGPU:
    """vLLM's adapter kernels: ours for one adapter slot, its own for more."""
    if lora_config.max_loras > 1:
        return PunicaWrapperGPU(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
    return OneAdapterKernels(max_num_batched_tokens, max_batches, device, lora_config=lora_config)


def slots(stacked: Sequence[Tensor]) -> list[Tensor]:
    """The matrices of vLLM's one adapter slot."""
    return [matrix[0, 0] for matrix in stacked]
