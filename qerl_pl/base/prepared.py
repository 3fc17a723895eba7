"""Prepare the folder that a run loads: the base of its settings, converted if trainer or engine cannot read it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from qerl_pl.base.cache import made_once
from qerl_pl.base.folder import BaseFormat, base_folder
from qerl_pl.base.tokenizer import load_tokenizer
from qerl_pl.quant.convert import VERSION, convert_checkpoint
from qerl_pl.quant.families import check_family
from qerl_pl.quant.files import CONFIG
from qerl_pl.quant.published import conversion_reasons


def prepared_base(base: str, base_format: BaseFormat | None = None) -> str:
    """Return the folder that a run loads, and convert the base if necessary; logs what was ignored or changed.

    Args:
        base: folder of a checkpoint.
        base_format: see ``base_folder``.

    Returns:
        The base's folder; for a published NVFP4 checkpoint that also quantises activations or the KV cache, the folder
        of its W4A16 copy in the cache.

    Raises:
        ValueError: the base cannot be used; says why in one line.
    """
    folder = Path(base_folder(base, base_format))
    if not (folder / CONFIG).is_file():
        return str(folder)  # check_base raises the error
    config = check_family(folder)
    reasons = conversion_reasons(folder)
    if not reasons:
        return str(folder)
    load_tokenizer(folder, config)
    settings = {"convert to": "W4A16", "version": VERSION}
    copy = made_once(folder, f"{folder.name}-w4a16", settings, lambda output: convert_checkpoint(folder, output))
    rank_zero_info(f"{folder} is read as 4-bit weights with 16-bit activations, from {copy}: {'; '.join(reasons)}")
    return str(copy)
