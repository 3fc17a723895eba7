"""Values of a checkpoint that are possible as stored and impossible after conversion are refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from qerl_pl.quant.convert import _dense_of_fp8
from qerl_pl.quant.families import check_family
from qerl_pl.quant.layouts import COMPRESSED_NVFP4, MODELOPT_NVFP4, read_layout
from qerl_pl.quant.loading import Slot, _fill

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("value", [0.0, -0.0, -3.0, 1e-45, torch.inf])
@pytest.mark.parametrize("suffix", [".weight_global_scale", ".weight_scale_2"])
def test_a_tensor_scale_that_makes_no_finite_factor_above_zero_is_refused(suffix, value):
    if suffix == ".weight_scale_2" and value == 1e-45:
        pytest.skip("a factor, and not a divisor: it is a number of fp32")
    layout = COMPRESSED_NVFP4 if suffix == ".weight_global_scale" else MODELOPT_NVFP4
    model = nn.Module()
    model.register_buffer("global_scale_bits", torch.zeros((), dtype=torch.int64))
    slot = Slot("", "global_scale_bits", layout.parts[suffix].convert)
    with pytest.raises(ValueError, match=f"^a{suffix} "):
        _fill(model, slot, torch.tensor([value]), name=f"a{suffix}", dtype=torch.bfloat16, device="cpu")


def test_a_weight_that_overflows_in_the_compute_dtype_is_refused():
    model = nn.Linear(1, 2, bias=False)
    stored = torch.tensor([[3.4e38], [1.0]])
    with pytest.raises(ValueError, match=r"weight, in bfloat16, holds NaN or infinity in 1 of 2 places"):
        _fill(model, Slot("", "weight"), stored, name="weight", dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("value", [-1.0, torch.inf, torch.nan])
def test_an_fp8_scale_that_is_no_finite_magnitude_is_refused(value):
    tensors = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match=r"a.weight_scale holds"):
        _dense_of_fp8(tensors, "a")


def test_a_group_size_that_the_format_does_not_have_is_refused(tmp_path):
    groups = {"a": {"weights": {"num_bits": 4, "group_size": 32}, "input_activations": None}}
    quantized = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantized}))
    with pytest.raises(ValueError, match=r"config_groups.weights.group_size 32; its format has 16"):
        read_layout(tmp_path)
    groups["a"]["weights"]["group_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantized}))
    assert read_layout(tmp_path) is COMPRESSED_NVFP4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "attention in chunks"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "3 of 4 blocks a sliding window"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "1 of 4 blocks a sliding window"),
    ],
)
def test_attention_that_vllm_refuses_is_refused_first(tmp_path, family, change, said):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": family, **change}))
    with pytest.raises(ValueError, match=said):
        check_family(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{}, {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}, {"layer_types": ["full"] * 4}],
)
def test_a_window_in_no_block_is_taken(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert check_family(tmp_path)["model_type"] == "qwen2"
