"""Gated delta nets on rows that are packed one after the other: each row has the output and gradients that it would
have alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_pl.policy.attention import use_packed_attention
from qerl_pl.policy.delta_net import CHUNK, GROUP_TOKENS, grouped, use_packed_delta_nets
from qerl_pl.policy.packing import pack, packed_hidden_states
from qerl_pl.policy.recompute import apply_recompute, recompute_of
from tests.families import tiny_config
from tests.reference.delta_net import delta_net

# Lengths of packed rows. Among them are rows shorter than the kernel of the convolution, of one token, and shorter or
# longer than a chunk of the recurrence (64 tokens).
CASES = [(2, 70, 1, 64, 3), (1, 1), (65,), (130, 2), (9, 150, 70)]


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"), dtype=torch.float64).eval()
    for module in model.modules():  # values that transformers starts with constants
        for name, tensor in module.named_parameters(recurse=False):
            if name == "dt_bias" or type(module).__name__.endswith(("RMSNorm", "RMSNormGated")):
                nn.init.normal_(tensor, mean=tensor.detach().mean().item(), std=0.2)
    return model


def layer_of(model: PreTrainedModel) -> Any:
    return model.get_submodule("model.layers.0.linear_attn")


def hidden_states(*lengths: int) -> list[Tensor]:
    return [torch.randn(length, 128, dtype=torch.float64) for length in lengths]


def outputs_and_gradients(outputs: list[Tensor], inputs: list[Tensor], layer: nn.Module) -> list[Tensor]:
    whole = torch.cat(outputs).flatten()
    loss = (whole * torch.arange(whole.numel()).cos()).sum()
    return [*outputs, *torch.autograd.grad(loss, [*inputs, *layer.parameters()])]


@pytest.mark.parametrize("lengths", CASES, ids=str)
def test_packed_rows_equal_a_loop_over_the_tokens_of_each_row(model, lengths):
    layer, rows = layer_of(model), [row.requires_grad_() for row in hidden_states(*lengths)]
    expected = outputs_and_gradients([delta_net(layer, row) for row in rows], rows, layer)
    use_packed_delta_nets(model)
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    packed = layer(torch.cat(rows).unsqueeze(0), cu_seq_lens_q=starts)
    found = outputs_and_gradients([*packed.squeeze(0).split(lengths)], rows, layer)
    for one, other in zip(found, expected, strict=True):
        # transformers computes the recurrence in fp32
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


@given(st.lists(st.integers(0, 3000), max_size=12))
def test_a_group_has_rows_of_similar_lengths_and_few_tokens(lengths):
    groups = grouped(lengths)
    assert sorted(row for rows in groups for row in rows) == [row for row, length in enumerate(lengths) if length]
    for rows in groups:
        chunks = [-(-lengths[row] // CHUNK) for row in rows]
        assert len(rows) * max(chunks) < 2 * sum(chunks)
        assert len(rows) == 1 or len(rows) * max(chunks) * CHUNK <= GROUP_TOKENS


def test_autograd_keeps_no_intermediate_results_of_the_recurrence(model):
    layer, kept = layer_of(model), []

    def keep(tensor: Tensor) -> Tensor:
        kept[-1][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    row = torch.cat(hidden_states(300)).unsqueeze(0)
    for _ in range(2):
        kept.append({})
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(row, cu_seq_lens_q=torch.tensor([0, 180, 300], dtype=torch.int32))
        use_packed_delta_nets(model)
    assert sum(kept[1].values()) < sum(kept[0].values()) / 2


@pytest.mark.parametrize("how", ["selective", "blocks"])
def test_recomputed_blocks_give_the_same_gradients(model, how):
    use_packed_attention(model)
    use_packed_delta_nets(model)
    model.train()
    packed = pack(torch.randint(8, 64, (3, 150)), torch.tensor([150, 20, 77]))
    found = []
    for setting in ("none", how):
        recompute = recompute_of(setting, 2)
        assert recompute is not None
        apply_recompute(model, recompute)
        loss = packed_hidden_states(model.model, packed).square().sum()
        found.append(torch.autograd.grad(loss, list(model.model.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_calls_without_row_starts_are_transformers_own(model):
    tokens = torch.randint(8, 64, (2, 20))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        use_packed_delta_nets(model)
        assert torch.equal(model(input_ids=tokens).logits, expected)
