"""Prepare the checkpoint folder that a run loads: the base model, downloaded, quantised or converted if necessary."""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from qerl_pl.base.cache import made_once
from qerl_pl.base.folder import BaseFormat, base_folder
from qerl_pl.model.files import CONFIG
from qerl_pl.model.hub import hub_config, hub_folder, is_hub_name
from qerl_pl.model.quantization import Quantization, method_of
from qerl_pl.model.tokenizer import load_tokenizer
from qerl_pl.quant import convert, quantize
from qerl_pl.quant.calibration import read_calibration
from qerl_pl.quant.declared import declared_layout, read_layout
from qerl_pl.quant.families import check_family
from qerl_pl.quant.published import conversion_reasons


def prepared_base(base: str, base_format: BaseFormat | None = None, quantization: Quantization | None = None) -> str:
    """Return the checkpoint folder that a run loads, after downloading, quantising or converting the base model if
    necessary. Logs which parts of a checkpoint are not used, such as a vision model.

    Args:
        base: name on the hub, folder or GGUF file.
        base_format: the result is the copy in this 4-bit format that ``quantize`` has written next to the folder
            ``base``; None: ``base`` itself.
        quantization: how ``base`` is quantised if it is not yet; the result is then in the cache. None: it stays as it
            is.

    The cache also holds language models that were taken from vision-language checkpoints, and copies of published NVFP4
    checkpoints in which, besides the weights, activations or the KV cache are quantised, or some linear layers to FP8;
    in these copies, only weights are quantised (W4A16).
    """
    base = os.path.expanduser(base)
    name = base.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    check_format(base, base_format, quantization)
    if is_hub_name(base):
        config = hub_config(base)
        check_family(config)
        declared_layout(config)
        folder = hub_folder(base)
    else:
        folder = Path(base_folder(base, base_format))
    if not (folder / CONFIG).is_file():
        return str(folder)  # ``check_base`` will report that config.json is missing
    config = check_family(folder)
    if reasons := conversion_reasons(folder):
        load_tokenizer(folder, config)
        if declared_layout(folder) is not None or quantization is None:
            folder = _converted(folder, name, reasons)
        else:  # Conversion is not needed before quantisation, because the quantiser reads only the text model.
            rank_zero_info(f"{base}: {'; '.join(reasons)}")
    if quantization is None:
        return str(folder)
    if layout := read_layout(folder):
        if layout.fmt.name != quantization.format:
            raise ValueError(
                f"model.quantize is {quantization.format!r} and {base} is in {layout.fmt.name} already: set it to "
                "null, or start from the 16-bit model"
            )
        return str(folder)
    return str(_quantized(folder, name, quantization))


def check_format(base: str, base_format: BaseFormat | None, quantization: Quantization | None) -> None:
    """Raise ValueError if ``model.base_format`` is given with ``model.quantize``, or with a model's name on the hub."""
    if base_format is not None and quantization is not None:
        raise ValueError(
            f"model.base_format is {base_format!r} and model.quantize {quantization.format!r}; the first takes a copy "
            "that `qerl quantize` wrote, the second makes one: give one of them"
        )
    if base_format is not None and is_hub_name(base):
        raise ValueError(
            f"model.base_format is {base_format!r}, which takes the copy next to a folder, and {base} is a name on the "
            f"hub: give --model.quantize {base_format}"
        )


def _converted(folder: Path, name: str, reasons: list[str]) -> Path:
    packed = declared_layout(folder) is not None
    settings = {"convert to": "W4A16" if packed else "16 bits", "version": convert.VERSION}
    label = f"{name}-{'w4a16' if packed else 'text'}"
    made = made_once(folder, label, settings, lambda copy: convert.convert_checkpoint(folder, copy))
    form = "4-bit weights with 16-bit activations" if packed else "a text model"
    rank_zero_info(f"{name} is read as {form}, from {made}: {'; '.join(reasons)}")
    return made


def _quantized(folder: Path, name: str, quantization: Quantization) -> Path:
    source = quantization.calibration
    method = method_of(quantization.method, source)
    settings = {**asdict(quantization), "method": method, "version": quantize.VERSION}
    if source is None:
        settings |= {"samples": None, "length": None}
    elif Path(source).is_file():
        settings["calibration"] = hashlib.sha256(Path(source).read_bytes()).hexdigest()

    def make(output: Path) -> None:
        rank_zero_info(f"{name} is quantised to {quantization.format} once, into {output}")
        calibration = None
        if source is not None:
            calibration = read_calibration(source, folder, samples=quantization.samples, length=quantization.length)
        quantize.quantize_checkpoint(
            folder,
            output,
            format=quantization.format,
            method=method,
            ignore=quantization.ignore,
            calibration=calibration,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    made = made_once(folder, f"{name}-{quantization.format}", settings, make)
    rank_zero_info(f"base: {name} in {quantization.format}, {made}")
    return made
