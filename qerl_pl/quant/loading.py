"""Load a checkpoint folder as a frozen causal language model, tensor by tensor, without ever holding a dense copy of a
quantised model.

Linear layers whose weights the checkpoint stores in 4 bits become ``FrozenLinear``. They are recognised by the names of
their stored tensors, so the ``ignore`` list of the quantisation config need not be read.
"""

import re
from collections.abc import Collection, Mapping
from itertools import groupby
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from qerl_pl.model.family import FAMILIES, family_of
from qerl_pl.model.files import CONFIG, Checkpoint, has_vision, model_config, read_json
from qerl_pl.model.layers import block_of
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.experts import check_alike, separate_experts, stack_experts
from qerl_pl.quant.formats import Format
from qerl_pl.quant.layouts import Layout, Part, check_table
from qerl_pl.quant.linear import FrozenLinear

OBSOLETE = r"rotary_emb\.inv_freq$"  # in old Llama checkpoints; transformers computes it now


def load_base(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Load the frozen base model of a policy from a folder, in evaluation mode and without trainable parameters.
    ``dtype`` is the dtype of all parameters except 4-bit weights and those that the model family keeps in fp32
    (``Family.fp32``). Every tensor is moved to ``device`` when it is read. Raises ValueError if the quantisation is not
    supported, or if tensors do not fit the model that config.json describes."""
    checkpoint = Checkpoint(path)
    layout = read_layout(checkpoint.path)
    model = meta_model(checkpoint.path, dtype)
    if layout is not None:
        _swap_packed_linears(model, checkpoint, layout, device)
    places, family = _match(model, checkpoint, layout), family_of(model.config.model_type, path=path)
    if layout is not None:
        for name in checkpoint.names():
            check_table(layout, checkpoint, name)
    for block, names in groupby(places, key=block_of):
        for name in names:
            module, part = places[name]
            kept = torch.float32 if family.in_fp32(f"{module}.{part.buffer}") else dtype
            _fill(model.get_submodule(module), part, checkpoint.read(name), name=name, dtype=kept, device=device)
        if family.experts is not None and block is not None:
            stack_experts(model.get_submodule(block))
    _tie(model, checkpoint.path)
    fill_computed_buffers(model, device)
    if (checkpoint.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    return model.requires_grad_(False).eval()


def meta_model(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Create the causal language model that config.json describes on the meta device, that is, without data. All of its
    linear layers, those of experts included, are ordinary ones, even if the checkpoint is quantised."""
    if has_vision(read_json(path / CONFIG)):
        text = model_config(path)
        config = CONFIG_MAPPING[text["model_type"]].from_dict(dict(text))
    else:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    vars(config).pop("quantization_config", None)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and not 0 <= pad < config.vocab_size:
        config.pad_token_id = None  # nn.Embedding refuses a token that it does not have; no row is padded with this one
    return empty_model(config, dtype or config.dtype)


def empty_model(config: PretrainedConfig, dtype: torch.dtype | str | None) -> PreTrainedModel:
    """Create a causal language model on the meta device, with experts' linear layers as separate modules."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    names = FAMILIES[config.model_type].experts if config.model_type in FAMILIES else None
    if names is not None:
        separate_experts(model, config, names, model.dtype)
    return model


def _swap_packed_linears(
    model: PreTrainedModel, checkpoint: Checkpoint, layout: Layout, device: torch.device | str
) -> None:
    stores_tensor_scale = any(part.buffer == "global_scale_bits" for part in layout.parts.values())
    for name, linear in list(model.named_modules()):
        if name + layout.marker not in checkpoint:
            continue
        if not isinstance(linear, nn.Linear):
            kind = type(linear).__name__
            raise ValueError(f"{checkpoint.path} holds {name} in 4 bits; expected a linear, the model has a {kind}")
        if name.endswith(".mlp.gate"):
            raise ValueError(f"{checkpoint.path} holds the router {name} in 4 bits; expected 16, as engines read it")
        bias, dtype = linear.bias is not None, model.dtype
        packed = FrozenLinear(
            linear.in_features, linear.out_features, layout.fmt, bias=bias, dtype=dtype, device="meta"
        )
        if not stores_tensor_scale:
            packed.global_scale_bits = torch.ones((), dtype=torch.float64, device=device).view(torch.int64)
        model.set_submodule(name, packed)
    check_alike({name for name, module in model.named_modules() if isinstance(module, FrozenLinear)}, model)


def _match(model: PreTrainedModel, checkpoint: Checkpoint, layout: Layout | None) -> dict[str, tuple[str, Part]]:
    """Return for each tensor of the checkpoint, by its name, which attribute of which module of the model it fills: the
    module's name, and a ``Part`` with the attribute and the conversion of the tensor. Raises ValueError if a tensor
    belongs to no attribute, or if a parameter or buffer has no tensor."""
    wanted = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    packed = [name.removesuffix(".codes") for name in wanted if name.endswith(".codes")]
    parts = layout.parts if layout else {}
    places: dict[str, tuple[str, Part]] = {}
    for name in wanted:
        module, _, leaf = name.rpartition(".")
        places[name] = module, Part(leaf)
    for module in packed:
        places |= {module + suffix: (module, part) for suffix, part in parts.items()}
    redundant = {module + suffix for module in packed for suffix in (layout.redundant if layout else ())}
    tied = tied_weights(model)
    ignored = {OBSOLETE, *(model._keys_to_ignore_on_load_unexpected or ())}
    filled: dict[str, tuple[str, Part]] = {}
    unexpected = []
    for name in checkpoint.names():
        stored = tied[name] if name in tied and tied[name] not in checkpoint else name
        if stored in places:
            filled[name] = places[stored]
        elif name not in redundant and not any(re.search(pattern, name) for pattern in ignored):
            unexpected.append(name)
    assigned = {f"{module}.{part.buffer}" for module, part in filled.values()}
    assigned |= {copy for copy, source in tied.items() if source in assigned}
    missing = sorted(wanted - assigned)
    if missing or unexpected:
        faults = f"missing {_few(missing)}; unexpected {_few(unexpected)}"
        raise ValueError(f"{checkpoint.path} does not fit {type(model).__name__}: {faults}")
    return filled


def tied_weights(model: PreTrainedModel) -> Mapping[str, str]:
    """Map the names of tied parameters, such as lm_head.weight, to the parameters whose values they share."""
    return cast(Mapping[str, str], model.all_tied_weights_keys)


def check_complete(checkpoint: Checkpoint, model: PreTrainedModel, *, packed: Collection[str] = ()) -> None:
    """Check, without reading data, that a checkpoint has a floating-point tensor of the right shape for every parameter
    of ``model``, and raise ValueError if not. The weights of the linear layers named in ``packed`` are not checked,
    because they are stored as 4-bit codes and scales."""
    tied = tied_weights(model)
    stored_packed = {f"{name}.weight" for name in packed}
    stored = {*checkpoint.names(), *stored_packed}
    wanted = {name for name, _ in model.named_parameters()}
    if missing := sorted(name for name in wanted - stored if tied.get(name) not in stored):
        raise ValueError(f"{checkpoint.path} is an incomplete checkpoint: {_few(missing, 3)} missing")
    for name, parameter in model.named_parameters():
        if name not in checkpoint or name in stored_packed:
            continue
        dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
        if shape != list(parameter.shape) or not dtype.startswith(("F", "BF")):
            raise ValueError(
                f"{checkpoint.path}: {name} is {dtype} {shape}; the model that config.json describes expects floating "
                f"point and {list(parameter.shape)} for it"
            )
    if copies := [name for name in packed if f"{name}.weight" in tied]:
        raise ValueError(
            f"{checkpoint.path}: {copies[0]} is in 4 bits and config.json ties it to {tied[copies[0] + '.weight']}"
        )


def _fill(
    module: nn.Module, part: Part, tensor: Tensor, *, name: str, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Convert a checkpoint's tensor as ``part`` says, check it, and assign it to the module's attribute ``part.buffer``
    in place of a meta tensor. Raises ValueError, with the tensor's name ``name``, if its values, shape or dtype cannot
    be used."""
    meta = getattr(module, part.buffer)
    _check_finite(tensor, name)
    value = part.convert(tensor, meta.shape)
    if part.buffer == "block_scale" and value.dtype == meta.dtype:
        _check_block_scales(value.to(device), cast(FrozenLinear, module).fmt, name)
    if part.buffer == "global_scale_bits":
        factor = value.view(torch.float64).float()
        if not (factor.isfinite() & (factor > 0)).all():
            raise ValueError(
                f"{name} is {tensor.flatten().tolist()[:3]}, with which weights are multiplied by "
                f"{factor.flatten().tolist()[:3]}; expected a finite factor above 0: quantise the model again"
            )
    same_kind = value.is_floating_point() if meta.is_floating_point() else value.dtype == meta.dtype
    if value.shape != meta.shape or not same_kind:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; the model expects {meta.dtype} {list(meta.shape)} for it"
        )
    if meta.is_floating_point() and value.dtype.itemsize > dtype.itemsize:
        _check_finite(value.to(dtype), f"{name}, in {str(dtype).removeprefix('torch.')},")
    value = value.to(device=device, dtype=dtype if meta.is_floating_point() else meta.dtype, copy=True)
    is_parameter = isinstance(meta, nn.Parameter)
    setattr(module, part.buffer, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _check_finite(tensor: Tensor, name: str) -> None:
    # If the sum is finite, so are all elements. If it is not, it may have overflowed, so all elements are tested.
    if not tensor.is_floating_point() or (tensor.element_size() > 1 and tensor.sum().isfinite()):
        return
    numbers = tensor.float()
    if not numbers.isfinite().all():
        raise ValueError(f"{name} holds NaN or infinity in {(~numbers.isfinite()).sum()} of {tensor.numel()} places")


def _check_block_scales(scales: Tensor, fmt: Format, name: str) -> None:
    """Raise ValueError if block scales are NaN, infinite, or negative, as some kernels ignore their sign."""
    values = fmt.effective_scale(scales, torch.ones((), dtype=torch.float64, device=scales.device)).float()
    if number := int((~values.isfinite()).sum()):
        raise ValueError(f"{name} holds NaN or infinity in {number} of {scales.numel()} places")
    if number := int((values < 0).sum()):
        raise ValueError(
            f"{name} holds {number} negative block scales of {scales.numel()}; expected magnitudes, as the 4-bit codes "
            "have the signs: quantise the model again"
        )


def _tie(model: PreTrainedModel, path: Path) -> None:
    for copy, source in tied_weights(model).items():
        first, second = model.get_parameter(copy), model.get_parameter(source)
        if not first.is_meta and not torch.equal(first, second):
            raise ValueError(
                f"{path} says that {copy} is tied to {source} but holds different values for them; "
                f"set tie_word_embeddings to false in {CONFIG} if both are meant"
            )
    model.tie_weights()


def fill_computed_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Fill buffers that no checkpoint stores, such as rotary frequencies, by transformers' initialisation of the model.
    As that would overwrite parameters, they are taken out before and put back afterwards."""
    for name, module in model.named_modules():
        computed = {leaf: buffer for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for leaf, buffer in computed.items():
            setattr(module, leaf, torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device))
        if not computed:
            continue
        parameters = dict(module.named_parameters(recurse=False))
        for leaf, parameter in parameters.items():
            module.register_parameter(leaf, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
        model._init_weights(module)
        for leaf, parameter in parameters.items():
            module.register_parameter(leaf, parameter)
        for leaf in computed:
            if not getattr(module, leaf).isfinite().all():
                raise ValueError(f"{type(model).__name__} does not say how to compute its buffer {name}.{leaf}")


def _few(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + rest
