"""A prompt that several rows share is computed only once, and every row has the log-probabilities and gradients that it
would have alone."""

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from qerl_pl.policy.attention import shared_attention, shared_attention_reference
from qerl_pl.policy.packing import (
    WORTH,
    Layout,
    attends_to_everything,
    first_equal,
    micro_batches_of_groups,
    pack_for,
    share_prompts,
)
from tests.memory.conftest import policy_of, small_config
from tests.policy.test_packing import trained_gradients

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config")
FAMILIES = ("qwen2", "qwen3", "llama")


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw seven rows with three different prompts. The rows of one prompt are not next to each other, and one
    completion is empty. Returns the tokens [B, S], the lengths of the prompts [B], and the lengths of the rows [B]."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 250, (num,), generator=generator) for num in (9, 4, 7)]
    of = torch.tensor([0, 1, 0, 2, 1, 0, 1])
    own = torch.tensor([5, 3, 1, 0, 8, 2, 4])
    tokens = torch.zeros(7, 16, dtype=torch.int64)
    lengths = torch.tensor([len(prompts[index]) for index in of]) + own
    for row, index in enumerate(of.tolist()):
        written = torch.randint(1, 250, (int(own[row]),), generator=generator)
        tokens[row, : lengths[row]] = torch.cat([prompts[index], written])
    return tokens, torch.tensor([len(prompts[index]) for index in of]), lengths


def layout_of(tokens: Tensor, prompts: Tensor, lengths: Tensor) -> Layout:
    layout = share_prompts(tokens, prompts, lengths)
    assert layout is not None
    return layout


def places(layout: Layout, row: int, prompts: Tensor, lengths: Tensor) -> list[int]:
    """Return the places of a row's tokens in the layout."""
    end, own = int(layout.prompt_ends[row]) + 1, int(layout.own_starts[row])
    return [*range(end - int(prompts[row]), end), *range(own, own + int(lengths[row] - prompts[row]))]


def test_every_prompt_occurs_once_and_every_row_is_found_again():
    tokens, prompts, lengths = rows()
    layout = layout_of(tokens, prompts, lengths)
    assert len(layout.packed.tokens) == 9 + 4 + 7 + int((lengths - prompts).sum())
    for row in range(len(tokens)):
        found = places(layout, row, prompts, lengths)
        assert torch.equal(layout.packed.tokens[found], tokens[row, : lengths[row]])
        assert layout.packed.positions[found].tolist() == list(range(int(lengths[row])))
    assert layout.packed.longest == 9
    assert layout.packed.shared is not None
    assert layout.packed.shared.longest_query == 15
    assert layout.packed.shared.num_keys == 13  # the prompt without a completion is the last, and none attends to it
    assert layout.packed.shared.num_prompt_tokens == 20


def test_prompts_of_completions_without_tokens_are_packed_once():
    tokens, prompts, _ = rows()
    layout = layout_of(tokens, prompts, prompts)
    assert layout.packed.shared is None
    assert len(layout.packed.tokens) == 9 + 4 + 7
    assert sorted(layout.packed.starts.diff().tolist()) == [4, 7, 9]
    for row in range(len(tokens)):
        end = int(layout.prompt_ends[row]) + 1
        assert torch.equal(layout.packed.tokens[end - int(prompts[row]) : end], tokens[row, : prompts[row]])


@pytest.mark.parametrize("own", [1, 2])
def test_a_pass_of_short_completions_keeps_the_limit_that_it_was_planned_with(own):
    tokens, mask = torch.ones(16, 500 + own, dtype=torch.int64), torch.zeros(16, 500 + own, dtype=torch.bool)
    mask[:, 500:] = True
    lengths, prompts, group = torch.full((16,), 500 + own), torch.full((16,), 500), torch.zeros(16, dtype=torch.int64)
    for chosen in micro_batches_of_groups(lengths, prompts, group, 1000):
        assert len(pack_for(tokens[chosen], mask[chosen], share=True)[0].tokens) <= 1000


