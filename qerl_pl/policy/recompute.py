"""What backward recomputes instead of keeping it, from fast and large to slow and small.

    none        everything that autograd asks for is kept
    selective   of each block the results of matrix products and attention; norms, rotations, activations run again
    n blocks    of the first n blocks their input alone, of the others as selective
    blocks      of every block its input alone
    offload     the same, and those inputs are in host memory

The first blocks and not the last ones: backward comes to them when the later blocks' memory is free again.
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
"""As in the YAML; true means blocks, false none, and a number so many blocks."""
SHARES = 8
"""Parts of a model's blocks between two numbers of recomputed blocks that are tried."""


@dataclass(frozen=True, order=True)
class Recompute:
    """A rung of the ladder; the default keeps everything. Those that keep less are greater."""

    selective: bool = False
    """Blocks that are not recomputed as a whole keep matrix products and attention only."""
    blocks: int = 0
    """This many of the first blocks are recomputed as a whole."""
    offload: bool = False
    """Inputs of recomputed blocks wait in host memory."""

    def setting(self, num_layers: int) -> Setting:
        """As model.gradient_checkpointing says it."""
        if self.offload:
            return "offload"
        if self.blocks == num_layers:
            return "blocks"
        return self.blocks or ("selective" if self.selective else "none")


def ladder(num_layers: int) -> tuple[Recompute, ...]:
    """The rungs that are chosen from, each with less memory and more work than the one before."""
    numbers = sorted({ceil(num_layers * share / SHARES) for share in range(1, SHARES + 1)})
    some = [Recompute(selective=True, blocks=number) for number in numbers]
    return Recompute(), Recompute(selective=True), *some, Recompute(selective=True, blocks=num_layers, offload=True)


def recompute_of(setting: Setting, num_layers: int, offload_checkpoints: bool = False) -> Recompute | None:
    """The rung that the settings name; None: it is left open.

    Args:
        setting: ``model.gradient_checkpointing``.
        num_layers: blocks of the model.
        offload_checkpoints: ``model.offload_checkpoints``, an older way to ask for offload.

    Raises:
        ValueError: the setting is none of those that exist, there are fewer blocks, or nothing to offload.
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
    """Let a model's blocks recompute this from their next forward pass on. Offloading is its caller's."""
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
