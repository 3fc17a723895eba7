"""Values of a checkpoint that are possible as stored and impossible after conversion are refused by name."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.convert import dense_of_fp8
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.families import check_family
from qerl_pl.quant.layouts import (
    BITSANDBYTES_NF4,
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    check_table,
)
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import Slot, _fill
from qerl_pl.quant.nf4 import NF4_VALUES
from tests.families import NAMES, tiny_config

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
        dense_of_fp8(tensors, "a")


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
    [
        {},
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        {"layer_types": ["full_attention"] * 4},
    ],
)
def test_a_window_in_no_block_is_taken(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert check_family(tmp_path)["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        (COMPRESSED_MXFP4, torch.tensor([[255], [127]], dtype=torch.uint8)),
        (COMPRESSED_NVFP4, torch.tensor([[0x7F] * 4, [0x38] * 4], dtype=torch.uint8)),
        (COMPRESSED_NVFP4, torch.tensor([[0xB8] * 4, [0x38] * 4], dtype=torch.uint8)),
        (BITSANDBYTES_NF4, torch.tensor([torch.nan, 1.0])),
        (BITSANDBYTES_NF4, torch.tensor([-1.0, 1.0])),
    ],
)
def test_a_block_scale_is_checked_as_it_is_computed_with_and_not_as_it_is_stored(layout, stored):
    linear = FrozenLinear(64 if layout is not COMPRESSED_MXFP4 else 32, 2, layout.fmt, device="meta")
    suffix, part = next((suffix, part) for suffix, part in layout.parts.items() if part.buffer == "block_scale")
    slot = Slot("", "block_scale", part.convert)
    with pytest.raises(ValueError, match=f"^a{suffix} holds .*(NaN or infinity|negative)"):
        _fill(linear, slot, stored, name=f"a{suffix}", dtype=torch.bfloat16, device="cpu")


def test_nf4_codes_with_other_values_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for values, fits in ((NF4_VALUES, True), (tuple(0.5 * value for value in NF4_VALUES), False)):
        save_file({"a.weight.quant_map": torch.tensor(values)}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint(tmp_path)
        if fits:
            check_table(BITSANDBYTES_NF4, checkpoint, "a.weight.quant_map")
            continue
        with pytest.raises(ValueError, match=r"a\.weight\.quant_map gives the codes the values \[-0\.5"):
            check_table(BITSANDBYTES_NF4, checkpoint, "a.weight.quant_map")


@pytest.mark.parametrize(
    "quantized",
    [
        "nf4",
        ["nf4"],
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"a": "b"}},
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"a": {"weights": 4}},
        },
    ],
)
def test_a_quantization_config_that_is_no_mapping_is_refused(tmp_path, quantized):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantized}))
    with pytest.raises(ValueError, match=r"quantization_config.* is .*; expected a mapping"):
        read_layout(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4", "bitsandbytes", None, 3])
def test_another_quantisation_is_refused_in_one_line(tmp_path, method):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=r"is quantised by .*; we read unquantised"):
        read_layout(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"has the tensor x twice, in a\.safetensors \(x\) and b\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("family", NAMES)
def test_what_a_family_of_the_tests_has_is_taken(tmp_path, family):
    (tmp_path / "config.json").write_text(tiny_config(family).to_json_string(use_diff=False))
    assert check_family(tmp_path)["model_type"] == family


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
REFUSED = {
    "window of zero": ({"sliding_window": 0}, None, "sliding_window is 0"),
    "window below zero": ({"sliding_window": -4}, None, "sliding_window is -4"),
    "window of llama": (
        {"sliding_window": 4096},
        ("llama", "granite", "qwen3_5_text"),
        "sliding_window is 4096, which",
    ),
    "layers of llama": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        ("llama", "granite", "mistral", "ministral3", "phi3"),
        "layer_types is",
    ),
    "biases of mistral": (
        {"attention_bias": True},
        ("mistral", "ministral3", "phi3", "qwen2"),
        "attention_bias is True",
    ),
    "biases of qwen3": ({"attention_bias": True}, ("qwen3", "qwen3_5_text"), "attention_bias is True"),
    "biases of mlp": ({"mlp_bias": True}, ("mistral", "qwen2", "phi3"), "mlp_bias is True, which transformers ignores"),
    "cap of llama": ({"final_logit_softcapping": 30.0}, ("llama", "qwen3"), "final_logit_softcapping is 30.0, which"),
    "cap of zero": ({"final_logit_softcapping": 0}, ("gemma3_text", "gemma4_text"), "final_logit_softcapping is 0"),
    "cap of attention": ({"attn_logit_softcapping": 50.0}, ("gemma3_text", "gemma4_text"), "attn_logit_softcapping is"),
    "both ways": ({"is_causal": False}, None, "is_causal is false"),
    "both ways of gemma": ({"use_bidirectional_attention": True}, ("gemma3_text", "gemma4_text"), "use_bidirectional"),
    "divisor of zero": ({"logits_scaling": 0}, ("granite",), "logits_scaling is 0; expected a finite number above 0"),
    "factor of NaN": ({"attention_multiplier": float("nan")}, ("granite",), "attention_multiplier is nan"),
    "activation": ({"hidden_act": "gelu"}, ("llama", "qwen2", "phi3", "olmo3"), "hidden_act is 'gelu', which vLLM"),
    "activation of gemma": ({"hidden_activation": "silu"}, ("gemma3_text",), "hidden_activation is 'silu'"),
    "odd head": ({"head_dim": 31}, None, "a head has 31 dimensions"),
    "few layers": ({"layer_types": ["full_attention"]}, ("qwen2", "olmo3", "gemma3_text"), "a kind for each of 2"),
    "kind of a layer": (
        {"layer_types": ["chunked_attention"] * 2},
        ("qwen2", "olmo3"),
        "'chunked_attention'; expected",
    ),
    "text for a word": (
        {"tie_word_embeddings": "false"},
        None,
        "tie_word_embeddings is 'false'; expected true or false",
    ),
    "rope of a batch": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, "is of the kind 'dynamic'"),
    "rope of vLLM": ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, None, "is of the kind 'ntk'"),
    "rope by zero": ({"rope_parameters": {**YARN, "factor": 0}}, None, "factor is 0; expected a finite number above 0"),
    "rope backwards": ({"rope_parameters": {**YARN, "factor": -2.0}}, None, "factor is -2.0"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, None, "'linear' and has no factor"),
    "half of llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, "has no low_freq_factor"),
    "rope as text": ({"rope_scaling": "yarn"}, None, "rope_scaling is 'yarn'; expected a mapping"),
    "rope as list": ({"rope_parameters": [1]}, None, "rope_parameters is [1]; expected a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_would_compute_otherwise_or_not_at_all_is_refused_of_every_family(tmp_path, case):
    change, families, said = REFUSED[case]
    for family in families or NAMES:
        config = {**json.loads(tiny_config(family).to_json_string(use_diff=False)), **change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=re.escape(said)) as refused:
            check_family(tmp_path)
        assert "\n" not in str(refused.value)
