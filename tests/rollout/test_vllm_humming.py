"""Schedules of Humming's kernels: they fit the linears of real models, and the product stays the same."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_pl.rollout.vllm import humming as vllm_humming
from qerl_pl.rollout.vllm import patches
from qerl_pl.rollout.vllm.humming import decoding_schedule

SHAPES = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (55296, 5120), (5120, 27648), (320, 128)]
LARGE = {"block_shape": (128, 256, 64), "warp_shape": (128, 32, 64), "num_stages": 4}
RULE = {"block_shape": (8, 64, 64), "warp_shape": (8, 32, 64), "num_stages": 4, "num_ctas_per_sm": 2}


@pytest.mark.parametrize("tokens", [1, 8, 32, 33, 8192])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_divide_the_linear(shape, tokens):
    outputs, inputs = shape
    before = dict(RULE)
    config = decoding_schedule(RULE, outputs=outputs, inputs=inputs, tokens=tokens)
    _, block_outputs, block_inputs = config["block_shape"]
    _, warp_outputs, warp_inputs = config["warp_shape"]
    assert outputs % block_outputs == inputs % block_inputs == 0
    assert block_outputs % warp_outputs == block_inputs % warp_inputs == 0
    assert config["num_stages"] == RULE["num_stages"], "what is not changed is the rule's"
    assert before == RULE, "the rule's own table is left as it is"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [129, 256, 257])
def test_narrow_linears_get_smaller_blocks_of_as_many_tokens(shape, tokens):
    outputs, inputs = shape
    config = decoding_schedule(LARGE, outputs=outputs, inputs=inputs, tokens=tokens)
    if tokens > 256 or inputs > outputs or outputs > 16384:
        assert config == LARGE
    else:
        assert config == {**LARGE, "block_shape": (128, 128, 64), "num_ctas_per_sm": 2}


@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(37952, 3584, 8), (37888, 3616, 8), (37888, 3584, 33)])
def test_what_is_not_wide_even_and_small_keeps_the_rules_blocks(outputs, inputs, tokens):
    assert decoding_schedule(RULE, outputs=outputs, inputs=inputs, tokens=tokens) == RULE


@pytest.mark.parametrize(("instruction", "kept"), [("mma", True), ("wgmma", False)])
def test_a_schedule_for_another_instruction_than_the_measured_one_is_kept(instruction, kept):
    rule = {**RULE, "mma_type": instruction}
    assert (decoding_schedule(rule, outputs=37888, inputs=3584, tokens=8) == rule) is kept


@pytest.mark.parametrize(
    ("capability", "installed"), [((9, 0), True), ((9, 0), False), ((8, 0), True), ((10, 0), True)]
)
def test_operators_are_loaded_where_humming_multiplies(monkeypatch, capability, installed):
    loaded = []
    operators = SimpleNamespace(init_humming_launcher=lambda: loaded.append("humming"))
    monkeypatch.setattr(vllm_humming, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(vllm_humming, "import_module", lambda name: {"humming.ops.utils": operators}[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    vllm_humming.load_operators()
    assert loaded == ["humming"] * (capability == (9, 0) and installed)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(4608, 3584), (37888, 3584), (3584, 18944)], ids=str)
def test_the_product_is_that_of_the_rule(shape):
    from tests.bench.bench_schedules import LOCKS, multiply, random_linear

    rule: Any = import_module("humming.tune.sm90").Sm90Heuristics
    tune: Any = import_module("humming.tune")
    patches.humming_schedules()
    ours = tune.heuristics_map[vllm_humming.HOPPER]
    assert issubclass(ours, rule)
    config, tensors = random_linear(*shape)
    locks = torch.zeros(LOCKS, dtype=torch.int32, device="cuda")
    for tokens in (1, 8, 17, 32, 64, 200, 256, 300):
        x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
        found, expected = (
            multiply(config, tensors, chooser.get_config(config, tokens), locks, x).double() for chooser in (ours, rule)
        )
        assert (found - expected).norm() <= 0.01 * expected.norm(), tokens
