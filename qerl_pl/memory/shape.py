"""Dimensions of a model and bytes of its weights, determined without loading weights: from the headers of a
checkpoint's files, from config.json, or only from the model's name."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from qerl_pl import native
from qerl_pl.base.folder import BaseFormat, base_folder
from qerl_pl.base.prepared import check_format
from qerl_pl.common.files import searched
from qerl_pl.model.family import FAMILIES
from qerl_pl.model.files import CONFIG, Checkpoint, has_vision, read_json
from qerl_pl.model.hub import hub_config, is_hub_name
from qerl_pl.model.known_models import known_config, known_format
from qerl_pl.model.layers import head_dims, layer_configs, num_recurrent_layers
from qerl_pl.model.quantization import Quantization
from qerl_pl.quant.declared import declared_layout, is_weight_only, quantises_cache, quantization_config
from qerl_pl.quant.experts import OF_EXPERT, Routing
from qerl_pl.quant.experts import mixtures as mixtures_of
from qerl_pl.quant.families import check_family, longest_with_short_factors
from qerl_pl.quant.formats import Format
from qerl_pl.quant.layouts import MODELOPT_NVFP4, WRITERS
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import empty_model, meta_model
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.selection import fused_groups, is_ignored


class Recurrent(NamedTuple):
    """Sizes of layers with a recurrent state (Qwen3.5's gated delta nets); all are 0 without such layers."""

    num_layers: int = 0
    """Number of such layers."""
    conv_width: int = 0
    """Elements of a token's queries, keys and values together, which pass through a convolution over tokens."""
    conv_tokens: int = 0
    """Number of earlier tokens that the convolution reads for each token."""
    query_width: int = 0
    """Number of value heads times the dimension of a query; queries and keys are repeated for the value heads."""
    value_width: int = 0
    """Number of value heads times the dimension of a value."""
    state_values: int = 0
    """Values of a sequence's state in one layer, in fp32."""


class ExpertSizes(NamedTuple):
    """Sizes of the mixture-of-experts (MoE) layers of a model; all are 0 for a dense model."""

    num: int = 0
    """Number of experts of a block, E."""
    chosen: int = 0
    """Number of experts that compute each token, k."""
    inner: int = 0
    """Inner size of an expert."""
    layers: int = 0
    """Number of blocks with an MoE layer."""
    shared: int = 0
    """Inner size of the expert that computes every token; 0 without any."""

    @property
    def route_bytes(self) -> int:
        """Number of bytes per token with which training stores which experts computed the token."""
        return self.layers * self.chosen * Routing(self.layers, self.num, self.chosen).dtype.itemsize


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder model, and the bytes of its weights on a GPU in trainer and engine."""

    num_layers: int
    hidden: int
    inner: int
    """I, inner size of the dense MLPs or, if all blocks have experts instead, of the shared experts."""
    experts: ExpertSizes
    """Sizes of the MoE layers, which some or all blocks have in place of an MLP."""
    vocabulary: int
    num_heads: int
    query_width: int
    """Number of query heads times the dimension of a head."""
    key_width: int
    """Number of key heads times the dimension of a head."""
    head_norms: bool
    """Whether queries and keys are normalised (Qwen3, OLMo 3, Gemma 3)."""
    block_norms: int
    """Number of norms per block, not counting norms of queries and keys."""
    fusable: bool
    """Whether ``policy.elementwise`` can replace norms, rotary embeddings and MLPs of this model by fused kernels."""
    trained_norms: int
    """Number of norms per block that ``train_norms`` trains."""
    last_linear: str
    """Name of the last linear layer of a block (e.g. ``down_proj``), whose output is not needed for backward."""
    linears: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]
    """Number of blocks of each kind, and the name, number of outputs N and number of inputs K of each linear layer in
    such a block that LoRA may adapt."""
    linear_bytes: int
    """Bytes of the trainer's linear layers except the language-model head."""
    engine_linear_bytes: int
    """Bytes of vLLM's linear layers except the language-model head; those that vLLM holds dequantised count as
    dense."""
    engine_packed_bytes: int
    """Bytes of vLLM's 4-bit linear layers, included in ``engine_linear_bytes``."""
    fitting_bytes: int
    """Bytes of vLLM's 4-bit weights that this project's NVFP4 kernels can read from the trainer's memory, so that vLLM
    needs no copy; included in ``engine_packed_bytes``."""
    unfit: tuple[str, ...]
    """NVFP4 linear layers of the decoder blocks, some of them fused by vLLM, that this project's kernels do not
    support: name and size N x K, e.g. ``o_proj (896 x 1000)``, listed once for all blocks. For these layers, vLLM has
    its own copy of the weights."""
    embedding_bytes: int
    """Bytes of the input embedding and, unless the two are tied, of the head."""
    other_bytes: int
    """Bytes of norms, biases and convolutions."""
    largest_packed: int
    """Number of weights of the largest 4-bit linear layer, where one projection (such as gate) of all experts of a
    block counts as one layer; 0 for a model without 4-bit weights."""
    recurrent: Recurrent
    """Layers without attention."""
    positions: int | None
    """Most tokens of a prompt and completion together that the model supports; None if config.json does not say."""
    short_positions: int | None
    """Most tokens with which LongRoPE uses its short factors; None without LongRoPE."""

    @property
    def num_key_heads(self) -> int:
        """Number of key heads of attention, which is also the number of value heads."""
        return self.key_width * self.num_heads // self.query_width

    @property
    def base_bytes(self) -> int:
        """Bytes of the whole base."""
        return self.linear_bytes + self.embedding_bytes + self.other_bytes


def config_shape(config: PretrainedConfig, fmt: Format | None, dtype: torch.dtype) -> ModelShape:
    """Compute the dimensions of a model from its configuration, if all linear layers but the language-model head have
    the 4-bit format ``fmt`` (None: they are dense), and all other weights have the dtype ``dtype``."""
    return _shape(empty_model(config, dtype), fmt, lambda name: not FAMILIES[config.model_type].stays_dense(name))


def checkpoint_shape(
    path: str | Path, dtype: torch.dtype, fmt: Format | None = None, ignore: Sequence[str] = ()
) -> ModelShape:
    """Compute the dimensions of the model in a checkpoint folder from config.json and the headers of its safetensors
    files.

    If the folder has no weights, all linear layers except the language-model head are assumed to have the format that
    config.json names.

    Args:
        path: the folder.
        dtype: dtype of all weights except those in 4 bits.
        fmt: 4-bit format to which a dense checkpoint will be quantised, except the linear layers in ``ignore`` (names,
            or "re:PATTERN"); None: it stays dense.

    Raises:
        ValueError: the folder holds no supported model, or its quantisation is not supported.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; expected a Hugging Face checkpoint folder (model.base)")
    short = longest_with_short_factors(check_family(path))
    layout = declared_layout(path)
    model = meta_model(path, dtype)
    family = FAMILIES[model.config.model_type]
    if layout is None:
        return _shape(model, fmt, lambda name: not (is_ignored(name, ignore) or family.stays_dense(name)), short)
    shares = not _is_read_as_modelopt(path)
    if not any(path.glob("*.safetensors")):
        return _shape(model, layout.fmt, lambda name: not family.stays_dense(name), short, shares_experts=shares)
    marked = set(Checkpoint(path).names())
    return _shape(model, layout.fmt, lambda name: name + layout.marker in marked, short, shares_experts=shares)


def _is_read_as_modelopt(path: Path) -> bool:
    """Return whether trainer and vLLM read a checkpoint in the layout of ModelOpt, in which vLLM's experts cannot use
    the trainer's weights. Other checkpoints by ModelOpt are converted to the layout of compressed-tensors."""
    config = quantization_config(path) or {}
    as_it_is = is_weight_only(config) and not quantises_cache(config) and not has_vision(read_json(path / CONFIG))
    return as_it_is and declared_layout(path) is MODELOPT_NVFP4


def planned_shape(
    base: str, base_format: BaseFormat | None, quantization: Quantization | None, dtype: torch.dtype
) -> ModelShape:
    """Find the dimensions of the base model that the settings ``model.base``, ``base_format`` and ``quantize``
    describe, without downloading weights: from its folder, a built-in list of known models, or config.json on the hub.
    Raises ValueError if the model is in none of these places, or a run cannot use it."""
    check_format(base, base_format, quantization)
    name = base_format or (quantization and quantization.format)
    fmt = WRITERS[name].fmt if name else None
    ignore = quantization.ignore if quantization else ()
    for folder in (base_folder(base, base_format, must_exist=False), base):
        if Path(folder).is_dir():
            return checkpoint_shape(folder, dtype, fmt, ignore)
    if (known := known_config(base)) is not None:
        name = name or known_format(base)
        return config_shape(AutoConfig.for_model(**known), WRITERS[name].fmt if name else None, dtype)
    if is_hub_name(base):
        return checkpoint_shape(hub_config(base), dtype, fmt, ignore)
    raise ValueError(
        f"model.base: there is no folder {searched(base)}, and no known model of this name; give a folder with "
        "config.json or a model's name on the hub (OWNER/MODEL)"
    )


def _shape(
    model: PreTrainedModel,
    fmt: Format | None,
    is_packed: Callable[[str], bool],
    short_positions: int | None = None,
    *,
    shares_experts: bool = True,
) -> ModelShape:
    config, head = model.config, model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linears = {name: module for name, module in linears.items() if module is not head}
    packed: dict[str, FrozenLinear] = {}
    if fmt is not None:
        frozen = cache(partial(FrozenLinear, fmt=fmt, device="meta"))  # thousands of experts have one size
        packed = {
            name: frozen(module.in_features, module.out_features) for name, module in linears.items() if is_packed(name)
        }
    family = FAMILIES[config.model_type]

    def held(name: str, tensor: torch.Tensor) -> int:
        return (tensor.float() if family.in_fp32(name) else tensor).nbytes

    packed_bytes = sum(buffer.nbytes for linear in packed.values() for buffer in linear.buffers())
    dense = {name: held(f"{name}.weight", linear.weight) for name, linear in linears.items()}
    linear_bytes = packed_bytes + sum(dense[name] for name in dense.keys() - packed.keys())
    embeddings = [model.get_input_embeddings(), *([] if config.tie_word_embeddings else [head])]
    heads = config.num_attention_heads
    widths, per_layer = head_dims(config), layer_configs(config)
    mixtures = mixtures_of(model)
    sizes = zip(*(mixture.sizes for mixture in mixtures), strict=True)
    shared = family.experts.shared_inner(config) if family.experts else 0
    experts = ExpertSizes(*map(max, sizes), layers=len(mixtures), shared=shared)
    outside = {name: linear for name, linear in packed.items() if not OF_EXPERT.fullmatch(name)}
    stacked = experts.num * experts.inner * config.hidden_size if len(outside) < len(packed) else 0
    on_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    unpacked = is_unpacked(fmt, on_gpu=True, on_blackwell=on_blackwell)
    fitting_bytes, unfit = _native_part(packed, shares_experts=shares_experts) if fmt is NVFP4 else (0, ())
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size if len(mixtures) < config.num_hidden_layers else experts.shared,
        experts=experts,
        vocabulary=config.vocab_size,
        num_heads=heads,
        query_width=heads * max(widths),
        key_width=max(layer.num_key_value_heads * dim for layer, dim in zip(per_layer, widths, strict=True)),
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        block_norms=sum(name.endswith("norm") for name, _ in model.get_submodule("model.layers.0").named_children()),
        fusable=len(family.elementwise) == 3,
        trained_norms=len(family.noise_norms),
        last_linear=family.last_linear,
        linears=_linears_of_blocks(model.get_submodule("model.layers"), family.projections),
        linear_bytes=linear_bytes,
        engine_linear_bytes=sum(dense.values()) if unpacked else linear_bytes,
        engine_packed_bytes=0 if unpacked else packed_bytes,
        fitting_bytes=fitting_bytes,
        unfit=unfit,
        embedding_bytes=sum(module.get_parameter("weight").nbytes for module in embeddings),
        other_bytes=sum(held(name, tensor) for name, tensor in model.state_dict().items() if tensor.ndim != 2),
        largest_packed=max((stacked, *(linears[name].weight.numel() for name in packed))),
        recurrent=_recurrent(config),
        positions=getattr(config, "max_position_embeddings", None),
        short_positions=short_positions,
    )


