"""Norms, rotary embeddings and SwiGLU can be computed as one fused operation each. This does not change the policy,
with any setting of gradient checkpointing."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.noise.fp32_norms import weights_replaced
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.elementwise import PACKAGE, fused_wanted, liger_elementwise, use_elementwise
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.recompute import Recompute, ladder
from tests.memory.conftest import FAMILIES, policy_of, small_config
from tests.policy.test_recompute import RUNGS, gradients, make
from tests.reference.elementwise import REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore:The PEFT config")
on_gpu = pytest.mark.gpu
SETTINGS = [
    *({"family": family} for family in FAMILIES),
    {"packed": True},
    {"targets": ("q_proj", "up_proj")},
    {"train_norms": True},
]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of the tensors: the norm of ``found`` minus ``expected``, divided by the norm
    of ``expected``."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradients_are_those_of_the_plain_chains_on_every_rung(settings):
    policy = make(**settings)
    plain = gradients(policy, Recompute())
    use_elementwise(policy.causal_lm, REFERENCE)
    fused = gradients(policy, Recompute())
    assert distance(fused, plain) < 1e-5
    for how in RUNGS[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients(policy, how), fused, strict=True)), how


def test_other_activations_keep_their_own_mlp():
    config = small_config(hidden_act="gelu")
    torch.manual_seed(0)
    policy = policy_of(config, torch.float32)
    plain = gradients(policy, Recompute())
    use_elementwise(policy.causal_lm, REFERENCE)
    assert distance(gradients(policy, Recompute()), plain) < 1e-5


def test_noisy_norm_weights_act():
    policy = make()
    tokens, mask = torch.randint(256, (2, 9)), torch.arange(9).expand(2, 9) > 1
    noisy = noisy_norms(policy.norm_weights(), NormNoise(0.3, 1))
    modules = policy.norm_modules()
    with torch.no_grad():
        clean = policy.token_stats(tokens, mask, temperature=1.0).logprobs
        with weights_replaced(modules, noisy):
            plain = policy.token_stats(tokens, mask, temperature=1.0).logprobs
            use_elementwise(policy.causal_lm, REFERENCE)
            fused = policy.token_stats(tokens, mask, temperature=1.0).logprobs
    torch.testing.assert_close(fused, plain)
    assert not torch.allclose(clean, plain, atol=1e-3)


def test_sampling_draws_the_same_tokens():
    policy = make().eval()
    row = torch.randint(1, 256, (1, 6))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(row), "pad_token_id": 0}
    plain = policy.causal_lm.generate(row, **options)
    use_elementwise(policy.causal_lm, REFERENCE)
    assert torch.equal(policy.causal_lm.generate(row, **options), plain)


def test_kernels_that_cannot_run_are_refused_where_they_are_asked_for():
    assert not fused_wanted(False)
    assert fused_wanted("auto") == (find_spec(PACKAGE) is not None)
    if find_spec(PACKAGE) is None:
        with pytest.raises(ValueError, match=r"liger-kernel is not installed"):
            fused_wanted(True)
    else:
        with pytest.raises(ValueError, match="no GPU"):
            policy_of(small_config(), torch.float32, fused_elementwise=True)


def on_device(family: str, dtype: torch.dtype, **settings: Any) -> Policy:
    """Make a random policy on the GPU with an adapter that is not zero."""
    torch.manual_seed(0)
    policy = policy_of(small_config(family), dtype, **settings).cuda()
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


@on_gpu
@pytest.mark.parametrize("lora", [{}, {"train_norms": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_librarys_kernels_are_as_close_to_exact_gradients_as_the_plain_chains(family, dtype, lora):
    pytest.importorskip(PACKAGE)
    exact = on_device(family, torch.float32, lora=lora)
    policy = on_device(family, dtype, lora=lora)
    with torch.no_grad():
        for own, wanted in zip(exact.parameters(), policy.parameters(), strict=True):
            own.copy_(wanted)
    expected = gradients(exact, Recompute(), device="cuda")
    plain = distance(gradients(policy, Recompute(), device="cuda"), expected)
    use_elementwise(policy.causal_lm, liger_elementwise())
    assert distance(gradients(policy, Recompute(), device="cuda"), expected) < 1.5 * plain + 1e-4


@on_gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rungs_on_a_gpu_have_one_anothers_gradients(family, fused):
    """All settings of gradient checkpointing give the same gradients. On a GPU the backward pass of attention adds in
    no fixed order, so they are equal only up to rounding."""
    if fused:
        pytest.importorskip(PACKAGE)
    policy = on_device(family, torch.bfloat16)
    if fused:
        use_elementwise(policy.causal_lm, liger_elementwise())
    expected = gradients(policy, Recompute(), device="cuda")
    for how in ladder(policy.num_layers)[1:]:
        found = gradients(policy, how, device="cuda")
        assert torch.equal(found[0], expected[0]), how
        assert distance(found, expected) < 2e-2, how
