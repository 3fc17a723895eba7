"""Published NVFP4 checkpoints are converted to bases with 4-bit weights and 16-bit activations. Their weights equal
those that compressed-tensors decompresses, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_fp8
from torch import Tensor

from qerl_pl.common.files import in_bytes
from qerl_pl.quant.convert import convert_checkpoint, dense_of_fp8
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.published import conversion_reasons
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.quant.published import compressed, edit_config, modelopt, read_all, rewrite

pytestmark = pytest.mark.usefixtures("_compressed_tensors_without_its_compiler")


def weights_of(path: Path) -> dict[str, Tensor]:
    """Load a checkpoint as the trainer does, and return the bf16 weights of its linear layers, dequantised, by name."""
    weights = {}
    for name, module in load_base(path, dtype=torch.bfloat16, device="cpu").named_modules():
        if isinstance(module, FrozenLinear):
            weights[name] = module.dense(torch.bfloat16)
        elif isinstance(module, torch.nn.Linear):
            weights[name] = module.weight.detach()
    return weights


def assert_base_of(path: Path, expected: dict[str, Tensor], output: Path) -> list[str]:
    """Convert a published checkpoint to ``output``, and check that its linear layers have the expected weights and all
    other tensors are unchanged. Returns the reasons that the product gives for the conversion."""
    source = read_all(path)
    reasons = conversion_reasons(path)
    assert convert_checkpoint(path, output) == reasons
    weights = weights_of(output)
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight.bfloat16()), name
    kept = {name for name in source if name.endswith((".bias", "norm.weight", "embed_tokens.weight"))}
    assert all(torch.equal(read_all(output)[name], source[name]) for name in kept)
    assert conversion_reasons(output) == []
    return reasons


@pytest.mark.parametrize(
    ("architecture", "tied", "shards"), [("qwen3", False, 3), ("qwen2", True, 1), ("llama", True, 3)]
)
def test_compressed_tensors_w4a4_has_the_weights_that_its_own_compressor_decompresses(
    make_checkpoint, tmp_path, architecture, tied, shards
):
    path = make_checkpoint(architecture, tied=tied)
    expected = compressed(path, shards=shards)
    assert len(expected) == 14
    [reason] = assert_base_of(path, expected, tmp_path / "out")
    assert "quantises activations too" in reason
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("in_config", [True, False], ids=["config.json", "hf_quant_config.json"])
def test_modelopt_has_the_weights_of_compressed_tensors_converter(make_checkpoint, tmp_path, in_config):
    path = make_checkpoint("qwen3")
    expected = modelopt(path, in_config=in_config)
    activations, cache = assert_base_of(path, expected, tmp_path / "out")
    assert "activations" in activations
    assert "key/value cache" in cache
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_fp8_linears_of_a_mixed_checkpoint_are_held_in_16_bits(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen3")

    def preset(name: str) -> str | None:
        return "FP8_DYNAMIC" if "layers.0.self_attn" in name else "FP8" if "o_proj" in name else "NVFP4"

    reasons = assert_base_of(path, compressed(path, preset), tmp_path / "out")
    size = 64 * 96 + 2 * 64 * 48 + 2 * 96 * 64
    assert f"5 linears are in FP8: held in 16 bits, {in_bytes(2 * size)} instead of {in_bytes(size)}" in reasons


def test_a_mixed_modelopt_checkpoint_is_read(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen2")
    expected = modelopt(path, fp8=lambda name: "self_attn" in name)
    assert any("8 linears are in FP8" in line for line in assert_base_of(path, expected, tmp_path / "out"))


def test_bf16_linears_and_a_packed_head(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen3")
    expected = compressed(path, lambda name: None if "layers.1.mlp.down" in name else "NVFP4", head=True)
    assert "lm_head is in NVFP4" in "".join(assert_base_of(path, expected, tmp_path / "out"))


@pytest.mark.parametrize("shape", [(256, 384), (200, 130)])
def test_fp8_in_blocks_is_dequantised_as_compressed_tensors_does(shape):
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.1
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])  # pyright: ignore
    expected = dequantize_fp8(weight, scale, args=args)
    for stored in (scale, scale[:, None, :, None]):
        assert torch.equal(dense_of_fp8({"a.weight": weight, "a.weight_scale": stored}, "a"), expected)
    by_hand = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(expected, by_hand)


def apart(path: Path, factor: float) -> None:
    """Multiply the tensor scale of each k_proj by ``factor``, so that it differs from the scales of q_proj and v_proj.
    Checkpoints store the reciprocal of the scale, so the stored number is divided by ``factor``."""
    tensors = read_all(path)
    for name in tensors:
        if name.endswith("k_proj.weight_global_scale"):
            tensors[name] = tensors[name] / factor
    rewrite(path, tensors)


def test_scales_that_are_a_power_of_two_apart_are_absorbed(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen3")
    expected = compressed(path)
    apart(path, 2.0)
    expected |= {name: 2 * weight for name, weight in expected.items() if name.endswith("k_proj")}
    reasons = assert_base_of(path, expected, tmp_path / "out")
    assert any("2 groups of linears that engines fuse" in line for line in reasons)
    written = read_all(tmp_path / "out")
    fused = [f"model.layers.0.self_attn.{leaf}_proj.weight_global_scale" for leaf in "qkv"]
    assert len({written[name].item() for name in fused}) == 1


def test_scales_that_no_block_scale_absorbs_are_refused(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen3")
    compressed(path)
    apart(path, 1.37)
    with pytest.raises(ValueError, match=r"tensor scales of model\.layers\.0\.self_attn\.q_proj, .* no block scales"):
        convert_checkpoint(path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_our_own_checkpoints_are_used_as_they_are(make_checkpoint, tmp_path):
    path = make_checkpoint()
    assert conversion_reasons(path) == []
    for name in ("nvfp4", "mxfp4", "nf4"):
        quantize_checkpoint(path, tmp_path / name, format=name)
        assert conversion_reasons(tmp_path / name) == []


UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


LEAVES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def without(module: str, *leaves: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    gone = {f"{module}.{leaf}" for leaf in leaves}
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in gone}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(UP, "weight_scale"), r"up_proj is incomplete: .* no weight_scale"),
        (without(UP, "weight_scale_2"), r"up_proj is incomplete: .* no weight_scale_2"),
        (without(UP, "weight"), r"up_proj is incomplete: .* no weight"),
        (without("model.norm", "weight"), r"incomplete checkpoint: model\.norm\.weight missing"),
        (without(DOWN, *LEAVES), r"incomplete checkpoint: model\.layers\.1\.mlp\.down_proj\.weight missing"),
        (
            lambda t: {**without(UP, *LEAVES)(t), f"{UP}.weight": torch.ones(128, 64, dtype=torch.bfloat16)},
            r"gate_proj is in NVFP4 and model\.layers\.0\.mlp\.up_proj in 16 bits; engines fuse",
        ),
        (
            lambda t: {**t, f"{UP}.weight_scale_2": torch.tensor(float("nan"))},
            "tensor scale nan; expected a finite number",
        ),
        (lambda t: {**t, f"{UP}.pre_quant_scale": torch.ones(64)}, "pre_quant_scale, NVFP4_AWQ"),
        (
            lambda t: {**t, f"{UP}.weight_scale": torch.ones(128, 8).to(torch.float8_e4m3fn)},
            r"codes \[128, 32\] and block scales \[128, 8\]",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_nothing_is_written(make_checkpoint, tmp_path, damage, message):
    path = make_checkpoint("qwen3")
    modelopt(path)
    rewrite(path, damage(read_all(path)))
    with pytest.raises(ValueError, match=message) as refused:
        convert_checkpoint(path, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A8_AWQ"}}}, "linears in W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "x"}}}}, "not valid"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_named(make_checkpoint, quantization, message):
    path = make_checkpoint()
    edit_config(path, quantization_config=quantization)
    with pytest.raises(ValueError, match=message) as refused:
        conversion_reasons(path)
    assert "\n" not in str(refused.value)
