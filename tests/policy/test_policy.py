"""A policy is a Hugging Face model with an adapter. It computes what this model computes, and only the adapter is
trained."""

import pytest
import torch
from peft import get_peft_model_state_dict
from torch import nn

from qerl_pl.policy.lora import LoraLinear, LoraSettings
from qerl_pl.policy.policy import load_policy


def make_policy(base: str, *, train_norms: bool = False, dtype: torch.dtype = torch.float32, **settings):
    return load_policy(
        base, dtype=dtype, lora=LoraSettings(rank=4, alpha=8, train_norms=train_norms), seed=0, **settings
    )


def with_adapter(policy, seed: int = 0):
    """Give a policy an adapter that changes the output: the matrices B are random instead of zero. Returns the
    policy."""
    generator = torch.Generator().manual_seed(seed)
    own = policy.adapter_state()
    state = {
        name: 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
        if "layernorm" in name
        else torch.randn(tensor.shape, generator=generator) * 0.05
        for name, tensor in own.items()
    }
    policy.load_adapter_state(state)
    return policy


def batch(rows: int = 3, width: int = 11, prompt: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 250, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[:, prompt:] = True
    return tokens, mask


def test_only_the_adapter_is_trained_in_fp32_whatever_the_compute_dtype(base):
    policy = make_policy(base, train_norms=True, dtype=torch.bfloat16)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "layernorm" in name for name in trained)
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters() if parameter.requires_grad)
    assert len(policy.adapter_state()) == len(trained)
    tokens, mask = batch()
    policy.token_stats(tokens, mask, temperature=1.0).logprobs.sum().backward()
    missing = [n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


@pytest.mark.parametrize("train_norms", [False, True])
def test_switching_the_adapter_off_gives_the_base_trained_norms_included(base, train_norms):
    tokens, mask = batch()
    plain = make_policy(base).token_stats(tokens, mask, temperature=1.0).logprobs
    policy = with_adapter(make_policy(base, train_norms=train_norms))
    assert not torch.allclose(policy.token_stats(tokens, mask, temperature=1.0).logprobs, plain, atol=1e-3)
    with policy.model.disable_adapter():
        assert torch.equal(policy.token_stats(tokens, mask, temperature=1.0).logprobs, plain)


def test_the_adapter_is_a_function_of_its_seed_and_leaves_the_global_stream_alone(base):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = make_policy(base).adapter_state()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = make_policy(base).adapter_state()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = load_policy(base, dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=1).adapter_state()
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("train_norms", [False, True])
def test_the_adapter_has_pefts_names_and_is_the_live_one(base, train_norms):
    policy = with_adapter(make_policy(base, train_norms=train_norms))
    [first, *_] = [module for module in policy.modules() if isinstance(module, LoraLinear)]
    matrix = first.lora_B["default"]
    matrix.weight = nn.Parameter(torch.ones_like(matrix.get_parameter("weight")))  # after somebody has looked
    pefts = get_peft_model_state_dict(policy.model)
    state = policy.adapter_state()
    assert list(state) == list(pefts)
    assert all(torch.equal(tensor, pefts[name]) for name, tensor in state.items())
    assert not any(tensor.requires_grad for tensor in state.values())
    policy.load_adapter_state({name: tensor.double() + 1 for name, tensor in state.items()})
    again = get_peft_model_state_dict(policy.model)
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items()), "views of the live tensors"


def test_an_adapter_that_does_not_fit_is_refused(base):
    policy = make_policy(base)
    state = policy.adapter_state()
    name = next(iter(state))
    with pytest.raises(ValueError, match="missing"):
        policy.load_adapter_state({key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match="unknown"):
        policy.load_adapter_state({**state, "more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"is \[3, 3\]"):
        policy.load_adapter_state({**state, name: torch.zeros(3, 3)})


def test_targets_that_match_nothing_are_refused(base):
    with pytest.raises(ValueError, match=r"'query'.*q_proj"):
        load_policy(base, dtype=torch.float32, lora=LoraSettings(targets=("q_proj", "query")), seed=0)


def test_an_adapter_on_the_head_is_refused_as_it_would_not_be_trained(base):
    with pytest.raises(ValueError, match=r"\['lm_head'\].*q_proj, .*, down_proj .*never be trained"):
        load_policy(base, dtype=torch.float32, lora=LoraSettings(targets=("q_proj", "lm_head")), seed=0)


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}, {"targets": ()}], ids=lambda wrong: next(iter(wrong))
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=rf"model\.lora\.{next(iter(wrong))} is"):
        LoraSettings(**wrong)


def test_rslora_scales_by_the_square_root(base):
    policy = load_policy(base, dtype=torch.float32, lora=LoraSettings(rank=16, alpha=8, rslora=True), seed=0)
    layer = next(module for module in policy.modules() if isinstance(module, LoraLinear))
    assert policy.lora_scaling == layer.scaling["default"] == 2.0
    assert isinstance(layer, nn.Module)
