"""Packed rows give the same values as each row alone, forward and gradient."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from qerl_pl.policy.attention import describe_attention, packed_attention
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.packing import pack
from qerl_pl.policy.policy import Policy, make_policy
from tests.reference.attention import packed_attention_reference

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path` was renamed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
LENGTHS = torch.tensor([5, 1, 13, 8])


def make(family: str = "qwen2", dtype: torch.dtype = torch.float64, device: str = "cpu", **settings) -> Policy:
    """Make a random policy with an adapter that is not zero."""
    torch.manual_seed(0)
    config: PretrainedConfig = CONFIGS[family](**SIZES, **({"head_dim": 16} if family == "qwen3" else {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).to(device, dtype).requires_grad_(False)
    policy = make_policy(model, base="random", dtype=dtype, lora=LoraSettings(rank=4), seed=0, **settings).train()
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data = (0.1 * torch.randn(parameter.shape, dtype=torch.float64)).to(device, dtype)
    return policy


def batch() -> tuple[Tensor, Tensor]:
    """Make the tokens of four padded rows, and a mask that is true from the third token of a row to its end. The second
    row has one token, so the mask is false in this row."""
    tokens = torch.randint(64, (4, 13), generator=torch.Generator().manual_seed(1))
    column = torch.arange(13)
    return tokens, (column >= 2) & (column < LENGTHS.unsqueeze(1))


def trained_gradients(policy: Policy) -> list[Tensor]:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]


def outcome(policy: Policy, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return log-probabilities, entropies, and the gradients of the trained parameters. The gradients are those of a
    weighted sum of both; every token has a different weight, so that exchanged tokens would be detected."""
    policy.zero_grad()
    stats = policy.token_stats(tokens, mask, temperature=0.8)
    weights = torch.linspace(1, 2, mask.numel(), dtype=torch.float64).view(mask.shape).to(mask.device)
    ((stats.logprobs - 0.1 * stats.entropy) * weights[:, : mask.shape[1]]).sum().backward()
    return stats.logprobs.detach(), stats.entropy.detach(), trained_gradients(policy)


def test_pack_is_the_rows_one_after_the_other():
    tokens = torch.arange(52).view(4, 13)
    packed = pack(tokens, LENGTHS)
    rows = [(row, column) for row, length in enumerate(LENGTHS.tolist()) for column in range(length)]
    assert packed.tokens.tolist() == [13 * row + column for row, column in rows]
    assert packed.positions.tolist() == [column for _, column in rows]
    assert packed.starts.tolist() == [0, 5, 6, 19, 27]
    assert packed.starts.dtype == torch.int32
    assert packed.longest == 13


def draw_attention(dtype: torch.dtype, device: str, head: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (27, 6, head), (27, 2, head), (27, 2, head)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in inputs], torch.tensor([0, 5, 6, 19, 27], dtype=torch.int32).to(device)


@pytest.mark.parametrize("window", [None, 1, 4, 13, 20])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_its_definition_with_shared_key_heads(scale, window):
    (q, k, v), starts = draw_attention(torch.float64, "cpu", 8)
    dy = torch.randn(q.shape, dtype=torch.float64)
    results = []
    definition = packed_attention_reference(q, k, v, starts, scale, window)
    for y in (packed_attention(q, k, v, starts, 13, scale=scale, window=window), definition):
        results.append([y, *torch.autograd.grad(y, (q, k, v), dy)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head", [64, 128, 256, 512])
@pytest.mark.parametrize("window", [None, 4])
def test_the_varlen_kernel_equals_the_definition(dtype, head, window):
    (q, k, v), starts = draw_attention(dtype, "cuda", head)
    y = packed_attention(q, k, v, starts, 13, window=window)
    dy = torch.randn_like(y)
    results = y, *torch.autograd.grad(y, (q, k, v), dy)
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (q, k, v))
    exact = packed_attention_reference(q, k, v, starts, window=window)
    exact_results = exact, *torch.autograd.grad(exact, (q, k, v), dy.double())
    for found, value in zip(results, exact_results, strict=True):
        error = (found.double() - value).norm() / value.norm()
        assert error < 2 * torch.finfo(dtype).eps + 1e-6  # scores and probabilities are rounded, sums are fp32


def test_what_follows_the_last_wanted_token_is_never_looked_at():
    policy = make()
    tokens, mask = batch()
    first = outcome(policy, tokens, mask)
    other = torch.where(torch.arange(13) < LENGTHS.unsqueeze(1), tokens, 63 - tokens)
    second = outcome(policy, other, mask)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(one, two) for one, two in zip(first[2], second[2], strict=True))


def test_a_batch_without_wanted_tokens_gives_zeros_and_zero_gradients():
    tokens, mask = batch()
    logprobs, entropy, gradients = outcome(make(), tokens, mask & False)
    assert not logprobs.any()
    assert not entropy.any()
    assert not any(gradient.any() for gradient in gradients)


def test_generation_still_sees_the_padding_mask():
    tokens, _ = batch()
    policy = make().eval()
    row = tokens[:1, :6]
    padded = torch.cat([torch.full((1, 4), 9), row], dim=1)
    attended = torch.tensor([[0] * 4 + [1] * 6])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = policy.causal_lm.generate(row, attention_mask=torch.ones_like(row), **options)
    assert torch.equal(policy.causal_lm.generate(padded, attention_mask=attended, **options)[:, 4:], alone)


def test_what_packed_attention_does_not_do_is_refused():
    tokens, mask = batch()
    policy = make()
    for module in policy.modules():
        if hasattr(module, "attention_dropout"):
            vars(module)["attention_dropout"] = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        policy.token_stats(tokens, mask, temperature=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_rows_on_the_gpu_equal_the_cpu_in_fp64(family):
    tokens, mask = batch()
    exact = outcome(make(family), tokens, mask)
    found = outcome(make(family, torch.float32, "cuda"), tokens.cuda(), mask.cuda())
    torch.testing.assert_close(found[0].cpu(), exact[0], rtol=0, atol=1e-4, check_dtype=False)
    for one, two in zip(found[2], exact[2], strict=True):
        assert (one.cpu() - two).norm() <= 1e-4 * two.norm() + 1e-6


@pytest.mark.parametrize(
    ("device", "dtype", "width", "message"),
    [
        ("cuda", torch.bfloat16, 128, "FlashAttention 2 (torch's varlen_attn)"),
        ("cuda", torch.bfloat16, 512, "padded rows in torch's SDPA"),
        ("cuda", torch.float32, 128, "padded rows in torch's SDPA"),
        ("cpu", torch.bfloat16, 128, "padded rows in torch's SDPA"),
    ],
)
def test_the_log_names_the_kernels_of_attention(device, dtype, width, message):
    config = Qwen3Config(**SIZES, head_dim=width)
    assert describe_attention(config, torch.device(device), dtype) == f"attention in training: {message}"
