"""Levels of gradient checkpointing: what backward recomputes, from the fastest level to the one that needs least
memory.

    none        nothing: all that autograd saves is kept
    selective   the element-wise operations (norms, rotary embeddings, activations); the results of matrix products and
                attention are kept (with LoRA dropout, only those of attention)
    n blocks    the first n blocks from their inputs; the other blocks as in "selective"
    blocks      every block from its input
    offload     every block from its input, which is kept in host memory

With "n blocks", the first blocks are recomputed and not the last ones, because backward reaches them last and has freed
the activations of the later blocks by then.
"""

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qerl_pl.model.family import FAMILIES
from qerl_pl.policy.kept import keeping, kept_whole
from qerl_pl.policy.lora import LoraLinear
from qerl_pl.quant.experts import FrozenExperts

Setting = Literal["auto", "none", "selective", "blocks", "offload"] | bool | int
"""Values of the setting ``model.gradient_checkpointing``: True means the level "blocks", False "none", and a number n
"n blocks"."""
SHARES = 8
"""Number of equally spaced values of n for which the memory plan considers recomputing the first n blocks
completely."""


@dataclass(frozen=True, order=True)
class Recompute:
    """Level of gradient checkpointing, that is, what backward recomputes; the default is to recompute nothing. A level
    that needs less memory compares as greater."""

    selective: bool = False
    """Whether element-wise operations are recomputed in those blocks that are not recomputed from their inputs."""
    blocks: int = 0
    """Number n of the model's first blocks that are recomputed from their inputs."""
    offload: bool = False
    """Whether the inputs of completely recomputed blocks are kept in host memory."""

    def setting(self, num_layers: int) -> Setting:
        """Return the value of ``model.gradient_checkpointing`` that means this level."""
        if self.offload:
            return "offload"
        if self.blocks == num_layers:
            return "blocks"
        return self.blocks or ("selective" if self.selective else "none")


def ladder(num_layers: int) -> tuple[Recompute, ...]:
    """List the levels of gradient checkpointing from which the memory plan chooses if the user's setting is "auto", for
    a model of ``num_layers`` blocks; each needs less memory than the one before."""
    numbers = sorted({ceil(num_layers * share / SHARES) for share in range(1, SHARES + 1)})
    some = [Recompute(selective=True, blocks=number) for number in numbers]
    return Recompute(), Recompute(selective=True), *some, Recompute(selective=True, blocks=num_layers, offload=True)


def recompute_of(setting: Setting, num_layers: int) -> Recompute | None:
    """Return the level that a value of ``model.gradient_checkpointing`` means for a model of ``num_layers`` blocks;
    None for "auto". Raises ValueError if the value is unknown, or a number of blocks that the model does not have."""
    wanted = {True: "blocks", False: "none"}.get(setting, setting) if isinstance(setting, bool) else setting
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
    """Set which activations of a model's decoder blocks backward recomputes, from the next forward pass on. For the
    level "offload", this makes backward recompute all blocks, and the caller has to move the blocks' inputs to host
    memory."""
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
            elif isinstance(module, FrozenExperts):
                module.around = kept_whole
