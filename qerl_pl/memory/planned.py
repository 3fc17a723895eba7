"""Find the dimensions of the base that a run would load, from config.json or only from the model's name."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from qerl_pl.base.folder import BaseFormat, base_folder
from qerl_pl.base.prepared import check_format
from qerl_pl.memory.shape import ModelShape, checkpoint_shape, config_shape
from qerl_pl.model.hub import hub_config, is_hub_name
from qerl_pl.model.known_models import known_config, known_format
from qerl_pl.model.quantization import Quantization
from qerl_pl.quant.writers import WRITERS


def planned_shape(
    base: str, base_format: BaseFormat | None, quantization: Quantization | None, dtype: torch.dtype
) -> ModelShape:
    """Find the dimensions of a base in its folder, in the table of known models, or in config.json on the hub, in this
    order.

    Args:
        base: folder of a checkpoint, of which config.json suffices, or a model's name on the hub. A folder that does
            not exist may have the name of a known model.
        base_format: format of the base's 4-bit copy that the run would use; None if it would use the base itself.
        quantization: settings for quantising a dense base; None means no quantisation.
        dtype: dtype of everything that is not packed.

    Raises:
        ValueError: the base was found in none of these places, or a run cannot use it.
    """
    check_format(base, base_format, quantization)
    name = base_format or (quantization and quantization.format)
    fmt = WRITERS[name].fmt if name else None
    ignore = quantization.ignore if quantization else ()
    folder = Path(base_folder(base, base_format, must_exist=False))
    if folder.is_dir():
        return checkpoint_shape(folder, dtype, fmt, ignore)
    if Path(base).is_dir():
        return checkpoint_shape(base, dtype, fmt, ignore)
    if (known := known_config(base)) is not None:
        name = name or known_format(base)
        return config_shape(AutoConfig.for_model(**known), WRITERS[name].fmt if name else None, dtype)
    if is_hub_name(base):
        return checkpoint_shape(hub_config(base), dtype, fmt, ignore)
    raise ValueError(
        f"model.base: there is no folder {base}, and no known model of this name; give a folder with config.json or a "
        "model's name on the hub (OWNER/MODEL)"
    )
