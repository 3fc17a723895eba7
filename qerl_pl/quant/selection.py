"""Decide which linear layers are quantised, which of them share a tensor scale, and which tensors each output file has.

Letters: N outputs, K inputs of a linear layer.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from torch import nn
from transformers import PreTrainedModel

from qerl_pl.model.family import FAMILIES
from qerl_pl.model.files import Checkpoint
from qerl_pl.model.layers import block_of
from qerl_pl.quant.experts import check_alike
from qerl_pl.quant.loading import tied_weights

FUSED = {member: group for family in FAMILIES.values() for group in family.fused for member in group}
"""Maps the last part of a linear layer's name, such as ``k_proj``, to the layers that inference engines fuse into one
matrix with it, itself included, such as q_proj, k_proj and v_proj, in all model families."""


@dataclass(frozen=True)
class OutputFile:
    """One weight file of the checkpoint to write, and the tensors of the dense checkpoint from which it is made."""

    name: str
    block: str | None
    """Decoder block of these tensors, e.g. "model.layers.3"; None for all tensors outside the blocks."""
    tensors: list[str]
    """Names of the source tensors of the file."""

    def groups(self, groups: Mapping[str, list[str]]) -> list[list[str]]:
        """Return those of the given groups of linear layers (from ``fused_groups``) whose weights are in this file."""
        held = set(self.tensors)
        return [group for first, group in groups.items() if f"{first}.weight" in held]


def output_files(checkpoint: Checkpoint) -> list[OutputFile]:
    """List the files to write: one for all tensors outside the decoder blocks, then one per decoder block in order."""
    parts: dict[str, list[str]] = {"": []}
    for name in checkpoint.names():
        parts.setdefault(block_of(name) or "", []).append(name)
    ordered = sorted(parts, key=lambda block: (len(block), block))  # .9 before .10
    return [
        OutputFile(f"model-{number:05}-of-{len(parts):05}.safetensors", block or None, parts[block])
        for number, block in enumerate(ordered, start=1)
    ]


class BlockWeight(NamedTuple):
    """Parameter of a decoder block: its full name, the module that it belongs to, and the kind of this module or
    tensor."""

    name: str
    module: nn.Module
    kind: Literal["linear", "convolution", "vector"]


def block_weights(model: nn.Module) -> Iterator[BlockWeight]:
    """Yield each parameter of a model's decoder blocks once, in the model's order, with its module. Raises ValueError
    for a matrix that is not the weight of a linear layer or a convolution, such as stacked experts: the quantiser would
    leave it in 16 bits without telling the user."""
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}"
            if block_of(name) is None:
                continue
            if parameter.ndim < 2:
                yield BlockWeight(name, module, "vector")
            elif isinstance(module, nn.Linear | nn.Conv1d):
                yield BlockWeight(name, module, "linear" if isinstance(module, nn.Linear) else "convolution")
            else:
                shape, owner = list(parameter.shape), type(module).__name__
                raise ValueError(f"{name} {shape} is the weight of a {owner}; expected linears and convolutions")


def linears_of(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder blocks, and its output head, by name in the model's order."""
    linears = {
        weight.name.removesuffix(".weight"): cast(nn.Linear, weight.module)
        for weight in block_weights(model)
        if weight.kind == "linear"
    }
    head = model.get_output_embeddings()
    return linears | {name: cast(nn.Linear, module) for name, module in model.named_modules() if module is head}


def split_linears(
    model: PreTrainedModel, ignore: Sequence[str], *, block: int
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Divide the linear layers of a model into those to quantise and those that stay dense. Layers stay dense because
    of the model family (``Family.dense``) or because of ``ignore``, whose entries are names, or "re:" and a regular
    expression that matches the start of names. Returns the shapes [N, K] of the layers to quantise, by name, and the
    names of the others. Raises ValueError if ``block``, the number of columns that share a block scale, does not divide
    K."""
    linears = linears_of(model)
    for entry in ignore:
        try:
            if not any(is_ignored(name, [entry]) for name in linears):
                example = next(reversed(linears), None)
                raise ValueError(f"ignore entry {entry!r} matches no linear; they are named like {example!r}")
        except re.error as error:
            raise ValueError(f"ignore entry {entry!r} is no regular expression: {error}") from error
    family = FAMILIES[model.config.model_type]
    shapes, tied = {}, tied_weights(model)
    for name, module in linears.items():
        if is_ignored(name, ignore) or family.stays_dense(name):
            continue
        if f"{name}.weight" in tied:
            raise ValueError(f"{name} shares its weight with the embeddings, which stay dense; add it to ignore")
        if module.in_features % block:
            raise ValueError(f"{name} has {module.in_features} inputs, not a multiple of {block}; add it to ignore")
        shapes[name] = (module.out_features, module.in_features)
    if not shapes:
        raise ValueError(f"ignore {list(ignore)} leaves no linear layer to quantise")
    check_alike(shapes.keys(), model)
    return shapes, [name for name in linears if name not in shapes]


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Return whether an entry of ``ignore`` is the name, or is "re:PATTERN" and matches its start."""
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def fused_with(linear: str, present: Collection[str] | None = None) -> list[str]:
    """Return the names of the linear layers that inference engines fuse with ``linear`` into one matrix with a single
    tensor scale, ``linear`` included. ``present`` are the linear layers that the model has, since blocks of some
    families lack some of these layers; None: the model has all."""
    parent, dot, leaf = linear.rpartition(".")
    group = [f"{parent}{dot}{member}" for member in FUSED.get(leaf, (leaf,))]
    return [member for member in group if present is None or member in present]


def fused_groups(linears: Sequence[str], present: Collection[str] | None = None) -> dict[str, list[str]]:
    """Group the linear layers to quantise, ``linears``, so that a group has the layers that inference engines fuse into
    one matrix, such as q, k and v. Returns, by the name of each group's first layer, the names of all its layers.
    ``present`` are the names of all layers of the model, because some models lack layers of a group; None: this model
    lacks none. Raises ValueError if ``linears`` has some, but not all, of the layers of a group that the model has."""
    groups: dict[str, list[str]] = {}
    known = set(linears)
    for name in linears:
        group = fused_with(name, present)
        if missing := set(group) - known:
            raise ValueError(f"engines fuse {group}; ignore all of them or none, not only {sorted(missing)}")
        if name == group[0]:
            groups[name] = group
    return groups
