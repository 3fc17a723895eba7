"""NVFP4 checkpoints as others publish them: what they hold, and what has to change for 16-bit activations (W4A16).

Published checkpoints carry what a W4A16 base has no use for: scales of activations and of the key/value cache, linears
in FP8, a quantised head, tensor scales that differ within q/k/v or gate/up, which engines fuse. ``convert`` removes it.
What a linear is stored as is taken from its tensors; the lists of excluded modules in config.json and
hf_quant_config.json only repeat that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

from qerl_pl.quant.files import CONFIG, Checkpoint
from qerl_pl.quant.layouts import COMPRESSED_NVFP4, MODELOPT_NVFP4, Layout, quantization_config, read_layout
from qerl_pl.quant.nvfp4 import BLOCK
from qerl_pl.quant.plan import FUSED, block_of

NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
FP8_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN")
COMPRESSED = {"weight_packed", "weight_scale", "weight_global_scale"}
MODELOPT = {"weight", "weight_scale", "weight_scale_2"}
FP8 = {"weight", "weight_scale"}
ACTIVATIONS = {"input_scale", "input_global_scale", "output_scale"}
CACHE = {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"}
QUANTISED = COMPRESSED | MODELOPT | {"weight_zero_point", "weight_g_idx", "weight_shape", "pre_quant_scale"}


@dataclass
class Stored:
    """What a checkpoint holds, from the headers of its files."""

    packed: dict[str, set[str]] = field(default_factory=dict)
    """Linears in NVFP4, and the leaves of their tensors' names: ``COMPRESSED`` or ``MODELOPT``."""
    fp8: list[str] = field(default_factory=list)
    """Linears in FP8."""
    activations: list[str] = field(default_factory=list)
    """Tensors that scale activations."""
    cache: list[str] = field(default_factory=list)
    """Tensors that scale the key/value cache."""

    def leaves(self, linear: str) -> Set[str]:
        """What follows a linear's name in the names of the tensors of its quantised weight; empty if it has none."""
        return self.packed.get(linear, FP8 if linear in self.fp8 else set())


def conversion_reasons(path: Path) -> list[str]:
    """Why a checkpoint has to be converted before it can be a base; reads config.json and headers.

    Returns:
        Nothing for a checkpoint that is used as it is, one that is not in NVFP4 among them.

    Raises:
        ValueError: it is in NVFP4, but damaged or in a variant that cannot be read.
    """
    config = quantization_config(path)
    if config is None or "NVFP4" not in declared_formats(path, config):
        return []
    checkpoint = Checkpoint(path)
    stored = read_stored(checkpoint)
    reasons = []
    if stored.activations or not _is_weight_only(config):
        reasons.append("it quantises activations too (W4A4): their scales are ignored")
    if stored.cache or config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        reasons.append("it quantises the key/value cache: ignored, the cache stays in 16 bits")
    if stored.fp8:
        extra = sum(checkpoint.num_weights(f"{name}.weight") for name in stored.fp8)
        reasons.append(
            f"{len(stored.fp8)} linears are in FP8: held in 16 bits, {2 * extra / 1e9:.3g} GB instead of "
            f"{extra / 1e9:.3g} GB"
        )
    if outside := [name for name in stored.packed if block_of(name) is None]:
        reasons.append(f"{', '.join(outside)} is packed: held in 16 bits, as engines do embeddings and heads")
    if apart := [group for group in fused_packed(path, stored) if len(_tensor_scales(checkpoint, stored, group)) > 1]:
        reasons.append(f"{len(apart)} groups of linears that engines fuse have tensor scales of their own: made equal")
    return reasons


def declared_formats(path: Path, config: Mapping) -> set[str]:
    """Which of "NVFP4" and "FP8" a quantisation config names for linears; empty where it names neither.

    Args:
        path: of the checkpoint, for messages.
        config: see ``quantization_config``.

    Raises:
        ValueError: NVFP4 comes with a format that cannot be read, or the config is not valid.
    """
    method = str(config.get("quant_method"))
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo"))
        layers = config.get("quantized_layers") or {}
        names = [str(layer.get("quant_algo")) for layer in layers.values()] if "MIXED" in algorithm else [algorithm]
        found = {"NVFP4" if name in NVFP4_ALGORITHMS else "FP8" if name in FP8_ALGORITHMS else name for name in names}
    elif method == "compressed-tensors":
        try:
            groups = QuantizationConfig.model_validate(config).config_groups.values()
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ValueError(f"{path / CONFIG}: its quantization_config is not valid: {_one_line(error)}") from error
        weights = [group.weights for group in groups if not isinstance(group, list)]
        found = {_name_of(scheme) for scheme in weights if scheme is not None}
    else:
        return set()
    if "NVFP4" in found and (strange := found - {"NVFP4", "FP8"}):
        raise ValueError(
            f"{path} has linears in {', '.join(sorted(strange))}; with NVFP4 only FP8 and 16 bits are read"
        )
    return found & {"NVFP4", "FP8"}


