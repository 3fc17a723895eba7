"""Read the adapter with which a run starts, from a folder that PEFT wrote: its settings, its tensors, and a digest of
the tensors. A resumed run compares digests to check that the folder still holds the same adapter."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.common.files import check_readable
from qerl_pl.model.files import text_name
from qerl_pl.policy.lora_experts import PARAMETERS, adapted, of_experts

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of a model's modules."""
READ = ("r", "lora_alpha", "use_rslora", "modules_to_save")
EXPERTS = ("target_parameters", "rank_pattern", "alpha_pattern")
"""Fields of adapter_config.json that describe adapters on experts."""
WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_pattern", "eva_config", "loftq_config", "corda_config"),
    *("megatron_config", "megatron_core", "ensure_weight_tying", "lora_ga_config"),
)
"""Fields of adapter_config.json that do not change what a trained adapter computes. Which linear layers an adapter
adapts is read from the names of its tensors."""
OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Values of PEFT's ``init_lora_weights`` with which PEFT changes the base's weights. Such an adapter works only with
the changed base, so it is refused."""


class StartAdapter(NamedTuple):
    """An adapter from which a run starts."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]
    """Names of the linear layers that it adapts, sorted."""
    modules_to_save: tuple[str, ...]
    """Names of modules that were trained in full."""
    tensors: dict[str, Tensor]
    """fp32 tensors by PEFT's names, on the CPU."""
    base: str
    """Name or folder of the base model for which the adapter was trained; empty if adapter_config.json does not say."""
    expert_rank: int = 0
    """Rank of the adapters on experts; 0 without any."""


