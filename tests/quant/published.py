"""Make small random checkpoints in the file layouts in which NVIDIA (ModelOpt) and Red Hat (compressed-tensors) publish
quantised models."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl_pl.quant.formats import PackedWeight, round_codes
from qerl_pl.quant.nvfp4 import NVFP4
from tests.reference.dequantize import dequantize_reference

FORMATS = {"NVFP4": "nvfp4-pack-quantized", "FP8": "float-quantized", "FP8_DYNAMIC": "float-quantized"}
FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def read_all(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(path: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """Replace the weights of a checkpoint's folder by ``tensors``: in one file or, with several ``shards``, in several
    files with an index."""
    for file in [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]:
        file.unlink()
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = names[shard::shards]  # a linear's tensors, and those of a fused group, are in different files
        save_file({name: tensors[name] for name in held}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit_config(path: Path, **changes: object) -> None:
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changes))


def linears(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def group_of(name: str) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    return next(([f"{parent}.{member}" for member in group] for group in FUSED if leaf in group), [name])


def compressed(
    path: Path, preset: Callable[[str], str | None] = lambda name: "NVFP4", *, shards: int = 1, head: bool = False
) -> dict[str, Tensor]:
    """Compress a bf16 checkpoint in place with the classes of compressed-tensors, scales of activations included.
    ``preset`` maps the name of a linear layer to its scheme, e.g. NVFP4, or to None if the layer stays in bf16. Returns
    the weights that compressed-tensors gets by decompressing the layers, by name."""
    tensors, decompressed = read_all(path), {}
    kinds = {name: preset(name) for name in linears(tensors)} | ({"lm_head": "NVFP4"} if head else {})
    schemes: dict[str, list[str]] = {}
    largest = {name: tensors[f"{name}.weight"].abs().max() for name in kinds}
    for name, kind in kinds.items():
        if kind is None:
            continue
        schemes.setdefault(kind, []).append(name)
        scheme = preset_name_to_scheme(kind, ["Linear"])
        weight = tensors.pop(f"{name}.weight")
        amax = torch.stack([largest[member] for member in group_of(name) if member in largest]).max()
        state: dict[str, Tensor | None] = {"weight": weight, **_scales(weight, kind, scheme, amax)}
        compressor = BaseCompressor.get_value_from_registry(FORMATS[kind])
        state = compressor.compress(state, scheme)
        decompressed[name] = compressor.decompress(state, scheme)["weight"]
        tensors |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in state.items() if tensor is not None}
    groups = {
        f"group_{number}": preset_name_to_scheme(kind, names if len(schemes) > 1 else ["Linear"]).model_copy(
            update={"format": FORMATS[kind]}
        )
        for number, (kind, names) in enumerate(schemes.items())
    }
    config = QuantizationConfig(
        config_groups=dict(groups),
        format=FORMATS[next(iter(schemes))] if len(schemes) == 1 else "mixed-precision",
        ignore=[name for name, kind in kinds.items() if kind is None] + ([] if head else ["lm_head"]),
    )
    edit_config(path, quantization_config=config.to_dict())
    rewrite(path, tensors, shards=shards)
    return decompressed


def _scales(weight: Tensor, kind: str, scheme: QuantizationScheme, amax: Tensor) -> dict[str, Tensor]:
    assert scheme.weights is not None
    if kind == "NVFP4":
        divisor = generate_gparam(-amax, amax)
        blocks = weight.unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, divisor)
        return {
            "weight_scale": scale,
            "weight_global_scale": divisor.reshape(1),
            "input_global_scale": torch.tensor([7.0]),
        }
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if kind == "FP8":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    scale, _ = calculate_qparams(low, high, scheme.weights)
    return {"weight_scale": scale, **({"input_scale": torch.tensor([0.5])} if kind == "FP8" else {})}


def modelopt(
    path: Path, *, in_config: bool = True, fp8: Callable[[str], bool] = lambda name: False
) -> dict[str, Tensor]:
    """Rewrite a bf16 checkpoint in place in the form in which ModelOpt exports quantised models. Linear layers are in
    NVFP4, or in FP8 where ``fp8`` of the layer's name is true, and there are scales for an FP8 KV cache.
    hf_quant_config.json describes the quantisation; with ``in_config``, as in newer exports, config.json does so, too.
    Returns the weights that the layers stand for in bf16, NVFP4 ones as compressed-tensors decompresses them."""
    tensors, expected, layers = read_all(path), {}, {}
    largest = {name: tensors[f"{name}.weight"].abs().max().float() for name in linears(tensors)}
    for name in largest:
        weight = tensors.pop(f"{name}.weight").float()
        tensors[f"{name}.input_scale"] = torch.tensor(0.01)
        if fp8(name):
            scale = largest[name] / 448
            codes = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            expected[name] = (codes.float() * scale).bfloat16()
            layers[name] = {"quant_algo": "FP8"}
        else:
            multiplier = torch.stack([largest[member] for member in group_of(name)]).max() / (6 * 448)
            blocks = weight.unflatten(1, (-1, 16)).abs().amax(-1)
            scale = (blocks / 6 / multiplier).clamp(2**-9, 448).to(torch.float8_e4m3fn)
            codes = round_codes(weight, NVFP4, scale.view(torch.uint8), multiplier)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": multiplier}
            state = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": (1 / multiplier).reshape(1)}
            compressor = BaseCompressor.get_value_from_registry(FORMATS["NVFP4"])
            expected[name] = compressor.decompress(state, preset_name_to_scheme("NVFP4", ["Linear"]))["weight"]
            exact = dequantize_reference(PackedWeight(codes, scale.view(torch.uint8), multiplier.double()))
            torch.testing.assert_close(expected[name], exact.bfloat16(), rtol=2**-7, atol=0)  # ties round otherwise
            layers[name] = {"quant_algo": "NVFP4", "group_size": 16}
        for kind in "kv":
            if name.endswith(f"{kind}_proj"):
                tensors[f"{name}.{kind}_scale"] = torch.tensor(1.0)
    quantization: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}
    if any(map(fp8, layers)):
        quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    file = {**quantization, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.embed*"]}
    producer = {"producer": {"name": "modelopt", "version": "0.33.0"}}
    (path / "hf_quant_config.json").write_text(json.dumps({**producer, "quantization": file}))
    if in_config:
        activations = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        edit_config(
            path,
            quantization_config={
                "quant_method": "modelopt",
                **producer,
                **quantization,
                "config_groups": {"group_0": {"input_activations": activations, "targets": ["Linear"]}},
                "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
                "ignore": ["lm_head"],
            },
        )
    rewrite(path, tensors)
    return expected
