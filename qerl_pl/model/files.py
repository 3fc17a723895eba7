"""Read a checkpoint folder in Hugging Face layout: its config.json, and its safetensors files tensor by tensor.

Of a checkpoint of a vision-language model (``WITH_VISION``), only the language model is read, as if it were stored
alone: for a prompt of text, the whole model computes exactly what its language model does.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qerl_pl.common.files import check_readable

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MODELOPT_CONFIG = "hf_quant_config.json"
WITH_VISION = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Maps the ``model_type`` of supported vision-language models to the ``model_type`` of their language model. The value
is used if the language model's configuration, ``text_config`` in config.json, does not give its own ``model_type``."""
PREFIXES = {
    "language_model.model.": "model.",  # written by transformers 4, and found in the hub's checkpoints
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Maps prefixes of the names that the language model's tensors have in a checkpoint of a vision-language model to the
prefixes that they have in a checkpoint of the language model alone."""
NOT_USED = "its vision part is not used"
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
"""Endings of the names of files that torch writes, which are pickles."""
_OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


class _Place(NamedTuple):
    """Location of a tensor in a checkpoint: the file and the stored tensor's name. If the stored tensor holds matrices
    of all experts, ``expert`` has the index of the expert and the rows of the matrix within this expert's part, which
    may hold both gate and up."""

    file: str
    stored: str
    expert: tuple[int, slice] | None = None


class Checkpoint:
    """Tensors of a checkpoint folder by name; files are memory-mapped, and ``read`` reads one tensor. Tensors for
    multi-token prediction, which neither training nor sampling uses, are left out. Stacked experts
    (``mlp.experts.gate_up_proj``, [E, 2I, H] for E experts of inner size I and hidden size H) are presented as matrices
    with names such as ``mlp.experts.3.up_proj.weight``. Raises ValueError if the folder has no model, or a file is
    missing, truncated or not safetensors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"model folder {self.path} does not exist; expected a Hugging Face checkpoint folder")
        if not (self.path / CONFIG).is_file():
            inside = ", ".join(sorted(str(file.parent) for file in self.path.glob(f"*/{CONFIG}"))[:8])
            hint = f"give one of the folders in it that have one: {inside}" if inside else "give a model's folder"
            raise ValueError(f"{self.path} has no {CONFIG}, so it is not a model in Hugging Face layout; {hint}")
        self._files = {name: _open(self.path / name) for name in self._file_names()}
        config = read_json(self.path / CONFIG)
        text_only, left_out = has_vision(config), _drafting(config)
        self._stored: dict[str, _Place] = {}
        for file_name, file in self._files.items():
            for stored in file.keys():  # noqa: SIM118
                name = text_name(stored) if text_only else stored
                if not name or name.startswith(left_out):
                    continue
                for part, place in _expert_places(name, _Place(file_name, stored), file.get_slice(stored).get_shape()):
                    if part in self._stored:
                        both = " and ".join(f"{file} ({held})" for file, held, _ in (self._stored[part], place))
                        raise ValueError(f"{self.path} has the tensor {part} twice, in {both}; remove one of them")
                    self._stored[part] = place

    def _file_names(self) -> list[str]:
        if (self.path / INDEX).is_file():
            weight_map = read_json(self.path / INDEX).get("weight_map")
            names = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not names or not all(isinstance(name, str) and name and "/" not in name for name in names):
                raise ValueError(f"{self.path / INDEX} has no weight_map of names of tensors to names of files")
            return sorted(set(names))
        names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not names:
            pickles = sorted(file.name for kind in PICKLES for file in self.path.glob(f"*{kind}"))
            hint = f": {pickles[0]} is a pickle that may run code; save the model as safetensors" if pickles else ""
            raise ValueError(f"{self.path} has no .safetensors files; weights in other formats are not read{hint}")
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
        expert, whole = self._stored[name].expert, self._slice(name).get_shape()
        return whole if expert is None else [expert[1].stop - expert[1].start, whole[2]]

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype, e.g. BF16, F8_E4M3 or U8, without reading its data."""
        return self._slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU, perhaps as a view of the memory-mapped file, valid only as long as this object
        exists."""
        file, stored, expert = self._stored[name]
        return self._files[file].get_tensor(stored) if expert is None else self._slice(name)[expert]

    def _slice(self, name: str) -> Any:  # safetensors does not name the class
        file, stored, _ = self._stored[name]
        return self._files[file].get_slice(stored)


def _drafting(config: Mapping) -> tuple[str, ...]:
    """Return the name prefixes of tensors for multi-token prediction, which some families store as blocks after the
    model's last block, and which neither training nor sampling uses."""
    first, number = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(first) is not int or type(number) is not int:
        return ()
    return tuple(f"model.layers.{block}." for block in range(first, first + number))


def _expert_places(name: str, place: _Place, shape: list[int]) -> Iterator[tuple[str, _Place]]:
    """Yield the name and location of a stored tensor or, if experts are stacked in it, of their matrices."""
    module, _, leaf = name.rpartition(".")
    if not module.endswith(".mlp.experts") or leaf not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        yield name, place
        return
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    rows = shape[1] // len(parts)
    for expert in range(shape[0]):
        for number, part in enumerate(parts):
            of_part = slice(number * rows, (number + 1) * rows)
            yield f"{module}.{expert}.{part}.weight", place._replace(expert=(expert, of_part))


def model_config(path: Path) -> Mapping:
    """Read config.json of a checkpoint folder. For a vision-language model, return the config.json that its language
    model would have if it were stored alone, including values that ``text_config`` leaves out because they are
    defaults."""
    config = read_json(path / CONFIG)
    if not has_vision(config):
        return config
    text = {**config["text_config"], **{name: config[name] for name in _OF_THE_WHOLE if name in config}}
    family = text.pop("model_type", WITH_VISION[config["model_type"]])
    if family not in CONFIG_MAPPING or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"text_config of a {config['model_type']!r} model has model_type {family!r}, not a text model")
    if any(path.glob("*.safetensors")):  # else nothing says whether the checkpoint stores a head
        text["tie_word_embeddings"] = "lm_head.weight" not in Checkpoint(path)
    text = json.loads(CONFIG_MAPPING[family].from_dict(text).to_json_string(use_diff=False))
    return {**text, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}


def has_vision(config: Mapping) -> bool:
    """Return whether a config.json describes a vision-language model whose vision model can be left out."""
    return config.get("model_type") in WITH_VISION and isinstance(config.get("text_config"), Mapping)


def text_name(name: str) -> str | None:
    """Translate a tensor's name in a checkpoint of a vision-language model to its name in a checkpoint of the language
    model alone; None for tensors of the vision model."""
    for stored, plain in PREFIXES.items():
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return None


def read_json(path: Path) -> Mapping:
    """Read a JSON file; raise ValueError if it does not hold a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _open(path: Path) -> safe_open:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {INDEX} names it: copy or download it")
    check_readable(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: copy or download it again ({error})") from error
