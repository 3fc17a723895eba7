"""Find the folder of a base checkpoint, and check its files, model family, format and tokenizer."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from qerl_pl.base.gguf import gguf_folder, is_gguf
from qerl_pl.common.files import searched
from qerl_pl.model.files import Checkpoint
from qerl_pl.model.tokenizer import check_text_survives, load_tokenizer
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.families import check_family

BaseFormat = Literal["nvfp4", "mxfp4", "nf4"]


def base_folder(base: str, base_format: BaseFormat | None, *, must_exist: bool = True) -> str:
    """Return the folder of the checkpoint that a run uses. With ``base_format``, this is the copy of ``base`` in this
    4-bit format, which ``quantize`` has written (``BASE-nvfp4`` next to ``BASE``). If ``base`` is a GGUF file, it is
    the folder in the cache with the file's dequantised weights. Otherwise it is ``base`` itself.

    Raises ValueError if the GGUF file cannot be used, if ``base`` is or holds anything other than files and folders, or
    if the copy does not exist. If ``must_exist`` is False, a missing copy is no error, and the path that it would have
    is returned.
    """
    if base:
        base = os.path.expanduser(base)
        path = Path(base)
        for file in (path, *path.iterdir()) if path.is_dir() else (path,):
            if file.exists() and not (file.is_dir() or file.is_file()):  # reading e.g. a named pipe may never end
                raise ValueError(
                    f"model.base: {file} is no regular file; expected a checkpoint's folder with its files"
                )
    if base and is_gguf(base):
        if base_format is not None:
            raise ValueError(
                f"model.base_format is {base_format!r}, which takes the copy next to a folder, and {base} is a GGUF "
                f"file: give --model.quantize {base_format}"
            )
        return str(gguf_folder(base))
    if base_format is None:
        return base
    folder = f"{base.rstrip('/')}-{base_format}"
    if must_exist and Path(base).is_dir() and not Path(folder).is_dir():
        raise ValueError(
            f"model.base_format is {base_format!r} and there is no folder {folder}; make it by: python -m qerl_pl "
            f"quantize --model {base} --output {folder} --format {base_format}; or have it made at first use: "
            f"--model.base_format null --model.quantize {base_format}"
        )
    return folder


def check_base(path: str | Path) -> Mapping:
    """Check, without reading weights, that a run can use the checkpoint in a folder, and return the content of its
    config.json. Raises ValueError, which says in one line why the run cannot use it."""
    if Path(path).is_file():
        raise ValueError(
            f"model.base: {path} is a file; give the folder of the checkpoint, with config.json in it, or a GGUF file"
        )
    if not Path(path).is_dir():
        raise ValueError(
            f"model.base: there is no folder {searched(path)}; give a model's name on the hub (OWNER/MODEL), a "
            "downloaded checkpoint (hf download NAME --local-dir FOLDER), or the quickstart's, of `qerl tiny` and "
            "`qerl quantize`"
        )
    checkpoint = Checkpoint(path)
    config = check_family(checkpoint.path)
    read_layout(checkpoint.path)
    check_text_survives(load_tokenizer(checkpoint.path, config), path)
    return config