def read_start(folder: str | Path) -> StartAdapter:
    """Read an adapter from a folder that PEFT wrote (adapter_config.json and adapter_model.safetensors). Raises
    ValueError if a file is missing or cannot be read, the adapter uses a feature that is not supported (anything but
    plain LoRA of one rank and alpha), or a tensor is not finite."""
    folder = Path(folder)
    where = f"model.lora.start is {folder}"
    config = _config(folder, where)
    _check_config(config, where)
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).is_file():
            raise ValueError(
                f"{where}, which has {PICKLE}, a pickle that may run code; save the adapter as safetensors"
            )
        raise ValueError(f"{where}, which has no {WEIGHTS}; expected a folder that PEFT's save_pretrained wrote")
    try:
        check_readable(folder / WEIGHTS)
        stored = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where}, whose {WEIGHTS} cannot be read: {error}") from error
    stored = _of_language_model(stored)
    tensors = {name: tensor.float() for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        if not stored[name].is_floating_point() or not tensor.isfinite().all():
            raise ValueError(
                f"{where}, whose tensor {name} ({stored[name].dtype}) is not of finite floating-point numbers"
            )
        if name.endswith(".lora_A.weight") and not of_experts(name) and tensor.shape[:1] != (config["r"],):
            raise ValueError(
                f"{where}, whose tensor {name} has the shape {list(tensor.shape)} where {CONFIG} has r = "
                f"{config['r']}; expected one rank for all linears"
            )
    targets = adapted(tensors)
    if not targets:
        raise ValueError(f"{where}, whose {WEIGHTS} has no tensor NAME.lora_A.weight: it holds no LoRA adapter")
    return StartAdapter(
        config["r"],
        config["lora_alpha"],
        bool(config.get("use_rslora")),
        tuple(targets),
        tuple(config.get("modules_to_save") or ()),
        tensors,
        str(config.get("base_model_name_or_path") or ""),
        _expert_rank(config, where),
    )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of fp32 tensors and their names, which does not depend on the file that they were read
    from."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(f"{name}{list(tensors[name].shape)}".encode())
        sha.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def is_of_other_base(start: StartAdapter, *names: str) -> bool:
    """Return whether an adapter was trained for another base model than the one with the given ``names``, which are its
    name on the hub and its folder. Returns False if the adapter names no base.

    Only the last components of folders, files and hub names are compared, without .gguf. Two names also count as the
    same base if one begins with the other, because the name of a 4-bit copy begins with the name of its model.
    """
    trained_for = Path(start.base).name.lower()
    others = [Path(name).name.lower().removesuffix(".gguf") for name in names]
    return bool(trained_for) and not any(
        trained_for.startswith(other) or other.startswith(trained_for) for other in others
    )


def check_fits(start: StartAdapter, *, num_layers: int, hidden: int) -> None:
    """Raise ValueError if an adapter has another number of layers, or another hidden size, than the run's base."""
    layers = {name.split(".layers.")[1].split(".")[0] for name in start.tensors if ".layers." in name}
    if layers != {str(index) for index in range(num_layers)}:
        raise ValueError(
            f"model.lora.start is an adapter of {len(layers)} decoder layers, and model.base has {num_layers}; give an "
            "adapter of this base that adapts the same linears in every layer"
        )
    inputs = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
    for name, tensor in start.tensors.items():
        if name.endswith("lora_A.weight") and name.split(".")[-3] in inputs and tensor.shape[-1] != hidden:
            raise ValueError(
                f"model.lora.start is an adapter of a model of hidden size {tensor.shape[-1]} ({name}), and model.base "
                f"has {hidden}; give an adapter of this base"
            )


def _of_language_model(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an adapter of a vision-language model to what they would be called in an adapter of the
    language model alone, and leave out those of the vision model, which prompts of text do not use. Tensors of other
    adapters are returned as they are."""
    names = {name: text_name(name.removeprefix(PREFIX)) for name in stored}
    if not any(".language_model." in name for name in stored):
        return dict(stored)
    return {f"{PREFIX}{name}": stored[whole] for whole, name in names.items() if name is not None}


def _expert_rank(config: Mapping[str, Any], where: str) -> int:
    """Return the rank of the adapters on experts that ``config`` describes, or 0. Raises ValueError if gate_up_proj and
    down_proj of all experts are not both adapted, their ranks or alphas differ, or their scale is not that of the
    adapters on other linear layers."""
    parameters, ranks, alphas = (config.get(name) or {} for name in EXPERTS)
    if not (parameters or ranks or alphas):
        return 0
    rank, alpha, root = config["r"], config["lora_alpha"], 0.5 if config.get("use_rslora") else 1
    if isinstance(ranks, dict) and isinstance(alphas, dict):
        rank_of, alpha_of = ({_whole_name(name): value for name, value in of.items()} for of in (ranks, alphas))
        names = {_whole_name(name) for name in parameters}
        if names == set(PARAMETERS) and rank_of.keys() | alpha_of.keys() <= names:
            found = {(rank_of.get(name, rank), alpha_of.get(name, alpha)) for name in PARAMETERS}
            of_experts, own = found.pop()
            if not found and math.isclose(own / of_experts**root, alpha / rank**root):
                return of_experts
    raise ValueError(
        f"{where}, whose {CONFIG} has target_parameters = {parameters!r}, rank_pattern = {ranks!r} and alpha_pattern = "
        f"{alphas!r}; expected {' and '.join(PARAMETERS)} with one rank, and the same alpha / rank as other linears"
    )


def _whole_name(parameter: str) -> str:
    """Return the name in ``PARAMETERS`` (of weights of experts) that equals ``parameter`` or ends with its components,
    such as down_proj, since PEFT accepts both; return ``parameter`` itself if there is no such name."""
    return next((name for name in PARAMETERS if f".{name}".endswith(f".{parameter}")), parameter)


def _config(folder: Path, where: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(
            f"{where}, which is no folder; give one that PEFT's save_pretrained wrote. To resume a run whose folder is "
            "gone, set model.lora.start to null and rank, alpha, rslora and targets to the run's: its checkpoints hold "
            "the adapter"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{where}, which has no {CONFIG}; give a folder that PEFT's save_pretrained wrote") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}, whose {CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{where}, whose {CONFIG} is no mapping")
    return config


def _check_config(config: Mapping[str, Any], where: str) -> None:
    if config.get("peft_type") != "LORA" or config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"{where}, an adapter of peft_type {config.get('peft_type')!r} and task_type {config.get('task_type')!r}; "
            "expected LORA and CAUSAL_LM"
        )
    plain = LoraConfig()
    known = (*READ, *EXPERTS, *WITHOUT_EFFECT, "peft_type", "task_type", "init_lora_weights")
    for name, value in config.items():
        if name not in known and value and value != getattr(plain, name, None):
            raise ValueError(
                f"{where}, whose {CONFIG} has {name} = {value!r}, which is not supported; expected plain LoRA"
            )
    way = config.get("init_lora_weights")
    if isinstance(way, str) and way.lower().startswith(OTHER_BASE):
        raise ValueError(
            f"{where}, whose initialisation (init_lora_weights = {way!r}) changed the base's weights; expected an "
            "adapter of the base itself (PEFT's path_initial_model_for_weight_conversion makes one of all but loftq)"
        )
    rank, alpha, saved = config.get("r"), config.get("lora_alpha"), config.get("modules_to_save") or []
    if not isinstance(rank, int) or isinstance(rank, bool) or not isinstance(alpha, int | float):
        raise ValueError(f"{where}, whose {CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}; expected numbers")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ValueError(f"{where}, whose {CONFIG} has use_rslora = {config['use_rslora']!r}; expected true or false")
    if not isinstance(saved, list) or not all(isinstance(module, str) for module in saved):
        raise ValueError(f"{where}, whose {CONFIG} has modules_to_save = {saved!r}; expected names")
