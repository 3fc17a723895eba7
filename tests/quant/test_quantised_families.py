"""Bases that cannot be quantised or trained are refused before any weight is read: because of their family, values in
config.json, the tokenizer, or the index of their files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.model.files import Checkpoint
from qerl_pl.policy.policy import DTYPES
from qerl_pl.quant.families import check_family, check_positions, longest_with_short_factors
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.quant.published import edit_config

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def folder_with(path: Path, **changes: object) -> Path:
    """Make a folder that has only a config.json."""
    path.mkdir(exist_ok=True)
    config = {name: value for name, value in {**SMALL, **changes}.items() if value != "none"}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llava"}, "'llava' model; expected one of qwen2, qwen3, llama,"),
        ({"model_type": "none"}, "None model; expected one of qwen2, qwen3, llama,"),
        ({"model_type": "qwen2_moe", "num_experts": 8}, "mixture of experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "gemma4", "text_config": {"num_experts": 128}}, "mixture of experts"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "mixture of experts"),
        (
            {"model_type": "gemma4_text", "hidden_size_per_layer_input": 256},
            r"embeddings per layer \(E2B, E4B\) are not",
        ),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "share keys and values"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "a soft cap of attention scores are not"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": "none"}, "no num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 64 is no multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 100.0}, "rms_norm_eps is 100.0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"eos_token_id": 96}, "eos_token_id is 96; expected tokens from 0 to 95"),
        ({"eos_token_id": [3, -1]}, "eos_token_id is"),
    ],
)
def test_a_config_that_cannot_be_is_refused_alike_by_every_command(tmp_path, changes, message):
    path = folder_with(tmp_path / "base", **changes)
    with pytest.raises(ValueError, match=message.replace("[", ".")) as refused:
        check_family(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=message.replace("[", ".")):
        checkpoint_shape(path, DTYPES["bfloat16"])


def test_an_end_token_of_the_generation_config_is_checked_too(tmp_path):
    path = folder_with(tmp_path / "base")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1000}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is 1000"):
        check_family(path)


def check_longest(config: dict, longest: int) -> None:
    check_positions(config.get("max_position_embeddings"), longest_with_short_factors(config), longest=longest)


def test_rows_longer_than_a_models_positions_are_refused_and_longer_than_a_window_are_not():
    config = {**SMALL, "max_position_embeddings": 100, "use_sliding_window": True, "sliding_window": 50}
    check_longest(config, 100)
    with pytest.raises(ValueError, match="may reach 101 tokens and the model has 100 positions"):
        check_longest(config, 101)


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    "where",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 32},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32},
        {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 32}, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "longrope", "type": "su"}, "original_max_position_embeddings": 32},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32}}},
    ],
    ids=str,
)
def test_rows_in_which_longrope_would_change_its_factors_are_refused(where):
    config = {**SMALL, "max_position_embeddings": 128, **where}
    check_longest(config, 32)
    with pytest.raises(ValueError, match=r"may reach 33 tokens; expected at most 32 .* together they are at most 32"):
        check_longest(config, 33)


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"type": "yarn", "factor": 4.0}], ids=str)
def test_other_rotary_embeddings_may_go_beyond_the_original_positions(rope):
    config = {**SMALL, "max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_scaling": rope}
    check_longest(config, 128)


def test_the_longest_rows_that_longrope_may_have_are_those_with_its_short_factors():
    sizes = {**SMALL, "model_type": "phi3", "max_position_embeddings": 128, "original_max_position_embeddings": 32}
    config = Phi3Config(
        **sizes, pad_token_id=0, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
    )
    rotary = Phi3RotaryEmbedding(config)

    def angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(torch.zeros(1), torch.arange(length).unsqueeze(0))

    longest = longest_with_short_factors(config.to_dict())
    assert longest is not None
    whole, beyond = angles(longest), angles(longest + 1)
    for length in range(1, longest):
        assert all(torch.equal(part, all_[:, :length]) for part, all_ in zip(angles(length), whole, strict=True))
    assert not torch.equal(beyond[0][:, :longest], whole[0])


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {}}, {"weight_map": {"a": "../b"}}])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    path = folder_with(tmp_path / "base")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("change", "removed", "message"),
    [
        ({"model_type": "gemma2"}, None, "expected one of qwen2"),
        ({"num_experts": 4, "quantization_config": {"quant_method": "modelopt"}}, None, "mixture of experts"),
        ({"vocab_size": 30, "eos_token_id": 1}, None, r"tokenizer has token \d+ and config\.json says vocab_size 30"),
        ({}, "tokenizer.json", r"has no tokenizer \(tokenizer\.json or"),
    ],
)
def test_quantize_refuses_a_base_that_cannot_be_used_before_any_work(
    make_checkpoint, tmp_path, change, removed, message
):
    path = make_checkpoint()
    edit_config(path, **change)
    if removed is not None:
        (path / removed).unlink()
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
