"""What of a model decides the memory of a run: its dimensions and the bytes of its weights, without any weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qerl_pl.base.family import FAMILIES
from qerl_pl.quant.families import check_family
from qerl_pl.quant.files import Checkpoint
from qerl_pl.quant.formats import Format
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import meta_model
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.published import declared_layout


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder, and the bytes of its base on a device. Letters: L blocks, H hidden, I inner, V words."""

    num_layers: int
    hidden: int
    inner: int
    vocabulary: int
    num_heads: int
    query_width: int
    """Heads times the dimension of a head."""
    key_width: int
    """Key heads times the dimension of a head."""
    head_norms: bool
    """Queries and keys are normalised a head (Qwen3)."""
    trained_norms: int
    """Norms of a block that ``train_norms`` trains."""
    last_linear: str
    """Name of the linear of a block whose result nothing asks for in backward."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, N and K of each linear of one block."""
    linear_bytes: int
    """Weights of every linear but the head, packed ones as ``FrozenLinear`` allocates them."""
    engine_linear_bytes: int
    """The same in vLLM, which holds linears in a format that it has no kernels for (NF4) dense."""
    engine_packed_bytes: int
    """Of those, what it holds packed, whatever its compute dtype."""
    embedding_bytes: int
    """Input embedding and, if it is not tied to it, the head."""
    other_bytes: int
    """Norms and biases."""
    largest_packed: int
    """Weights of the largest packed linear; 0 on a dense base."""

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_width * self.num_heads // self.query_width

    @property
    def base_bytes(self) -> int:
        """The whole base."""
        return self.linear_bytes + self.embedding_bytes + self.other_bytes


def config_shape(config: PretrainedConfig, fmt: Format | None, dtype: torch.dtype) -> ModelShape:
    """Of a model that exists as a configuration alone.

    Args:
        config: of transformers.
        fmt: of every linear but the head; None: dense.
        dtype: of everything that is not packed.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return _shape(model, fmt, lambda name: True)


def checkpoint_shape(path: str | Path, dtype: torch.dtype) -> ModelShape:
    """Of a checkpoint folder, from config.json and the heads of its safetensors files.

    A folder that has no weights yet is taken to hold every linear but the head in the format that config.json names.

    Raises:
        ValueError: the folder is no model, or is quantised in a way that we do not read.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; expected a Hugging Face checkpoint folder (model.base)")
    check_family(path)
    layout = declared_layout(path)
    model = meta_model(path, dtype)
    if layout is None or not any(path.glob("*.safetensors")):
        return _shape(model, layout and layout.fmt, lambda name: True)
    marked = set(Checkpoint(path).names())
    return _shape(model, layout.fmt, lambda name: name + layout.marker in marked)


def _shape(model: PreTrainedModel, fmt: Format | None, is_packed: Callable[[str], bool]) -> ModelShape:
    config, head = model.config, model.get_output_embeddings()
    linear_bytes = dense_bytes = packed_bytes = largest_packed = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is head:
            continue
        dense_bytes += module.weight.nbytes
        if fmt is not None and is_packed(name):
            packed = FrozenLinear(module.in_features, module.out_features, fmt, device="meta")
            packed_bytes += sum(buffer.nbytes for buffer in packed.buffers())
            largest_packed = max(largest_packed, module.weight.numel())
        else:
            linear_bytes += module.weight.nbytes
    linear_bytes += packed_bytes
    block = {
        name.rpartition(".")[2]: module
        for name, module in model.get_submodule("model.layers.0").named_modules()
        if isinstance(module, nn.Linear)
    }
    embeddings = [model.get_input_embeddings(), *([] if config.tie_word_embeddings else [head])]
    embedding_bytes = sum(module.get_parameter("weight").nbytes for module in embeddings)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    family = FAMILIES[config.model_type]
    other_bytes = sum(p.nbytes for name, p in model.named_parameters() if p.ndim == 1)
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        num_heads=config.num_attention_heads,
        query_width=config.num_attention_heads * head_dim,
        key_width=config.num_key_value_heads * head_dim,
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        trained_norms=len(family.noise_norms),
        last_linear=family.last_linear,
        linears=tuple((name, linear.out_features, linear.in_features) for name, linear in block.items()),
        linear_bytes=linear_bytes,
        engine_linear_bytes=dense_bytes if fmt is NF4 else linear_bytes,
        engine_packed_bytes=0 if fmt is NF4 else packed_bytes,
        embedding_bytes=embedding_bytes,
        other_bytes=other_bytes,
        largest_packed=largest_packed,
    )
