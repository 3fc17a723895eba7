"""Laws of the noise on norm weights."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.model.family import FAMILIES
from qerl_pl.noise.norm_noise import NormNoise, is_noise_norm, noisy_norms, realized_sigma

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def norms(num_layers: int = 3, size: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.{norm}_layernorm.weight": torch.rand(size, generator=generator).to(dtype) + 1
        for layer in range(num_layers)
        for norm in ("input", "post_attention")
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clean_weights_are_left_alone_so_noise_never_accumulates(dtype):
    clean, untouched = norms(dtype=dtype), norms(dtype=dtype)
    first, second, none = (noisy_norms(clean, NormNoise(sigma, 1)) for sigma in (0.1, 0.1, 0.0))
    assert list(none) == list(clean)
    for name in clean:
        assert torch.equal(clean[name], untouched[name])
        assert torch.equal(none[name], clean[name])
        assert none[name].data_ptr() != clean[name].data_ptr(), "a copy"
        assert torch.equal(first[name], second[name])
        assert not torch.equal(first[name], clean[name])
        assert first[name].dtype == dtype


@given(seed=st.integers(0, 2**63 - 1))
def test_noise_is_a_function_of_the_seed_and_not_of_the_order_or_the_global_stream(seed):
    clean = norms()
    before = torch.get_rng_state()
    noisy = noisy_norms(clean, NormNoise(0.1, seed))
    assert torch.equal(torch.get_rng_state(), before)
    backwards = noisy_norms(dict(reversed(clean.items())), NormNoise(0.1, seed))
    other = noisy_norms(clean, NormNoise(0.1, seed ^ 1))
    for name in clean:
        assert torch.equal(noisy[name], backwards[name])
        assert not torch.equal(noisy[name], other[name])


def test_noise_is_gaussian_with_the_given_sigma_and_independent_between_weights():
    clean = norms(num_layers=2, size=40_000, dtype=torch.float64)
    noise = torch.stack([noisy - clean[name] for name, noisy in noisy_norms(clean, NormNoise(0.02, 3)).items()])
    assert noise.mean(dim=1).abs().max() < 5 * 0.02 / math.sqrt(40_000)
    torch.testing.assert_close(noise.std(dim=1), torch.full((4,), 0.02).double(), rtol=0.02, atol=0)
    torch.testing.assert_close(
        (noise.abs() < 0.02).double().mean(1), torch.full((4,), 0.6827).double(), rtol=0.02, atol=0
    )
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 5 / math.sqrt(40_000)


def test_noise_scales_with_sigma():
    clean = {name: torch.zeros_like(weight) for name, weight in norms().items()}
    small, large = noisy_norms(clean, NormNoise(0.25, 3)), noisy_norms(clean, NormNoise(0.5, 3))
    assert all(torch.equal(2 * small[name], large[name]) for name in clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_get_the_rounded_noise_of_fp32(dtype):
    clean = norms(dtype=dtype)
    wide = noisy_norms({name: weight.float() for name, weight in clean.items()}, NormNoise(0.1, 5))
    for name, noisy in noisy_norms(clean, NormNoise(0.1, 5)).items():
        assert torch.equal(noisy, wide[name].to(dtype))


@pytest.mark.parametrize("sigma", [-1e-3, math.nan, math.inf])
def test_a_sigma_that_means_nothing_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma is"):
        noisy_norms({}, NormNoise(sigma, 0))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.input_layernorm.weight", True),
        ("base_model.model.model.layers.31.post_attention_layernorm.weight", True),
        ("model.norm.weight", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_the_two_norms_of_a_block_are_found_by_name(name, expected):
    assert is_noise_norm(name, FAMILIES["qwen2"].noise_norms) is expected


def test_fp32_keeps_all_of_the_noise_and_bf16_little_of_what_is_below_its_spacing():
    clean = {f"model.layers.{i}.input_layernorm.weight": torch.full((4096,), 1.0) for i in range(4)}
    for sigma in (1e-2, 1e-3):
        assert realized_sigma(clean, NormNoise(sigma, 3), dtype=torch.float32) == pytest.approx(sigma, rel=0.05)
    assert realized_sigma(clean, NormNoise(5e-2, 3), dtype=torch.bfloat16) == pytest.approx(5e-2, rel=0.05)
    assert realized_sigma(clean, NormNoise(5e-4, 3), dtype=torch.bfloat16) < 1e-4
    assert realized_sigma(clean, NormNoise(0.0, 3), dtype=torch.bfloat16) == 0.0
