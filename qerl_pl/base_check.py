"""What of a base can be known to be wrong before anything is built: files, family, format, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qerl_pl.quant.families import check_family
from qerl_pl.quant.files import Checkpoint
from qerl_pl.quant.layouts import read_layout
from qerl_pl.tokenizer_check import check_text_survives, load_tokenizer


def check_base(path: str | Path) -> Mapping:
    """Refuse a folder that a run cannot be based on; reads no weights.

    Returns:
        Its config.json.

    Raises:
        ValueError: in one line that names the file and the value.
    """
    checkpoint = Checkpoint(path)
    config = check_family(checkpoint.path)
    read_layout(checkpoint.path)
    check_text_survives(load_tokenizer(checkpoint.path, config), path)
    return config
