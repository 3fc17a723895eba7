"""Compute the loss of solutions over packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import Qwen2ForCausalLM

from qerl_pl.policy.elementwise import fused_wanted, liger_elementwise, use_elementwise
from qerl_pl.policy.packing import Packed, packed_hidden_states, use_packed_attention
from qerl_pl.pretraining.batches import Rows


def prepare(model: Qwen2ForCausalLM, device: torch.device) -> None:
    """Make a model process packed rows, on a GPU with liger-kernel's fused element-wise kernels if it is installed."""
    use_packed_attention(model)
    if device.type == "cuda" and fused_wanted("auto"):
        use_elementwise(model, liger_elementwise())


def token_losses(model: Qwen2ForCausalLM, rows: Rows, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the cross-entropy of each token of the solutions, [N] fp32 in nats.

    Args:
        model: model that ``prepare`` has prepared.
        rows: prompts with solutions.
        device: device of the model.
        dtype: of matrix products and activations; None: bf16 on a GPU, fp32 on a CPU.
    """
    logits = _solution_logits(model, rows, device, dtype)
    return F.cross_entropy(logits.float(), _on(device, rows.wanted).long(), reduction="none")


@torch.no_grad()
def mean_loss(model: Qwen2ForCausalLM, batches: Sequence[Rows], device: torch.device) -> float:
    """Compute the mean cross-entropy over all tokens of the solutions, in nats."""
    model.eval()
    return torch.cat([token_losses(model, rows, device) for rows in batches]).mean().item()


def _solution_logits(
    model: Qwen2ForCausalLM, rows: Rows, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the logits [N, V] that predict the tokens of the solutions.

    In bf16 they are computed with rounded weights, through which gradients reach the fp32 weights. With autocast the
    residual stream and the norms would stay in fp32, which takes twice the memory traffic.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    of_decoder = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    tokens, positions = (_on(device, part).long() for part in (rows.tokens, rows.positions))
    packed = Packed(tokens, positions, _on(device, rows.starts), int(np.diff(rows.starts).max()))

    def decoder(**inputs: Any) -> Any:
        return functional_call(model.model, of_decoder, (), inputs)

    hidden = packed_hidden_states(decoder, packed)
    return F.linear(hidden.index_select(0, _on(device, rows.before)), weights["lm_head.weight"])


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    """Copy an array to a device without waiting for the kernels that the device still has to run."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