def is_unpacked(fmt: Format | None, *, on_gpu: bool, on_blackwell: bool) -> bool:
    """Return whether vLLM 0.32 holds weights of the format ``fmt`` (None: not quantised) dequantised, because it has no
    kernels that multiply 16-bit activations by them. This holds for NF4, for MXFP4 on a CPU, and for MXFP4 on Blackwell
    GPUs, where vLLM's MXFP4 kernels would quantise activations, too."""
    return fmt is NF4 or (fmt is MXFP4 and (on_blackwell or not on_gpu))


def _recurrent(config: PretrainedConfig) -> Recurrent:
    if not (num_layers := num_recurrent_layers(config)):
        return Recurrent()
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return Recurrent(
        num_layers=num_layers,
        conv_width=2 * config.linear_num_key_heads * key + heads * value,
        conv_tokens=config.linear_conv_kernel_dim - 1,
        query_width=heads * key,
        value_width=heads * value,
        state_values=heads * key * value,
    )


def _linears_of_blocks(
    blocks: nn.Module, names: Collection[str]
) -> tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]:
    kinds = Counter(
        tuple(
            (leaf, module.out_features, module.in_features)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and (leaf := name.rpartition(".")[2]) in names
        )
        for block in blocks.children()
    )
    return tuple((number, linears) for linears, number in kinds.items())


def _native_part(packed: Mapping[str, FrozenLinear], *, shares_experts: bool) -> tuple[int, tuple[str, ...]]:
    """Compute ``ModelShape.fitting_bytes`` and ``unfit`` of 4-bit NVFP4 linear layers. ``shares_experts`` says whether
    vLLM's experts can use the trainer's weights."""
    linears = {name: linear for name, linear in packed.items() if not OF_EXPERT.fullmatch(name)}
    shares = shares_experts and native.is_installed()
    experts = [packed[name] for name in packed.keys() - linears.keys()] if shares else []
    fitting, unfit = experts, {}
    for names in fused_groups(list(linears), present=linears.keys()).values():
        group = [linears[name] for name in names]
        if native.fits([(linear.out_features, linear.in_features) for linear in group]):
            fitting += group
        else:
            fused = "+".join(name.rpartition(".")[2] for name in names)
            sizes = f"{sum(linear.out_features for linear in group)} x {group[0].in_features}"
            unfit[f"{fused} ({sizes})"] = None
    return sum(linear.codes.nbytes + linear.block_scale.nbytes for linear in fitting), tuple(unfit)
