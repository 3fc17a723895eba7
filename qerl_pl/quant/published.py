"""Inspect published NVFP4 checkpoints: what has to be changed before they can be used with 16-bit activations (W4A16).

They may have features that training does not support, and that ``convert`` removes: scales of activations and of the KV
cache, linear layers in FP8, a quantised output head, and different tensor scales of linears that engines fuse. The
format of a linear layer is derived from its tensors, not from lists of excluded modules in configs.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from qerl_pl.common.files import in_bytes
from qerl_pl.model.files import CONFIG, NOT_USED, Checkpoint, has_vision, read_json
from qerl_pl.model.layers import block_of
from qerl_pl.quant.declared import declared_formats, is_weight_only, quantises_cache, quantization_config
from qerl_pl.quant.nvfp4 import BLOCK
from qerl_pl.quant.selection import fused_with

COMPRESSED = {"weight_packed", "weight_scale", "weight_global_scale"}
MODELOPT = {"weight", "weight_scale", "weight_scale_2"}
FP8 = {"weight", "weight_scale"}
ACTIVATIONS = {"input_scale", "input_global_scale", "output_scale"}
CACHE = {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"}
QUANTISED = COMPRESSED | MODELOPT | {"weight_zero_point", "weight_g_idx", "weight_shape", "pre_quant_scale"}


@dataclass
class Stored:
    """Names of a checkpoint's linear layers and tensors by kind, derived from the headers of its files."""

    packed: dict[str, set[str]] = field(default_factory=dict)
    """Linear layers in NVFP4: maps each layer's name to the suffixes of its tensors, ``COMPRESSED`` or ``MODELOPT``."""
    modules: set[str] = field(default_factory=set)
    """Names of all modules that have a tensor."""
    fp8: list[str] = field(default_factory=list)
    """Names of linears in FP8."""
    activations: list[str] = field(default_factory=list)
    """Names of tensors with scales of activations."""
    cache: list[str] = field(default_factory=list)
    """Names of tensors with scales of the KV cache."""

    def leaves(self, linear: str) -> set[str]:
        """Return the suffixes of the tensors of a linear layer's quantised weight; empty if it is not quantised."""
        return self.packed.get(linear, FP8 if linear in self.fp8 else set())


def conversion_reasons(path: Path) -> list[str]:
    """List the reasons, as texts for the user, why a published checkpoint has to be converted before training can start
    from it. The list is empty if training can start from it as it is, and also for checkpoints with neither NVFP4
    linear layers nor a vision model, which ``convert`` does not handle. Only config.json, the headers of the weight
    files, and tensor scales are read."""
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
    if stored.activations or not is_weight_only(config):
        reasons.append("it quantises activations too (W4A4): their scales are ignored")
    if stored.cache or quantises_cache(config):
        reasons.append("it quantises the key/value cache: ignored, the cache stays in 16 bits")
    if stored.fp8:
        extra = sum(checkpoint.num_weights(f"{name}.weight") for name in stored.fp8)
        reasons.append(
            f"{len(stored.fp8)} linears are in FP8: held in 16 bits, {in_bytes(2 * extra)} instead of {in_bytes(extra)}"
        )
    if outside := [name for name in stored.packed if block_of(name) is None]:
        reasons.append(f"{', '.join(outside)} is in NVFP4: held in 16 bits, as engines do embeddings and heads")
    scales = {name: checkpoint.read(f"{name}.{_tensor_scale(leaves)}").item() for name, leaves in stored.packed.items()}
    if apart := [group for group in fused_packed(path, stored) if len({scales[name] for name in group}) > 1]:
        reasons.append(f"{len(apart)} groups of linears that engines fuse have tensor scales of their own: made equal")
    return reasons


def read_stored(checkpoint: Checkpoint) -> Stored:
    """Return the names of a checkpoint's NVFP4 and FP8 linear layers, and of its scales of activations and KV cache,
    found by the names, dtypes and shapes of its tensors. Raises ValueError for a linear layer that is quantised in
    another way."""
    leaves: dict[str, set[str]] = defaultdict(set)
    stored = Stored()
    for name in checkpoint.names():
        module, _, leaf = name.rpartition(".")
        leaves[module].add(leaf)
        if leaf in ACTIVATIONS:
            stored.activations.append(name)
        elif leaf in CACHE:
            stored.cache.append(name)
    stored.modules |= leaves.keys()
    for module, all_leaves in leaves.items():
        quantised = all_leaves & QUANTISED
        kind = checkpoint.dtype(f"{module}.weight") if "weight" in quantised else ""
        if quantised in (COMPRESSED, MODELOPT):
            _check_packed(checkpoint, module, quantised)
            stored.packed[module] = quantised
        elif quantised == FP8 and kind == "F8_E4M3":
            stored.fp8.append(module)
        elif quantised - {"weight"} or kind in ("U8", "I8", "I32") or kind.startswith("F8"):
            if quantised == {"weight"}:
                raise ValueError(
                    f"{checkpoint.path}: {module}.weight is {kind} {checkpoint.shape(f'{module}.weight')} and has no "
                    "scales; expected floating point, or codes with their scales"
                )
            raise ValueError(f"{checkpoint.path}: {module} {_fault(quantised)}")
    return stored


def fused_packed(path: Path, stored: Stored) -> list[list[str]]:
    """Group the NVFP4 linear layers of the decoder blocks by the matrices into which inference engines fuse them, such
    as q, k and v; returns lists of names. Raises ValueError if only some layers of a group are in NVFP4."""
    groups = []
    for name in stored.packed:
        group = fused_with(name, stored.modules)
        if dense := [member for member in group if member not in stored.packed]:
            other = "FP8" if set(dense) & set(stored.fp8) else "16 bits"
            raise ValueError(
                f"{path}: {name} is in NVFP4 and {dense[0]} in {other}; engines fuse {', '.join(group)} into one "
                "matrix, which has one format"
            )
        if name == group[0] and block_of(name) is not None:
            groups.append(group)
    return groups


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


def _fault(leaves: set[str]) -> str:
    if "pre_quant_scale" in leaves:
        return "scales its inputs (pre_quant_scale, NVFP4_AWQ), which no engine here runs weight-only"
    whole = COMPRESSED if leaves & (COMPRESSED - MODELOPT) else MODELOPT
    if leaves < whole:
        return f"is incomplete: it has {', '.join(sorted(leaves))} and no {', '.join(sorted(whole - leaves))}"
    return f"is stored as {', '.join(sorted(leaves))}, which is neither NVFP4, FP8 nor 16 bits"
