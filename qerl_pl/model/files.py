"""Read a checkpoint folder in Hugging Face layout: its config.json, and its safetensors files tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qerl_pl.model.text_part import HEAD, has_vision, text_config, text_name

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MODELOPT_CONFIG = "hf_quant_config.json"


class Checkpoint:
    """Tensors of a checkpoint folder by name; files are memory-mapped, and a tensor is read by ``read``.

    If the checkpoint has a vision part, only the text model's tensors are listed, under the names that they have in a
    checkpoint of the text model alone.

    Args:
        path: folder with config.json and model.safetensors, or with shards and their index.

    Raises:
        ValueError: the folder is missing or has no model, or a file is missing, truncated or not safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"model folder {self.path} does not exist; expected a Hugging Face checkpoint folder")
        if not (self.path / CONFIG).is_file():
            inside = ", ".join(sorted(str(found.parent) for found in self.path.glob(f"*/{CONFIG}"))[:8])
            hint = f"give one of the folders in it that have one: {inside}" if inside else "give a model's folder"
            raise ValueError(f"{self.path} has no {CONFIG}, so it is not a model in Hugging Face layout; {hint}")
        self._files = {name: _open(self.path / name) for name in self._file_names()}
        text_only = has_vision(read_json(self.path / CONFIG))
        self._stored: dict[str, tuple[str, str]] = {}  # name to the file and the name there
        for file_name, file in self._files.items():
            for stored in file.keys():  # noqa: SIM118
                if not (name := text_name(stored) if text_only else stored):
                    continue
                if name in self._stored:
                    both = " and ".join(f"{file} ({held})" for file, held in (self._stored[name], (file_name, stored)))
                    raise ValueError(f"{self.path} has the tensor {name} twice, in {both}; remove one of them")
                self._stored[name] = file_name, stored

    def _file_names(self) -> list[str]:
        if (self.path / INDEX).is_file():
            weight_map = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_file_name, weight_map.values())):
                raise ValueError(f"{self.path / INDEX} has no weight_map of names of tensors to names of files")
            return sorted(set(weight_map.values()))
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self.path} has no .safetensors files; weights in other formats are not read")
        if len(names) > 1 and "model.safetensors" not in names:
            raise ValueError(f"{self.path} has {len(names)} safetensors files but no {INDEX} that says what they hold")
        return ["model.safetensors"] if "model.safetensors" in names else names

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def num_weights(self, name: str) -> int:
        """Return the number of elements of a tensor without reading its data."""
        return math.prod(self.shape(name))

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor without reading its data."""
        return self._slice(name).get_shape()

    def dtype(self, name: str) -> str:
        """Return the name that safetensors has for a tensor's dtype, e.g. BF16, F8_E4M3 or U8, without reading its
        data."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU. The result may be a view of the memory-mapped file, so copy it if it is to be used
        longer than this object."""
        file, stored = self._stored[name]
        return self._files[file].get_tensor(stored)

    def _slice(self, name: str) -> Any:  # safetensors does not name the class
        file, stored = self._stored[name]
        return self._files[file].get_slice(stored)


def model_config(path: Path) -> Mapping:
    """Read config.json of a checkpoint folder; if the checkpoint has a vision part, return the configuration of its
    text model.

    Raises:
        ValueError: the file is no JSON object, or describes no text model.
    """
    config = read_json(path / CONFIG)
    if not has_vision(config):
        return config
    has_head = HEAD in Checkpoint(path) if any(path.glob("*.safetensors")) else None
    return text_config(config, has_head=has_head)


def read_json(path: Path) -> Mapping:
    """Read a JSON file that holds a JSON object.

    Raises:
        ValueError: the file is not JSON, or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {INDEX} names it: copy or download it")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: copy or download it again ({error})") from error
