"""The product of a linear with a LoRA adapter, the definition that tests compare ``policy.lora_product`` with."""

from torch import Tensor

from qerl_pl.policy.lora_product import Dense


def lora_product_reference(
    x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor:
    """Compute ``lora_product`` by plain operations, as its definition."""
    y = x @ dense(x.dtype).t() + (x @ a.to(x.dtype).t()) @ (scaling * b).to(x.dtype).t()
    return y if bias is None else y + bias
