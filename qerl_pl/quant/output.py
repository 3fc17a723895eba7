"""A checkpoint folder in the making: files are added one by one, and it appears under its name when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.quant.files import CONFIG, INDEX, read_json

REPORT = "quantization_report.json"
_MANIFEST = "manifest.json"
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class OutputFolder:
    """Files are written to ``OUTPUT.partial`` beside the output, each under a temporary name and then renamed.

    The folder remembers in a manifest what is finished, so the next run with equal settings takes up from there.

    Args:
        output: folder to make; must not exist, or be empty.
        settings: what the files depend on, as JSON; stored in the report.

    Raises:
        ValueError: the output is not empty, or the temporary folder holds a run with other settings.
    """

    def __init__(self, output: Path, settings: Mapping[str, object]) -> None:
        self.output, self.settings = output, dict(settings)
        self.partial = output.with_name(f"{output.name}.partial")
        self.done: dict[str, dict] = {}
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"output {output} exists and is not an empty folder; name another one or remove it")
        self.partial.mkdir(parents=True, exist_ok=True)
        if not (self.partial / _MANIFEST).exists():
            return
        manifest = read_json(self.partial / _MANIFEST)
        if manifest["settings"] != self.settings:
            raise ValueError(
                f"{self.partial} holds an unfinished run with other settings ({manifest['settings']}); "
                "repeat those to continue it, or remove the folder"
            )
        self.done = dict(manifest["files"])

    def add(self, file: str, tensors: Mapping[str, Tensor], layers: Sequence[Mapping[str, object]]) -> None:
        """Write one file and remember it, with a report for each layer in it."""
        temporary = self.partial / f"{file}.tmp"
        # One key of metadata only: safetensors writes several in random order, and equal runs should give equal bytes.
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt"})
        os.replace(temporary, self.partial / file)
        self.done[file] = {"tensors": {name: tensor.nbytes for name, tensor in tensors.items()}, "layers": list(layers)}
        _write_json(self.partial / _MANIFEST, {"settings": self.settings, "files": self.done})

    def finish(self, source: Path, config: Mapping[str, object]) -> list[dict]:
        """Add the index, the report, ``config`` and the source's tokenizer and other small files; give it its name.

        Returns:
            The reports of all layers.
        """
        for file in source.iterdir():
            if file.is_file() and file.suffix not in _WEIGHT_FILES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, self.partial / file.name)
        layers = [layer for entry in self.done.values() for layer in entry["layers"]]
        weight_map = {name: file for file, entry in self.done.items() for name in entry["tensors"]}
        size = sum(nbytes for entry in self.done.values() for nbytes in entry["tensors"].values())
        _write_json(self.partial / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        _write_json(self.partial / REPORT, {**self.settings, "layers": layers})
        _write_json(self.partial / CONFIG, config)
        (self.partial / _MANIFEST).unlink()
        os.replace(self.partial, self.output)
        return layers


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(temporary, path)