def test_rows_are_shared_where_prompts_are_equal_and_it_pays():
    tokens, prompts, lengths = rows()
    assert first_equal(tokens, prompts).tolist() == [0, 1, 0, 3, 1, 0, 1]
    assert share_prompts(tokens[:2], prompts[:2], lengths[:2]) is None  # two different prompts
    wide = torch.ones(2, 100, dtype=torch.int64)
    short, long = torch.tensor([12, 12]), torch.tensor([12, 13])
    assert share_prompts(wide, short, torch.tensor([100, 80])) is not None  # 12 of 180
    assert share_prompts(wide, short - 1, torch.tensor([100, 80])) is None  # 11 of 180 < WORTH
    assert 11 / 180 < WORTH < 12 / 180
    assert share_prompts(wide, long, torch.tensor([100, 100])) is None  # a prompt that begins another one is none


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_that_of_each_row_alone(scale):
    tokens, prompts, lengths = rows()
    layout = layout_of(tokens, prompts, lengths)
    generator = torch.Generator().manual_seed(1)
    assert layout.packed.shared is not None
    q, k, v = (
        torch.randn(len(layout.packed.tokens), heads, 8, generator=generator, dtype=torch.float64)
        for heads in (6, 2, 2)
    )
    y = shared_attention(q, k, v, layout.packed.starts, layout.packed.longest, layout.packed.shared, scale)
    for row in range(len(tokens)):
        found = places(layout, row, prompts, lengths)
        keys, values = (part[found].repeat_interleave(3, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[found], keys) * (8**-0.5 if scale is None else scale)
        later = torch.ones(len(found), len(found), dtype=torch.bool).triu(1)
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(y[found], expected)


def test_windows_are_not_shared():
    for config in (Qwen2Config(), Qwen3Config(), LlamaConfig(), MistralConfig(sliding_window=None)):
        assert attends_to_everything(config)
    for config in (MistralConfig(sliding_window=8), Gemma3TextConfig()):
        assert not attends_to_everything(config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_kernels_equal_the_definition(dtype, head, scale):
    layout = layout_of(*(tensor.cuda() for tensor in rows()))
    generator = torch.Generator().manual_seed(0)
    assert layout.packed.shared is not None
    inputs = [
        torch.randn(len(layout.packed.tokens), heads, head, generator=generator, dtype=torch.float64).to("cuda", dtype)
        for heads in (6, 2, 2)
    ]
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    y = shared_attention(q, k, v, layout.packed.starts, layout.packed.longest, layout.packed.shared, scale)
    dy = torch.randn_like(y)
    results = y, *torch.autograd.grad(y, (q, k, v), dy)
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs)
    exact = shared_attention_reference(q, k, v, layout.packed.starts, layout.packed.shared, scale)
    exact_results = exact, *torch.autograd.grad(exact, (q, k, v), dy.double())
    for found, value in zip(results, exact_results, strict=True):
        error = (found.double() - value).norm() / value.norm()
        assert error < 3 * torch.finfo(dtype).eps + 1e-6  # both parts, and their sum, are rounded


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_on_a_gpu_gives_rows_the_log_probabilities_that_they_have_alone(family):
    torch.manual_seed(0)
    policy = policy_of(small_config(family), torch.bfloat16).cuda()
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    assert policy.shares_prompts
    tokens, prompts, lengths = rows()
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=3).cuda()  # the last sampled token is not processed
    columns = torch.arange(17)
    mask = ((columns >= prompts.unsqueeze(1)) & (columns <= lengths.unsqueeze(1))).cuda()
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)).cuda()
    stats = policy.token_stats(tokens, mask, temperature=0.9)
    (weights * stats.logprobs).sum().backward()
    together = torch.cat([gradient.flatten() for gradient in trained_gradients(policy)])
    policy.zero_grad()
    alone = torch.zeros_like(stats.logprobs)
    for row in range(len(tokens)):
        part = slice(row, row + 1)
        own = policy.token_stats(tokens[part], mask[part], temperature=0.9).logprobs
        alone[part] = own.detach()
        (weights[part] * own).sum().backward()
    apart = torch.cat([gradient.flatten() for gradient in trained_gradients(policy)])
    assert (stats.logprobs - alone).abs().max() < 0.1  # bf16: two roundings of hidden states of size one
    assert (together - apart).norm() < 0.05 * apart.norm()


@pytest.mark.parametrize("share", [False, True])
def test_each_masked_token_is_predicted_from_the_token_before_it(share):
    tokens, prompts, lengths = rows()
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=3)  # the last sampled token is not processed
    columns = torch.arange(17)
    mask = (columns >= prompts.unsqueeze(1)) & (columns <= lengths.unsqueeze(1)) & (columns % 5 != 2)
    mask[3] = False  # a row of which nothing is wanted
    packed, before = pack_for(tokens, mask, share=share)
    row, column = mask.nonzero(as_tuple=True)
    assert torch.equal(packed.tokens[before], tokens[row, column - 1])
    assert torch.equal(packed.positions[before], column - 1)
    assert (packed.shared is not None) == share
