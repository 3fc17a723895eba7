"""Norms, rotary embeddings and SwiGLU as one fused kernel each for forward and backward, from the library liger-kernel.

transformers computes each of these operations as a chain of element-wise kernels, whose intermediate results autograd
keeps. The kernels of liger-kernel round the same intermediate results, keep fewer tensors for backward, and work in
place where possible: rotary embeddings overwrite queries and keys, and SwiGLU's backward overwrites its inputs with
their gradients. Linear layers that read the same input, such as q_proj, k_proj and v_proj, are computed by one node of
the autograd graph (``apply_linears``).
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl_pl.common.packages import not_installed
from qerl_pl.model.family import FAMILIES
from qerl_pl.policy.kept import active
from qerl_pl.policy.lora import apply_linears

FusedSetting = Literal["auto"] | bool
"""Values of ``model.fused_elementwise`` in the YAML file."""
PACKAGE = "liger_kernel"


class Elementwise(NamedTuple):
    """Element-wise operations of a decoder block."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """RMSNorm of x [..., H] with a weight [H] and an epsilon. The normalised x is rounded to x's dtype before it is
    multiplied by the weight; the result is [..., H] in x's dtype."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Rotary embedding of T tokens: queries [1, heads, T, D] and keys [1, key heads, T, D] are rotated by cosines and
    sines [1, T, D]; the function may overwrite queries and keys."""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """SwiGLU: silu(gate) * up, each [..., I]; its backward may overwrite gate and up."""


def liger_elementwise() -> Elementwise:
    """Return liger-kernel's operations, which need a GPU."""
    from liger_kernel.transformers.functional import liger_rms_norm, liger_rope, liger_swiglu  # pyright: ignore[reportMissingImports]

    # liger-kernel's norm is not used in place, because its backward would then overwrite the incoming gradient, which
    # other operations may also read.
    return Elementwise(partial(liger_rms_norm, in_place=False), liger_rope, liger_swiglu)


def fused_wanted(setting: FusedSetting) -> bool:
    """Return whether ``model.fused_elementwise`` means that liger-kernel is used on a GPU. Raises ValueError if the
    setting is true and liger-kernel is not installed."""
    installed = find_spec(PACKAGE) is not None
    if setting is True and not installed:
        raise ValueError(f"model.fused_elementwise is true and {not_installed(PACKAGE)}, or say auto")
    return installed if setting == "auto" else bool(setting)


def use_elementwise(model: PreTrainedModel, operations: Elementwise) -> None:
    """Make the norms, MLPs and attention modules of a model use the given RMSNorm, SwiGLU and rotary embedding, by
    replacing the ``forward`` of each module object; the classes of transformers stay as they are.

    Some modules keep transformers' forward: the kinds of module that ``Family.elementwise`` does not list, because they
    compute another function in this model family; MLPs with an activation other than SiLU; and attention while a KV
    cache is in use (sampling).
    """
    parts = FAMILIES[model.config.model_type].elementwise
    for module in model.modules():
        known: Any = module
        if "norms" in parts and type(module).__name__.endswith("RMSNorm"):
            known.forward = partial(_norm, known, operations)
        elif "mlp" in parts and hasattr(module, "gate_proj") and isinstance(known.act_fn, (nn.SiLU, SiLUActivation)):
            known.forward = partial(_mlp, known, operations)
        elif "attention" in parts and hasattr(module, "q_proj") and hasattr(module, "o_proj"):
            known.forward = partial(_attention, known, operations, known.forward)


def _norm(module: Any, operations: Elementwise, hidden_states: Tensor) -> Tensor:
    return operations.rms_norm(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: Any, operations: Elementwise, x: Tensor) -> Tensor:
    return module.down_proj(operations.swiglu(*apply_linears(x, [module.gate_proj, module.up_proj])))


def _attention(
    module: Any,
    operations: Elementwise,
    plain: Callable[..., tuple[Tensor, None]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as Llama, Mistral, Granite, Qwen2 and Qwen3 do in transformers, with a fused rotary embedding.
    With a KV cache, the module's original forward ``plain`` is called."""
    if past_key_values is not None:
        return plain(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    projections = apply_linears(hidden_states, [module.q_proj, module.k_proj, module.v_proj])
    queries, keys, values = (projected.view(shape) for projected in projections)
    values = values.transpose(1, 2)
    if hasattr(module, "q_norm"):
        queries, keys = module.q_norm(queries), module.k_norm(keys)
    unrotated = queries.transpose(1, 2), keys.transpose(1, 2)
    rotate = partial(operations.rotate, *unrotated, *position_embeddings)
    kept = active()
    # When backward recomputes a block with selective checkpointing, the rotation must not run again: the stored outputs
    # of q_proj and k_proj may have been rotated in place already. Rotated queries and keys are not needed in the
    # recomputation, because the output of attention is stored as well.
    queries, keys = rotate() if kept is None else kept.unread(rotate, unrotated)
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    output, _ = attend(
        module,
        queries,
        keys,
        values,
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", getattr(module.config, "sliding_window", None)),
        **kwargs,
    )
    return module.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), None
