"""Determine the number formats and the tensor layout of a checkpoint's weights from its quantisation config."""

from collections.abc import Mapping
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

from qerl_pl.model.files import CONFIG, MODELOPT_CONFIG, read_json
from qerl_pl.quant.layouts import BITSANDBYTES_NF4, COMPRESSED_MXFP4, COMPRESSED_NVFP4, MODELOPT_NVFP4, Layout
from qerl_pl.quant.nvfp4 import BLOCK

MODELOPT_FORMATS = {
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), "NVFP4"),
    **dict.fromkeys(("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"), "FP8"),
}
"""Maps ModelOpt's names of quantisation algorithms to formats of weights."""
_VARIANT_KEYS = {"compressed-tensors": "format", "bitsandbytes": "bnb_4bit_quant_type"}
_LAYOUTS: Mapping[tuple[object, object], Layout] = {
    ("compressed-tensors", "nvfp4-pack-quantized"): COMPRESSED_NVFP4,
    ("compressed-tensors", "mxfp4-pack-quantized"): COMPRESSED_MXFP4,
    ("modelopt", "NVFP4"): MODELOPT_NVFP4,
    ("modelopt", "W4A16_NVFP4"): MODELOPT_NVFP4,
    ("bitsandbytes", "nf4"): BITSANDBYTES_NF4,
}
_KNOWN = (
    "unquantised; compressed-tensors nvfp4-pack-quantized and mxfp4-pack-quantized with 16-bit activations; "
    "ModelOpt W4A16_NVFP4; bitsandbytes nf4 without double quantisation"
)


def quantization_config(path: Path) -> Mapping | None:
    """Return a folder's quantisation config, from config.json or ModelOpt's hf_quant_config.json; None if neither has
    one."""
    config = read_json(path / CONFIG).get("quantization_config")
    if config is None and (path / MODELOPT_CONFIG).is_file():
        inner = read_json(path / MODELOPT_CONFIG).get("quantization", {})
        _require_mapping(path / MODELOPT_CONFIG, "quantization", inner)
        config = {"quant_method": "modelopt", **inner}
    if config is None:
        return None
    place = "quantization_config"
    _require_mapping(path / CONFIG, place, config)
    _require_mapping(path / CONFIG, f"{place}.config_groups", config.get("config_groups") or {})
    for name, group in (config.get("config_groups") or {}).items():
        _require_mapping(path / CONFIG, f"{place}.config_groups.{name}", group)
        _require_mapping(path / CONFIG, f"{place}.config_groups.{name}.weights", group.get("weights") or {})
    return config


def _require_mapping(file: Path, name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}: {name} is {str(value)[:80]!r}; expected a mapping")


def is_weight_only(config: Mapping) -> bool:
    """Return whether a quantisation config leaves activations in 16 bits."""
    if groups := (config.get("config_groups") or {}).values():
        return not any(group.get("input_activations") for group in groups)
    return config.get("quant_algo") == "W4A16_NVFP4"


def quantises_cache(config: Mapping) -> bool:
    """Return whether a quantisation config quantises the key/value cache."""
    return bool(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))


def read_layout(path: Path) -> Layout | None:
    """Return the layout (4-bit format and names of tensors) in which a checkpoint stores its 4-bit linear layers; None
    if no layer is quantised. Raises ValueError for a layout, or a quantised KV cache or activations, with which
    training cannot start; of some such checkpoints, the module ``quant/convert.py`` can make a usable copy."""
    config = quantization_config(path)
    if config is None:
        return None
    method = config.get("quant_method")
    variant = config.get(_VARIANT_KEYS.get(str(method), "quant_algo"))
    layout = _LAYOUTS.get((method, variant))
    if layout is None:
        raise ValueError(f"{path} is quantised by {method!r} as {variant!r}; supported: {_KNOWN}")
    if method == "bitsandbytes" and config.get("bnb_4bit_use_double_quant"):
        raise ValueError(f"{path} quantises its scales too (double quantisation); supported: {_KNOWN}")
    if method != "bitsandbytes" and variant != "W4A16_NVFP4" and not is_weight_only(config):
        raise ValueError(f"{path} quantises activations too ({variant}, W4A4); supported: {_KNOWN}")
    sizes = [(key, config.get(key)) for key in ("group_size", "blocksize")]
    for group in (config.get("config_groups") or {}).values():
        sizes.append(("config_groups.weights.group_size", (group.get("weights") or {}).get("group_size")))
    for key, size in sizes:
        if size not in (None, layout.fmt.block):
            raise ValueError(
                f"{path / CONFIG}: quantization_config has {key} {size!r}; its format has {layout.fmt.block} weights "
                "per scale, so one of the two is wrong: take config.json from the folder that the weights are from"
            )
    if quantises_cache(config):
        raise ValueError(f"{path} quantises the key/value cache; supported: {_KNOWN}")
    return layout


def declared_layout(path: Path) -> Layout | None:
    """Return the layout (4-bit format and names of tensors) of a checkpoint's 4-bit linear layers; None if no layer is
    quantised. Unlike ``read_layout``, this raises no error for NVFP4 checkpoints that training can use after a
    conversion by ``quant/convert.py``."""
    config = quantization_config(path)
    if config is None or "NVFP4" not in declared_formats(path, config):
        return read_layout(path)
    return COMPRESSED_NVFP4 if config.get("quant_method") == "compressed-tensors" else MODELOPT_NVFP4


def declared_formats(path: Path, config: Mapping) -> set[str]:
    """Return which of the formats "NVFP4" and "FP8" a quantisation config names. Raises ValueError if it combines NVFP4
    with a format other than FP8."""
    method = str(config.get("quant_method"))
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo"))
        layers = config.get("quantized_layers") or {}
        names = [str(layer.get("quant_algo")) for layer in layers.values()] if "MIXED" in algorithm else [algorithm]
        formats = {MODELOPT_FORMATS.get(name, name) for name in names}
    elif method == "compressed-tensors":
        try:
            groups = QuantizationConfig.model_validate(config).config_groups.values()
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{path / CONFIG}: its quantization_config is not valid: {reason}") from error
        schemes = [group.weights for group in groups if not isinstance(group, list)]
        formats = {_format_of(scheme) for scheme in schemes if scheme is not None}
    else:
        return set()
    if "NVFP4" in formats and (others := formats - {"NVFP4", "FP8"}):
        raise ValueError(f"{path} has linears in {', '.join(sorted(others))}; with NVFP4 only FP8 and 16 bits are read")
    return formats & {"NVFP4", "FP8"}


def _format_of(scheme: QuantizationArgs) -> str:
    if (scheme.num_bits, scheme.type, scheme.group_size) == (4, "float", BLOCK) and scheme.symmetric:
        return "NVFP4"
    return "FP8" if (scheme.num_bits, scheme.type) == (8, "float") else f"{scheme.type}{scheme.num_bits}"
