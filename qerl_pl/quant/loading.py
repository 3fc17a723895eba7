"""A checkpoint folder to a frozen causal language model, tensor by tensor: the dense model never exists.

What a checkpoint holds packed becomes a frozen quantised linear, and what it holds dense stays dense, so the ``ignore``
list of its quantisation config is honoured by construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from qerl_pl.quant.files import CONFIG, Checkpoint
from qerl_pl.quant.layouts import PARTS, Part, as_is, quantization_layout
from qerl_pl.quant.linear import NVFP4Linear

OBSOLETE = r"rotary_emb\.inv_freq$"  # held by old Llama checkpoints, computed today


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the checkpoint goes."""

    module: str
    leaf: str
    convert: Callable[[Tensor], Tensor]


def load_base(path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """The frozen base of a policy, in evaluation mode, nothing of it trainable.

    Args:
        path: folder with config.json and safetensors, sharded or not.
        dtype: of everything but packed weights.
        device: where every tensor goes as it is read.

    Raises:
        ValueError: the folder is not a model, its quantisation is not one of ``KNOWN_FORMATS``, or its tensors are not
            those of the model that its config describes.
    """
    checkpoint = Checkpoint(path)
    layout = quantization_layout(checkpoint.path)
    model = meta_model(checkpoint.path, dtype)
    _swap_packed_linears(model, checkpoint, layout)
    slots = _match(model, checkpoint, PARTS[layout])
    for name, slot in slots.items():
        _fill(model, slot, checkpoint.read(name), name=name, dtype=dtype, device=device)
    _tie(model, checkpoint.path)
    _fill_computed_buffers(model, device)
    if (checkpoint.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    return model.requires_grad_(False).eval()


def meta_model(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The causal language model that config.json describes, without any data, as if it were not quantised."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype, trust_remote_code=False)


def _swap_packed_linears(model: PreTrainedModel, checkpoint: Checkpoint, layout: str) -> None:
    for name, linear in list(model.named_modules()):
        if not PARTS[layout] or f"{name}.weight_scale" not in checkpoint:
            continue
        if not isinstance(linear, nn.Linear):
            kind = type(linear).__name__
            raise ValueError(f"{checkpoint.path} holds {name} packed; expected a linear, the model has a {kind}")
        packed = NVFP4Linear(
            linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=model.dtype, device="meta"
        )
        model.set_submodule(name, packed)


def _match(model: PreTrainedModel, checkpoint: Checkpoint, parts: Mapping[str, Part]) -> dict[str, Slot]:
    """Every tensor of the checkpoint with its place in the model; every place is taken, or tied to one that is."""
    wanted = set(model.state_dict())
    tied = tied_weights(model)
    ignored = {OBSOLETE, *(model._keys_to_ignore_on_load_unexpected or ())}
    slots: dict[str, Slot] = {}
    unexpected = []
    for name in checkpoint.names():
        stored = tied[name] if name in tied and tied[name] not in checkpoint else name
        module, _, leaf = stored.rpartition(".")
        slot = Slot(module, leaf, as_is)
        if leaf in parts and f"{module}.codes" in wanted:
            slot = Slot(module, parts[leaf].buffer, parts[leaf].convert)
        if f"{slot.module}.{slot.leaf}" in wanted:
            slots[name] = slot
        elif not any(re.search(pattern, name) for pattern in ignored):
            unexpected.append(name)
    given = {f"{slot.module}.{slot.leaf}" for slot in slots.values()}
    given |= {copy for copy, source in tied.items() if source in given}
    missing = sorted(wanted - given)
    if missing or unexpected:
        faults = f"missing {_few(missing)}; unexpected {_few(unexpected)}"
        raise ValueError(f"{checkpoint.path} does not fit {type(model).__name__}: {faults}")
    return slots


def tied_weights(model: PreTrainedModel) -> Mapping[str, str]:
    """Names of parameters that are another one, e.g. lm_head.weight of tied embeddings, to the name of that one."""
    return cast(Mapping[str, str], model.all_tied_weights_keys)


def _fill(
    model: nn.Module, slot: Slot, tensor: Tensor, *, name: str, dtype: torch.dtype, device: torch.device | str
) -> None:
    module = model.get_submodule(slot.module)
    meta = getattr(module, slot.leaf)
    value = slot.convert(tensor)
    if value.shape != meta.shape or value.is_floating_point() != meta.is_floating_point():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; the model expects {meta.dtype} {list(meta.shape)} for it"
        )
    value = value.to(device=device, dtype=dtype if meta.is_floating_point() else meta.dtype, copy=True)
    is_parameter = isinstance(meta, nn.Parameter)
    setattr(module, slot.leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _tie(model: PreTrainedModel, path: Path) -> None:
    for copy, source in tied_weights(model).items():
        first, second = model.get_parameter(copy), model.get_parameter(source)
        if not first.is_meta and not torch.equal(first, second):
            raise ValueError(
                f"{path} says that {copy} is tied to {source} but holds different values for them; "
                f"set tie_word_embeddings to false in {CONFIG} if both are meant"
            )
    model.tie_weights()


def _fill_computed_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Buffers that no checkpoint holds, such as rotary frequencies, as the model's own initialisation computes them."""
    for name, module in model.named_modules():
        computed = {leaf: buffer for leaf, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for leaf, buffer in computed.items():
            setattr(module, leaf, torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device=device))
        if computed:
            model._init_weights(module)
        for leaf in computed:
            if not getattr(module, leaf).isfinite().all():
                raise ValueError(f"{type(model).__name__} does not say how to compute its buffer {name}.{leaf}")


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
