"""Write the adapter from which a run on a quantised checkpoint can start, as a PEFT folder inside of the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.quant.output import write_tensors

START = "start"
"""Name of the folder."""
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."


def adapter_tensors(linear: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Name the factors A and B of a linear as PEFT does."""
    return {f"{_PREFIX}{linear}.lora_A.weight": a, f"{_PREFIX}{linear}.lora_B.weight": b}


def with_adapter(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the products B A of an adapter to the weights of its linears, which are named as in the model."""
    added = dict(weights)
    for name, b in adapter.items():
        if name.endswith(".lora_B.weight"):
            product = b @ adapter[name.replace(".lora_B.", ".lora_A.")]
            weight = name.removeprefix(_PREFIX).replace(".lora_B.", ".")
            added[weight] = (added[weight].float() + product).to(added[weight].dtype)
    return added


class StartFolder:
    """PEFT folder of an adapter that is written one decoder block at a time; the blocks' files are joined at the end.

    Args:
        checkpoint: folder of the checkpoint while it is being written.
        rank: rank of the adapter; None: there is none, nothing is written, and ``read`` returns no tensors.
    """

    def __init__(self, checkpoint: Path, *, rank: int | None) -> None:
        self.folder, self.parts, self.rank = checkpoint / START, checkpoint / f"{START}.parts", rank

    def add(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a file of the checkpoint, if it has any."""
        if tensors:
            write_tensors(self.parts / part, tensors)

    def read(self, part: str) -> dict[str, Tensor]:
        """Read the tensors of a decoder block's file."""
        return {} if self.rank is None else load_file(self.parts / part)

    def finish(self, *, base: Path) -> None:
        """Join the parts, and add PEFT's settings: the names of the adapted linears, alpha equal to the rank, so that
        B A is added as it is, and the absolute path of the base. A call that was interrupted can be repeated."""
        if self.rank is None:
            return
        if not (self.folder / _WEIGHTS).exists():
            tensors = {
                name: tensor for part in sorted(self.parts.iterdir()) for name, tensor in load_file(part).items()
            }
            targets = sorted({name.split(".")[-3] for name in tensors})
            config = LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=targets, task_type="CAUSAL_LM")
            config.base_model_name_or_path, config.inference_mode = str(base.resolve()), True
            config.save_pretrained(str(self.folder))
            write_tensors(self.folder / _WEIGHTS, tensors)
        shutil.rmtree(self.parts, ignore_errors=True)
