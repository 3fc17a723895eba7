"""Norms with fp32 weights among 16-bit activations."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from callbacks.aqn import AdaptiveQuantizationNoise
from qerl_pl.noise.fp32_norms import add_rms_norm, rms_norm, weights_replaced
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms, realized_sigma

HALVES = [torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def hf_norm(kind: type[nn.Module], weight: Tensor) -> nn.Module:
    norm = kind(len(weight), eps=1e-6)
    norm.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (2, 3, 128), (0, 16)], ids=str)
def test_a_16_bit_weight_in_fp32_gives_the_bits_of_transformers(shape, kind, dtype):
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2)
    norm = hf_norm(kind, weight)
    assert torch.equal(rms_norm(x, weight.float(), 1e-6), norm(x))
    result, total = add_rms_norm(x, residual, weight.float(), 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(result, norm(x + residual))


@pytest.mark.parametrize("scale", [0.05, 1.0, 2.5, 8.0])
@pytest.mark.parametrize("sigma", [1e-2, 5e-4])
def test_noise_that_is_asked_for_acts_on_norms_of_any_size(scale, sigma):
    clean = {"model.layers.0.input_layernorm.weight": (scale * (1 + 0.2 * draw(3584, dtype=torch.float32))).bfloat16()}
    exact, rounded = NormNoise(sigma, 1), NormNoise(sigma, 1, rounded=True)
    acts = realized_sigma(clean, exact, dtype=exact.kept_in(torch.bfloat16))
    assert acts == pytest.approx(sigma, rel=0.05)
    left = realized_sigma(clean, rounded, dtype=rounded.kept_in(torch.bfloat16))
    if scale >= 1 and sigma < 1e-3:
        assert left < sigma, "what rounding to bf16 takes away"
    noisy = noisy_norms(clean, NormNoise(sigma, 1), dtype=torch.float32)["model.layers.0.input_layernorm.weight"]
    assert noisy.dtype == torch.float32
    x = torch.eye(64, 3584, dtype=torch.bfloat16)  # so that outputs are the weights, times a constant
    wide = rms_norm(x, noisy, 0.0).float().diagonal() / 3584**0.5
    assert ((wide - noisy[:64]).abs() <= noisy[:64].abs() * 2**-7).all()


def test_weights_are_replaced_within_and_put_back_whatever_happens():
    weight = draw(16, dtype=torch.bfloat16)
    norms = {"a.weight": hf_norm(Qwen2RMSNorm, weight), "b.weight": hf_norm(Qwen2RMSNorm, weight)}
    x, noisy = draw(3, 16, dtype=torch.bfloat16, seed=1), weight.float() + 1e-3
    storage = norms["a.weight"].get_parameter("weight").data_ptr()
    with weights_replaced(norms, {"a.weight": noisy}):
        assert torch.equal(norms["a.weight"](x), rms_norm(x, noisy, 1e-6))
        assert norms["b.weight"](x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError), weights_replaced(norms, {"a.weight": noisy}):
        norms["a.weight"](x[:, :3])
    for norm in norms.values():
        assert torch.equal(norm.get_parameter("weight"), weight)
        assert torch.equal(norm(x), hf_norm(Qwen2RMSNorm, weight)(x))
    assert norms["a.weight"].get_parameter("weight").data_ptr() == storage
    assert not norms["a.weight"]._forward_hooks


def test_a_precision_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="noise_precision"):
        AdaptiveQuantizationNoise(noise_precision="bf16")  # pyright: ignore[reportArgumentType]