def declared_layout(path: Path) -> Layout | None:
    """How linears are packed in a checkpoint that can be a base as it is or converted; reads no weights.

    Raises:
        ValueError: its quantisation is none that can be read.
    """
    config = quantization_config(path)
    if config is None or "NVFP4" not in declared_formats(path, config):
        return read_layout(path)
    return COMPRESSED_NVFP4 if config.get("quant_method") == "compressed-tensors" else MODELOPT_NVFP4


def read_stored(checkpoint: Checkpoint) -> Stored:
    """Sort the tensors of a checkpoint by what they are.

    Raises:
        ValueError: a quantised linear lacks a tensor, has a wrong shape, or is stored in a way that cannot be read.
    """
    leaves: dict[str, set[str]] = defaultdict(set)
    found = Stored()
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        leaves[module].add(leaf)
        if leaf in ACTIVATIONS:
            found.activations.append(name)
        elif leaf in CACHE:
            found.cache.append(name)
    for module, held in leaves.items():
        quantised = held & QUANTISED
        kind = checkpoint.dtype(f"{module}.weight") if "weight" in quantised else ""
        if quantised in (COMPRESSED, MODELOPT):
            _check_packed(checkpoint, module, quantised)
            found.packed[module] = quantised
        elif quantised == FP8 and kind == "F8_E4M3":
            found.fp8.append(module)
        elif quantised - {"weight"} or kind in ("U8", "I8", "I32") or kind.startswith("F8"):
            raise ValueError(f"{checkpoint.path}: {module} {_fault(quantised)}")
    return found


def fused_packed(path: Path, stored: Stored) -> list[list[str]]:
    """Packed linears of the decoder blocks, those that engines fuse into one matrix together.

    Raises:
        ValueError: a part of what engines fuse is in NVFP4 and a part is not.
    """
    groups = []
    for name in stored.packed:
        parent, dot, leaf = name.rpartition(".")
        group = [f"{parent}{dot}{member}" for member in FUSED.get(leaf, (leaf,))]
        if dense := [member for member in group if member not in stored.packed]:
            other = "FP8" if set(dense) & set(stored.fp8) else "16 bits"
            raise ValueError(
                f"{path}: {name} is in NVFP4 and {dense[0]} in {other}; engines fuse {', '.join(group)} into one "
                "matrix, which has one format"
            )
        if name == group[0] and block_of(name) is not None:
            groups.append(group)
    return groups


def _tensor_scales(checkpoint: Checkpoint, stored: Stored, group: Sequence[str]) -> set[float]:
    leaf = {name: "weight_global_scale" if stored.packed[name] == COMPRESSED else "weight_scale_2" for name in group}
    return {checkpoint.read(f"{name}.{leaf[name]}").double().item() for name in group}


def _check_packed(checkpoint: Checkpoint, module: str, leaves: set[str]) -> None:
    codes = checkpoint.shape(f"{module}.{'weight_packed' if leaves == COMPRESSED else 'weight'}")
    scales = checkpoint.shape(f"{module}.weight_scale")
    if len(codes) != 2 or scales != [codes[0], 2 * codes[1] // BLOCK] or 2 * codes[1] % BLOCK:
        raise ValueError(
            f"{checkpoint.path}: {module} has codes {codes} and block scales {scales}; expected [N, K/2] and [N, K/16]"
        )


def _is_weight_only(config: Mapping) -> bool:
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    if groups:
        return not any(group.get("input_activations") for group in groups)
    return config.get("quant_algo") == "W4A16_NVFP4"


def _name_of(scheme: QuantizationArgs) -> str:
    if (scheme.num_bits, scheme.type, scheme.group_size) == (4, "float", BLOCK) and scheme.symmetric:
        return "NVFP4"
    return "FP8" if (scheme.num_bits, scheme.type) == (8, "float") else f"{scheme.type}{scheme.num_bits}"


def _fault(held: set[str]) -> str:
    if "pre_quant_scale" in held:
        return "scales its inputs (pre_quant_scale, NVFP4_AWQ), which no engine here runs weight-only"
    whole = COMPRESSED if held & (COMPRESSED - MODELOPT) else MODELOPT
    if held < whole:
        return f"is half there: it has {', '.join(sorted(held))} and no {', '.join(sorted(whole - held))}"
    return f"is stored as {', '.join(sorted(held))}, which is neither NVFP4, FP8 nor 16 bits"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
