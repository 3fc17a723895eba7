"""Checkpoints with values that a file can hold but that cannot be converted, such as NaN scales, are refused with the
name of the tensor."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.convert import dense_of_fp8
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.families import ORIGINAL, check_family
from qerl_pl.quant.layouts import (
    BITSANDBYTES_NF4,
    COMPRESSED_MXFP4,
    COMPRESSED_NVFP4,
    MODELOPT_NVFP4,
    Part,
    check_table,
)
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.loading import _fill
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
    with pytest.raises(ValueError, match=f"^a{suffix} "):
        _fill(model, layout.parts[suffix], torch.tensor([value]), name=f"a{suffix}", dtype=torch.bfloat16, device="cpu")


def test_a_weight_that_overflows_in_the_compute_dtype_is_refused():
    model = nn.Linear(1, 2, bias=False)
    stored = torch.tensor([[3.4e38], [1.0]])
    with pytest.raises(ValueError, match=r"weight, in bfloat16, holds NaN or infinity in 1 of 2 places"):
        _fill(model, Part("weight"), stored, name="weight", dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("value", [-1.0, torch.inf, torch.nan])
def test_an_fp8_scale_that_is_no_finite_magnitude_is_refused(value):
    tensors = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match=r"a.weight_scale holds"):
        dense_of_fp8(tensors, "a")


WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dual_chunk_attention_config": {"chunk_size": 64}}, "attention in chunks"),
        (WINDOW, "3 of 4 blocks a sliding window"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "1 of 4 blocks a sliding window"),
        ({}, None),
        ({**WINDOW, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_attention_that_vllm_refuses_is_refused_first(tmp_path, family, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": family, **change}))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert check_family(tmp_path)["model_type"] == family


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
    with pytest.raises(ValueError, match=f"^a{suffix} holds .*(NaN or infinity|negative)"):
        _fill(linear, part, stored, name=f"a{suffix}", dtype=torch.bfloat16, device="cpu")


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


COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
NF4 = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
W4A16 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
NOT_READ = [
    *((wrong, r"quantization_config is .*; expected a mapping") for wrong in ("nf4", ["nf4"])),
    *(
        ({**COMPRESSED, "config_groups": groups}, r"quantization_config\.config_groups.* is .*; expected a mapping")
        for groups in ([1], {"a": "b"}, {"a": {"weights": 4}})
    ),
    *(
        ({"quant_method": method}, f"by {method!r} as None; supported: unq")
        for method in ("gptq", "awq", "fp8", None, 3)
    ),
    ({**NF4, "bnb_4bit_quant_type": "fp4"}, "'bitsandbytes' as 'fp4'"),
    ({**NF4, "bnb_4bit_use_double_quant": True}, "double quantisation"),
    ({**NF4, "blocksize": 128}, "blocksize 128; its format has 64"),
    ({**COMPRESSED, "format": "pack-quantized"}, r"'pack-quantized'; .*nvfp4-pack"),
    ({**COMPRESSED, "config_groups": {"a": {"input_activations": {"num_bits": 4}}}}, "quantises activations too"),
    (
        {**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}}},
        "config_groups.weights.group_size 32; its format has 16",
    ),
    ({**W4A16, "quant_algo": "NVFP4"}, "quantises activations too"),
    ({**W4A16, "quant_algo": "FP8"}, r"'modelopt' as 'FP8'"),
    ({**W4A16, "group_size": 32}, "group_size 32; its format has 16"),
    ({**W4A16, "kv_cache_quant_algo": "FP8"}, "key/value cache"),
]


@pytest.mark.parametrize(("quantized", "message"), NOT_READ)
def test_a_quantisation_that_is_not_read_is_named_in_one_line(tmp_path, quantized, message):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantized}))
    with pytest.raises(ValueError, match=message) as refused:
        read_layout(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_quantisation_that_is_read_gives_its_layout(tmp_path):
    groups = {"a": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": None}}
    expected = [({**COMPRESSED, "config_groups": groups}, COMPRESSED_NVFP4), (NF4, BITSANDBYTES_NF4)]
    for quantized, layout in [*expected, (W4A16, MODELOPT_NVFP4)]:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantized}))
        assert read_layout(tmp_path) is layout


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
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
GEMMA, MISTRAL = ("gemma3_text", "gemma4_text"), ("mistral", "ministral3", "phi3")
QWEN35 = ("qwen3_5_text", "qwen3_5_moe_text")
ROPE, PART, NUMBER = "rope_parameters", "partial_rotary_factor", "expected a finite number above 0"
REFUSED = [
    ({"num_hidden_layers": 10**6, "layer_types": None}, NAMES, "num_hidden_layers is 1000000; expected at most 2000"),
    ({"num_experts": 10**6}, ("qwen3_moe",), "num_experts is 1000000; expected at most 2000"),
    ({"sliding_window": 0}, NAMES, "sliding_window is 0"),
    ({"sliding_window": -4}, NAMES, "sliding_window is -4"),
    ({"sliding_window": 4096}, ("llama", "granite", *QWEN35), "sliding_window is 4096, which"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, ("llama", "granite", *MISTRAL), "layer_types is"),
    ({"layer_types": ["full_attention"]}, ("qwen2", "olmo3", "gemma3_text"), "a kind for each of 2"),
    ({"layer_types": ["chunked_attention"] * 2}, ("qwen2", "olmo3"), "'chunked_attention'; expected"),
    ({"attention_bias": True}, (*MISTRAL, "qwen2", "qwen3", *QWEN35), "attention_bias is True"),
    ({"mlp_bias": True}, ("mistral", "qwen2", "phi3"), "mlp_bias is True, which transformers ignores"),
    ({"final_logit_softcapping": 30.0}, ("llama", "qwen3"), "final_logit_softcapping is 30.0, which"),
    ({"final_logit_softcapping": 0}, GEMMA, "final_logit_softcapping is 0"),
    ({"attn_logit_softcapping": 50.0}, GEMMA, "attn_logit_softcapping is"),
    ({"is_causal": False}, NAMES, "is_causal is false"),
    ({"use_bidirectional_attention": True}, GEMMA, "use_bidirectional"),
    ({"logits_scaling": 0}, ("granite",), f"logits_scaling is 0; {NUMBER}"),
    ({"attention_multiplier": float("nan")}, ("granite",), "attention_multiplier is nan"),
    ({"hidden_act": "gelu"}, ("llama", "qwen2", "phi3", "olmo3"), "hidden_act is 'gelu', which vLLM"),
    ({"hidden_activation": "silu"}, ("gemma3_text",), "hidden_activation is 'silu'"),
    ({"head_dim": 31}, NAMES, "a head has 31 dimensions"),
    ({"tie_word_embeddings": "false"}, NAMES, "tie_word_embeddings is 'false'; expected true or false"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, NAMES, "is of the kind 'dynamic'"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, NAMES, "is of the kind 'ntk'"),
    ({"rope_scaling": {"rope_type": "linear"}}, NAMES, "'linear' and has no factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, NAMES, "has no low_freq_factor"),
    ({"rope_scaling": "yarn"}, NAMES, "rope_scaling is 'yarn'; expected a mapping"),
    ({ROPE: [1]}, NAMES, "rope_parameters is [1]; expected a mapping"),
    ({ROPE: {**YARN, "factor": 0}}, NAMES, f"factor is 0; {NUMBER}"),
    ({ROPE: {**YARN, "factor": -2.0}}, NAMES, "factor is -2.0"),
    ({ROPE: {"rope_theta": 1e4, PART: 0.5}}, ("llama", "granite", "qwen2"), f"{PART} is 0.5, which transformers ig"),
    ({PART: 0.5}, ("llama", "granite", "qwen3_moe", "gemma3_text"), f"{PART} is 0.5, which transformers ignores"),
    ({ROPE: None, PART: 0.5}, ("llama", "qwen2"), f"{PART} is 0.5, which transformers ignores"),
    ({"rotary_pct": 0.5}, NAMES, "rotary_pct is 0.5, which transformers ignores"),
    ({PART: 0}, ("glm4_moe", "phi3"), f"{PART} is 0; {NUMBER}"),
    ({ROPE: {**LONG, "factor": 8.0}, ORIGINAL: "16"}, ("phi3",), f"{ORIGINAL} is '16'; {NUMBER}"),
    ({ROPE: {**LONG, "attention_factor": 1.2}}, ("phi3", "llama"), "attention_factor is 1.2, on which only one"),
    ({ROPE: {**LONG, "short_mscale": 1.2}}, ("phi3", "llama"), "short_mscale is 1.2, on which only one"),
    ({ROPE: {**LONG, "factor": 8.0}}, ("phi3", "llama"), "factor is 8.0, which vLLM ignores"),
]


@pytest.mark.parametrize(("change", "families", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_vllm_would_compute_otherwise_or_not_at_all_is_refused_of_every_family(
    tmp_path, change, families, message
):
    for family in families:
        config = {**json.loads(tiny_config(family).to_json_string(use_diff=False)), **change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            check_family(tmp_path)
        assert "\n" not in str(refused.value)
