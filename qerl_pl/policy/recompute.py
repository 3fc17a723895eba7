"""Levels of gradient checkpointing: what backward recomputes, from the fastest level to the one with least memory.

    none        nothing: all that autograd saves is kept
    selective   the element-wise operations (norms, rotary embeddings, activations); the results of matrix products and
                attention are kept
    n blocks    the first n blocks from their inputs; the other blocks as in "selective"
    blocks      every block from its input
    offload     every block from its input, which is kept in host memory

The first blocks are recomputed and not the last ones, because the memory of the later blocks is free again by the time
that backward reaches the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qerl_pl.base.family import FAMILIES
from qerl_pl.policy.kept import keeping
from qerl_pl.policy.lora import LoraLinear

Setting = Literal["auto", "none", "selective", "blocks", "offload"] | bool | int
"""Values of ``model.gradient_checkpointing`` in the YAML file; true means blocks, false none, a number that many
blocks."""
SHARES = 8
"""Number of values of n, at equal distances, for which "n blocks" is tried."""


@dataclass(frozen=True, order=True)
class Recompute:
    """Level of gradient checkpointing, by default none. Levels compare as greater the less memory they need."""

    selective: bool = False
    """Whether blocks that are not recomputed as a whole recompute their element-wise operations."""
    blocks: int = 0
    """Number of blocks, the first ones, that are recomputed as a whole."""
    offload: bool = False
    """Whether the inputs of recomputed blocks are kept in host memory."""

    def setting(self, num_layers: int) -> Setting:
        """Return the value of ``model.gradient_checkpointing`` that means this level."""
        if self.offload:
            return "offload"
        if self.blocks == num_layers:
            return "blocks"
        return self.blocks or ("selective" if self.selective else "none")


def ladder(num_layers: int) -> tuple[Recompute, ...]:
    """List the levels to choose from, each with less memory and more computation than the previous one."""
    numbers = sorted({ceil(num_layers * share / SHARES) for share in range(1, SHARES + 1)})
    some = [Recompute(selective=True, blocks=number) for number in numbers]
    return Recompute(), Recompute(selective=True), *some, Recompute(selective=True, blocks=num_layers, offload=True)


def recompute_of(setting: Setting, num_layers: int, offload_checkpoints: bool = False) -> Recompute | None:
    """Return the level that the settings name; None for "auto", which leaves it open.

    Args:
        setting: ``model.gradient_checkpointing``.
        num_layers: blocks of the model.
        offload_checkpoints: ``model.offload_checkpoints``; True means the level "offload".

    Raises:
        ValueError: the setting is unknown, names more blocks than the model has, or contradicts offload_checkpoints.
    """
    wanted = {True: "blocks", False: "none"}.get(setting, setting) if isinstance(setting, bool) else setting
    if offload_checkpoints:
        if wanted not in ("auto", "blocks", "offload"):
            raise ValueError(
                f"model.offload_checkpoints is set, but with model.gradient_checkpointing {setting!r} there is nothing "
                "to offload: say gradient_checkpointing: offload"
            )
        wanted = "offload"
    if wanted == "auto":
        return None
    whole = partial(Recompute, selective=True)
    named = {
        "none": Recompute(),
        "selective": whole(),
        "blocks": whole(blocks=num_layers),
        "offload": whole(blocks=num_layers, offload=True),
    }
    if isinstance(wanted, int) and 0 <= wanted <= num_layers:
        return whole(blocks=wanted)
    if isinstance(wanted, str) and wanted in named:
        return named[wanted]
    raise ValueError(
        f"model.gradient_checkpointing is {setting!r}; expected auto, {', '.join(named)}, or how many of the model's "
        f"{num_layers} blocks are recomputed, 0 to {num_layers}"
    )


def apply_recompute(model: PreTrainedModel, how: Recompute) -> None:
    """Set what a model's blocks recompute from their next forward pass on; moving inputs to the host is left to
    callers."""
    decoder: Any = model.model
    last_linear = FAMILIES[model.config.model_type].last_linear
    for index, block in enumerate(decoder.layers):
        whole = index < how.blocks
        block.gradient_checkpointing = whole or how.selective
        options = {} if whole else {"context_fn": keeping}
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **options)
        for name, module in block.named_modules():
            if isinstance(module, LoraLinear):
                module.keeps_result = not name.endswith(last_linear)
