"""Operations of a training pass are those that torch counts; the peak of a GPU is found by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from qerl_pl.model.layers import head_dims
from qerl_pl.training.flops import ModelSize, peak_flops, training_flops
from tests.families import tiny_config
from tests.memory.conftest import policy_of, small_config


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_frozen_model_costs_what_torch_counts(family):
    config = small_config(family)
    size = replace(ModelSize.of(policy_of(config, torch.float32)), adapter=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").requires_grad_(False)
    rows, width = 2, 64
    inputs = model.get_input_embeddings()(torch.randint(0, 250, (rows, width))).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=inputs).logits.sum().backward()
    lengths = torch.tensor([width] * rows)
    above_the_diagonal = 6 * size.attention * rows * width**2  # eager attention computes these products too
    assert counter.get_total_flops() == training_flops(size, lengths, lengths) + above_the_diagonal


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_5_text"])
def test_attention_costs_what_each_kind_of_layer_attends_to(family):
    config = tiny_config(family)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    size = ModelSize.of(policy_of(config, torch.float32))
    width = 3 * (getattr(config, "sliding_window", None) or 8)
    pairs = {  # twice the area under the diagonal
        "full_attention": width**2,
        "linear_attention": 0,
        "sliding_attention": width**2 - (width - (getattr(config, "sliding_window", None) or 0)) ** 2,
    }
    expected = sum(
        6 * pairs[kind] * config.num_attention_heads * dim for kind, dim in zip(kinds, head_dims(config), strict=True)
    )
    if "linear_attention" in kinds:
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        expected += 18 * kinds.count("linear_attention") * state * width
    nothing = replace(size, frozen=0, adapter=0)
    assert training_flops(nothing, torch.tensor([width]), torch.tensor([0])) == pytest.approx(expected)
    assert ("linear_attention" in kinds) == (size.recurrent > 0)
    assert ("sliding_attention" in kinds) == bool(size.windows)


def test_an_adapter_costs_its_own_gradient_too():
    policy = policy_of(small_config(), torch.float32)
    size = ModelSize.of(policy)
    assert size.adapter == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    lengths = torch.tensor([10])
    assert training_flops(size, lengths, lengths) - training_flops(
        replace(size, adapter=0), lengths, lengths
    ) == pytest.approx(60 * size.adapter)


def test_rows_add_up():
    size = ModelSize(frozen=1000, adapter=10, head=300, attention=64)
    lengths, sampled = torch.tensor([5, 9, 30]), torch.tensor([2, 9, 0])
    each = [training_flops(size, lengths[row : row + 1], sampled[row : row + 1]) for row in range(3)]
    assert training_flops(size, lengths, sampled) == pytest.approx(sum(each))
    assert training_flops(size, torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Somebody's Accelerator 4", None),
    ],
)
def test_the_peak_is_found_by_name(name, peak):
    assert peak_flops(name) == peak


def test_tokens_that_are_computed_for_another_row_cost_nothing():
    size = ModelSize(frozen=1000, adapter=10, head=300, attention=64)
    lengths, none = torch.tensor([7, 9]), torch.zeros(2, dtype=torch.int64)
    shared = training_flops(size, lengths, none, torch.tensor([0, 7]))
    assert shared == pytest.approx(training_flops(size, torch.tensor([9]), none[:1]))
