"""Inspect published NVFP4 checkpoints: their contents, and what has to change for 16-bit activations (W4A16).

Published checkpoints may have features that a W4A16 base does not support: scales of activations and of the KV cache,
linears in FP8, a quantised head, and different tensor scales of q/k/v or of gate/up, which engines fuse into one
matrix. ``convert`` removes these features. The format of a linear is derived from its tensors; the lists of excluded
modules in config.json and hf_quant_config.json are redundant and are not read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

from qerl_pl.common.files import in_bytes
from qerl_pl.model.files import CONFIG, Checkpoint, read_json
from qerl_pl.model.text_part import NOT_USED, has_vision
from qerl_pl.quant.layouts import COMPRESSED_NVFP4, MODELOPT_NVFP4, Layout, quantization_config, read_layout
from qerl_pl.quant.nvfp4 import BLOCK
from qerl_pl.quant.selection import FUSED, block_of

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
    """Kinds of tensors in a checkpoint, found from the headers of its files."""

    packed: dict[str, set[str]] = field(default_factory=dict)
    """Maps the name of each linear in NVFP4 to the suffixes of its tensors, which are ``COMPRESSED`` or
    ``MODELOPT``."""
    modules: set[str] = field(default_factory=set)
    """Names of all modules that have a tensor."""
    fp8: list[str] = field(default_factory=list)
    """Names of linears in FP8."""
    activations: list[str] = field(default_factory=list)
    """Names of tensors with scales of activations."""
    cache: list[str] = field(default_factory=list)
    """Names of tensors with scales of the KV cache."""

    def leaves(self, linear: str) -> Set[str]:
        """Return the suffixes of the tensors of a linear's quantised weight; empty if it is not quantised."""
        return self.packed.get(linear, FP8 if linear in self.fp8 else set())


def conversion_reasons(path: Path) -> list[str]:
    """List the reasons why a checkpoint has to be converted before it can be used as a base; only config.json and
    headers are read.

    Returns:
        Descriptions; none if the checkpoint can be used as it is, or if it is neither in NVFP4 nor has a vision part.

    Raises:
        ValueError: the checkpoint is in NVFP4, but damaged or in an unsupported variant, or it has a vision part and is
            in another 4-bit format.
    """
    config = quantization_config(path)
    reasons = [NOT_USED] if has_vision(read_json(path / CONFIG)) else []
    if config is None:
        return reasons
    if "NVFP4" not in declared_formats(path, config):
        if reasons:
            raise ValueError(
                f"{path} has a vision part and is quantised, but not to NVFP4; start from the 16-bit model"
            )
        return []
    checkpoint = Checkpoint(path)
    stored = read_stored(checkpoint)
    if stored.activations or not _is_weight_only(config):
        reasons.append("it quantises activations too (W4A4): their scales are ignored")
    if stored.cache or config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        reasons.append("it quantises the key/value cache: ignored, the cache stays in 16 bits")
    if stored.fp8:
        extra = sum(checkpoint.num_weights(f"{name}.weight") for name in stored.fp8)
        reasons.append(
            f"{len(stored.fp8)} linears are in FP8: held in 16 bits, {in_bytes(2 * extra)} instead of {in_bytes(extra)}"
        )
    if outside := [name for name in stored.packed if block_of(name) is None]:
        reasons.append(f"{', '.join(outside)} is packed: held in 16 bits, as engines do embeddings and heads")
    if apart := [group for group in fused_packed(path, stored) if len(_tensor_scales(checkpoint, stored, group)) > 1]:
        reasons.append(f"{len(apart)} groups of linears that engines fuse have tensor scales of their own: made equal")
    return reasons


def declared_formats(path: Path, config: Mapping) -> set[str]:
    """Return which of the formats "NVFP4" and "FP8" a quantisation config gives for linears; empty if neither.

    Args:
        path: folder of the checkpoint, for error messages.
        config: result of ``quantization_config``.

    Raises:
        ValueError: the config combines NVFP4 with an unsupported format, or is not valid.
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
    """Return the layout in which a checkpoint stores packed linears, if it can be used as a base directly or after
    conversion.

    Weights are not read. None means that the checkpoint is not quantised.

    Raises:
        ValueError: the quantisation is not supported.
    """
    config = quantization_config(path)
    if config is None or "NVFP4" not in declared_formats(path, config):
        return read_layout(path)
    return COMPRESSED_NVFP4 if config.get("quant_method") == "compressed-tensors" else MODELOPT_NVFP4


def read_stored(checkpoint: Checkpoint) -> Stored:
    """Find the linears in NVFP4 and FP8, and the scales of activations and KV cache, by the names, dtypes and shapes of
    a checkpoint's tensors.

    Raises:
        ValueError: a quantised linear lacks a tensor, has a wrong shape, or is stored in an unsupported way.
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
    found.modules |= leaves.keys()
    for module, held in leaves.items():
        quantised = held & QUANTISED
        kind = checkpoint.dtype(f"{module}.weight") if "weight" in quantised else ""
        if quantised in (COMPRESSED, MODELOPT):
            _check_packed(checkpoint, module, quantised)
            found.packed[module] = quantised
        elif quantised == FP8 and kind == "F8_E4M3":
            found.fp8.append(module)
        elif quantised - {"weight"} or kind in ("U8", "I8", "I32") or kind.startswith("F8"):
            if quantised == {"weight"}:
                raise ValueError(
                    f"{checkpoint.path}: {module}.weight is {kind} {checkpoint.shape(f'{module}.weight')} and has no "
                    "scales; expected floating point, or codes with their scales"
                )
            raise ValueError(f"{checkpoint.path}: {module} {_fault(quantised)}")
    return found


def fused_packed(path: Path, stored: Stored) -> list[list[str]]:
    """Group the NVFP4 linears of the decoder blocks such that linears that engines fuse into one matrix are in one
    group.

    Raises:
        ValueError: of the linears of a fused group, some are in NVFP4 and some are not.
    """
    groups = []
    for name in stored.packed:
        parent, dot, leaf = name.rpartition(".")
        group = [f"{parent}{dot}{member}" for member in FUSED.get(leaf, (leaf,))]
        group = [member for member in group if member in stored.modules]
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
    return {checkpoint.read(f"{name}.{_tensor_scale(stored.packed[name])}").double().item() for name in group}


def _tensor_scale(leaves: set[str]) -> str:
    return "weight_global_scale" if leaves == COMPRESSED else "weight_scale_2"


def _check_packed(checkpoint: Checkpoint, module: str, leaves: set[str]) -> None:
    codes = checkpoint.shape(f"{module}.{'weight_packed' if leaves == COMPRESSED else 'weight'}")
    scales = checkpoint.shape(f"{module}.weight_scale")
    if len(codes) != 2 or scales != [codes[0], 2 * codes[1] // BLOCK] or 2 * codes[1] % BLOCK:
        raise ValueError(
            f"{checkpoint.path}: {module} has codes {codes} and block scales {scales}; expected [N, K/2] and [N, K/16]"
        )
    whole = checkpoint.shape(f"{module}.{_tensor_scale(leaves)}")
    if math.prod(whole) != 1:
        raise ValueError(f"{checkpoint.path}: {module} has tensor scales {whole}; expected one number")


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
        return f"is incomplete: it has {', '.join(sorted(held))} and no {', '.join(sorted(whole - held))}"
    return f"is stored as {', '.join(sorted(held))}, which is neither NVFP4, FP8 nor 16 bits"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
