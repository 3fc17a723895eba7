"""What the quantiser packs, what shares a scale, and which file of the output it goes into."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from qerl_pl.base.family import FAMILIES
from qerl_pl.quant.files import Checkpoint
from qerl_pl.quant.loading import tied_weights

FUSED = {member: group for family in FAMILIES.values() for group in family.fused for member in group}
"""Linear to the group that engines fuse it with; no two families have different groups of the same names."""
_BLOCK_OF = re.compile(r"^(.*\.layers\.\d+)\.")


@dataclass(frozen=True)
class OutputFile:
    """One file of the output."""

    name: str
    block: str | None
    """Decoder block that it holds, e.g. "model.layers.3"; None: everything outside the blocks."""
    tensors: list[str]
    """Names of the source tensors that go into it."""

    def groups(self, groups: Mapping[str, list[str]]) -> list[list[str]]:
        """Those of the fused groups whose weights are in this file."""
        held = set(self.tensors)
        return [group for first, group in groups.items() if f"{first}.weight" in held]


def split_linears(
    model: PreTrainedModel, ignore: Sequence[str], *, block: int
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """The linears to pack, with their shapes [N, K], and the names of those to leave dense, in the model's order.

    Args:
        model: may be on the meta device.
        ignore: names of linears, or regular expressions after "re:", matched from the start of the name.
        block: columns that share a scale.

    Raises:
        ValueError: an entry of ``ignore`` matches no linear, nothing is left to pack, or a linear that is left shares
            its weight or does not divide into blocks.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for entry in ignore:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise ValueError(f"ignore entry {entry!r} is no regular expression: {error}") from error
        if not any(is_ignored(name, [entry]) for name in linears):
            example = next(reversed(linears), None)
            raise ValueError(f"ignore entry {entry!r} matches no linear; they are named like {example!r}")
    kept = {name: module for name, module in linears.items() if not is_ignored(name, ignore)}
    for name, module in kept.items():
        if f"{name}.weight" in tied_weights(model):
            raise ValueError(f"{name} shares its weight with the embeddings, which stay dense; add it to ignore")
        if module.in_features % block:
            raise ValueError(f"{name} has {module.in_features} inputs, not a multiple of {block}; add it to ignore")
    if not kept:
        raise ValueError(f"ignore {list(ignore)} leaves no linear to pack")
    shapes = {name: (module.out_features, module.in_features) for name, module in kept.items()}
    return shapes, [name for name in linears if name not in kept]


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Whether an entry names a linear, or matches it as "re:PATTERN" from the start."""
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def fused_groups(linears: Sequence[str]) -> dict[str, list[str]]:
    """First linear of a group to the whole group: what engines fuse shares one tensor scale; the others are alone.

    Raises:
        ValueError: only a part of what engines fuse is to be packed.
    """
    groups: dict[str, list[str]] = {}
    for name in linears:
        parent, dot, leaf = name.rpartition(".")
        group = [f"{parent}{dot}{member}" for member in FUSED.get(leaf, (leaf,))]
        if missing := set(group) - set(linears):
            raise ValueError(f"engines fuse {group}; ignore all of them or none, not only {sorted(missing)}")
        if name == group[0]:
            groups[name] = group
    return groups


def block_of(name: str) -> str | None:
    """The decoder block that a tensor or module is in, e.g. "model.layers.3"; None outside the blocks."""
    block = _BLOCK_OF.match(name)
    return block and block[1]


def output_files(checkpoint: Checkpoint) -> list[OutputFile]:
    """One file for everything outside the decoder blocks, then one for each block, in their order."""
    parts: dict[str, list[str]] = {"": []}
    for name in checkpoint.names():
        parts.setdefault(block_of(name) or "", []).append(name)
    ordered = sorted(parts, key=lambda block: (len(block), block))  # .9 before .10
    return [
        OutputFile(f"model-{number:05}-of-{len(parts):05}.safetensors", block or None, parts[block])
        for number, block in enumerate(ordered, start=1)
    ]
