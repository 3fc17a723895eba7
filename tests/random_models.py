"""Frozen models with the shapes of Qwen2.5 and Qwen3-MoE and random weights, and parts of such models. They serve
measurements, because speed and memory do not depend on the weights."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from qerl_pl.memory.settings import RunMemory
from qerl_pl.model.family import FAMILIES
from qerl_pl.quant.experts import StackedLinear, stack_experts
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import empty_model, fill_computed_buffers
from qerl_pl.quant.nvfp4 import NVFP4
from tests.packed import frozen_linear


class Size(NamedTuple):
    """Dimensions of a Qwen2.5 model."""

    hidden: int
    inner: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    vocabulary: int
    tied: bool = False


SIZES = {
    "tiny": Size(128, 256, 2, 4, 2, 320, tied=True),  # for a CPU
    "0.5B": Size(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5B": Size(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3B": Size(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7B": Size(3584, 18944, 28, 28, 4, 152064),
    "14B": Size(5120, 13824, 48, 40, 8, 152064),
    "32B": Size(5120, 27648, 64, 40, 8, 152064),
    "72B": Size(8192, 29568, 80, 64, 8, 152064),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "tiny-A": {  # for a CPU
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 320,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}
"""Dimensions of mixtures of experts, Qwen3-MoE, by size."""
MODELS = (*SIZES, *MIXTURES)
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


def run_of(itemsize: int, **settings: Any) -> RunMemory:
    """Make the memory settings of a run, for formulas that do not depend on its prompts and completions."""
    return RunMemory(rows=1, prompt_tokens=1, completion_tokens=1, itemsize=itemsize, **settings)


def model_config(name: str, *, num_layers: int | None = None) -> PretrainedConfig:
    """Make the configuration of one of ``MODELS``; ``num_layers`` replaces the number of blocks."""
    if name in MIXTURES:
        config = Qwen3MoeConfig(**MIXTURES[name], norm_topk_prob=True, tie_word_embeddings=False)
        config.num_hidden_layers = num_layers or config.num_hidden_layers
        return config
    size = SIZES[name]
    return Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=num_layers or size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_heads,
        vocab_size=size.vocabulary,
        tie_word_embeddings=size.tied,
    )


def fused_shape(name: str, fused: str) -> tuple[tuple[int, ...], int]:
    """Return the numbers of outputs of the parts of a fused linear layer (e.g. of q, k and v), and its number of
    inputs."""
    widths, inputs = zip(*(linear_shapes(name)[part] for part in FUSED[fused]), strict=True)
    return widths, inputs[0]


def linear_shapes(name: str) -> dict[str, tuple[int, int]]:
    """Return the shapes (out, in) of the linear layers of one block, by name."""
    size = SIZES[name]
    hidden, inner, keys = size.hidden, size.inner, size.hidden // size.num_heads * size.num_key_heads
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def random_weight(rows: int, cols: int, device: str) -> PackedWeight:
    """Draw an NVFP4 weight with a standard deviation of about 0.02. The scales of its blocks differ by factors of up to
    14."""
    codes = torch.randint(256, (rows, cols // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0x60, 0x7F, (rows, cols // 16), dtype=torch.uint8, device=device)
    return PackedWeight(codes, scale, torch.tensor(4e-5, dtype=torch.float64, device=device))


def stays_dense(model: PreTrainedModel, linear: str) -> bool:
    """Return whether a linear layer of a model, given by its full name, stays dense in 4-bit bases, as the output
    matrix and routers do."""
    return linear == "lm_head" or FAMILIES[model.config.model_type].stays_dense(linear)


def pack_linears(model: PreTrainedModel, dtype: torch.dtype, device: str) -> None:
    """Replace the linear layers of a model, except for output matrix and routers, by random NVFP4 ones. A layer with a
    bias gets a bias of 0 with dtype ``dtype``."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not stays_dense(model, name):
            bias = None if module.bias is None else torch.zeros(module.out_features, dtype=dtype, device=device)
            weight = random_weight(module.out_features, module.in_features, device)
            model.set_submodule(name, frozen_linear(weight, bias))


def random_model(config: PretrainedConfig, fmt: Format | None, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Make a frozen random model whose linear layers are in NVFP4, or dense if ``fmt`` is None. The output matrix is
    always dense."""
    assert fmt in (None, NVFP4)
    model = empty_model(config, dtype)
    if fmt:
        pack_linears(model, dtype, device)
    for name, module in model.named_modules():
        for leaf, meta in list(module.named_parameters(recurse=False)):
            if name == "lm_head" and config.tie_word_embeddings:
                continue
            value = torch.empty(meta.shape, dtype=dtype, device=device)
            value = value.fill_(1.0) if "norm" in name else value.normal_(std=0.02)
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    stack_experts(model)
    model.tie_weights()
    fill_computed_buffers(model, device)
    return model.requires_grad_(False)


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Make a frozen linear layer that holds these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta").requires_grad_(False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def densify(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Replace packed linear layers by dense ones with the same weights, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FrozenLinear):
            model.set_submodule(name, dense_linear(module.dense(dtype), module.bias))
        elif isinstance(module, StackedLinear):
            model.set_submodule(name, StackedLinear([dense_linear(weight) for weight in module.dense(dtype)]))
    return model


def fixed_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """Draw random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
