"""vLLM samples the token with the largest sum of logit and noise, and the noise follows from the seed. The trainer
computes the same noise, and so detects a sampler with a mistake, whose tokens have sums far below the largest."""

import importlib.util
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from qerl_pl.policy.jumps import FAR, MAX_FAR_SHARE
from qerl_pl.policy.margins import chance_of_far, draw_evidence, keyed_noise, margins, row_keys, token_keys
from tests.interpreter import interpreted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def gumbel() -> Iterator[ModuleType]:
    """Import vLLM's module that samples with noise from seeds. Without a GPU, import a copy of the module whose kernels
    run in Triton's interpreter."""
    name = "vllm.v1.worker.gpu.sample.gumbel"
    if DEVICE == "cuda":
        yield importlib.import_module(name)
        return
    import triton
    from triton import language
    from vllm import triton_utils

    def largest(values: Any, axis: int, return_indices: bool) -> Any:
        places = language.arange(0, values.shape[axis])
        return language.reduce((values, places), axis, language.standard._argmax_combine_tie_break_left)

    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_utils, "triton", triton)
        patch.setattr(triton_utils, "tl", language)
        patch.setattr(language, "max", largest)  # not every version of Triton's interpreter has it
        spec.loader.exec_module(module)
        yield module


@pytest.mark.vllm
@pytest.mark.parametrize("vocabulary", [7, 2100])
def test_the_noise_is_the_one_that_vllm_adds(gumbel, vocabulary):
    seeds = torch.tensor([0, -1, 2**40 + 7, -3, 2**63 - 1, 12345], device=DEVICE)
    positions = torch.tensor([0, 1, 5, 100, 2**20, 4095], device=DEVICE)
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    temperatures, rows = torch.ones(6, device=DEVICE), torch.arange(6, device=DEVICE)
    settings = {"apply_temperature": False, "is_drafting": False}
    sampled = gumbel.gumbel_sample(logits, rows, temperatures, seeds, positions, **settings)
    noise = keyed_noise(row_keys(seeds, positions), token_keys(vocabulary, seeds.device))
    assert margins(logits, noise, sampled).max() < 1e-5


def test_the_noise_has_gumbels_distribution_and_is_independent():
    keys = row_keys(torch.arange(40).repeat_interleave(50), torch.arange(50).repeat(40))
    noise = keyed_noise(keys, token_keys(100)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)
    by_key = noise.reshape(40, 50, 100)
    for neighbours in ((by_key[1:], by_key[:-1]), (by_key[:, 1:], by_key[:, :-1]), (noise[:, 1:], noise[:, :-1])):
        pair = torch.stack([each.flatten() for each in neighbours])
        assert abs(pair.corrcoef()[0, 1].item()) < 0.01


SEEDS, POSITIONS = torch.full((400,), 7), torch.arange(400)
MISTAKES = {
    "another temperature": lambda z, g: (z / 1.1 + g).argmax(1),
    "greedy": lambda z, g: z.argmax(1),
    "shifted rows": lambda z, g: (z + g).argmax(1).roll(1),
    "shifted noise": lambda z, g: (z + g.roll(1, 0)).argmax(1),
    "noise used for several tokens": lambda z, g: (z + g[:1]).argmax(1),
    "top_k": lambda z, g: (z.where(z >= z.topk(5).values[:, -1:], -torch.inf) + g).argmax(1),
    "logits of another row": lambda z, g: (z.roll(1, 0) + g).argmax(1),
}


def logits_and_noise() -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(400, 300, generator=torch.Generator().manual_seed(1))
    return logits, keyed_noise(row_keys(SEEDS, POSITIONS), token_keys(300))


def test_margins_are_the_definitions():
    logits, noise = logits_and_noise()
    targets = torch.arange(400) % 300
    due = [float(max(z + g) - (z[token] + g[token])) for z, g, token in zip(logits, noise, targets, strict=True)]
    assert margins(logits, noise, targets).tolist() == due


@pytest.mark.parametrize("error", [0.0, 1e-3, 0.03])
def test_margins_of_a_correct_sampler_are_at_most_twice_the_error_of_the_logits(error):
    logits, noise = logits_and_noise()
    found = margins(logits, noise, (logits + error * (2 * torch.rand(logits.shape) - 1) + noise).argmax(1))
    assert found.min() >= 0
    assert found.max() <= 2 * error + 1e-6


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_sampler_is_seen_in_400_tokens(mistake):
    logits, noise = logits_and_noise()
    found = margins(logits, noise, MISTAKES[mistake](logits, noise))
    assert found.max() > 0.06, "the bound of a correct sampler with errors of 0.03 nats"


def test_the_chance_of_a_far_margin_is_that_of_independent_noise():
    logits, _ = logits_and_noise()
    targets = torch.arange(400) % 20
    logits[:100, 0], targets[:100] = 9.0, 0  # likely tokens, too
    chance = chance_of_far(logits.log_softmax(1).gather(1, targets[:, None])[:, 0])
    far = torch.zeros(400)
    for seed in range(200):
        noise = keyed_noise(row_keys(SEEDS + 1000 * (seed + 1), POSITIONS), token_keys(300))
        far += margins(logits, noise, targets) > math.log(FAR)
    for part in (slice(0, 100), slice(100, 400)):
        assert far[part].mean().item() / 200 == pytest.approx(chance[part].mean().item(), rel=0.05)


def test_evidence_of_draws_has_mean_1_at_the_share_that_is_assumed_and_less_below_it():
    logprobs = torch.tensor([1e-4, 0.1, 0.5, 0.9, 0.96]).double().log()
    far, near = (draw_evidence(torch.full((5,), margin), logprobs).exp() for margin in (2.1, 2.0))
    torch.testing.assert_close(MAX_FAR_SHARE * far + (1 - MAX_FAR_SHARE) * near, torch.ones(5).double())
    assert (far > 1).all()
    assert (near < 1).all(), "so a smaller share gives less"
    assert draw_evidence(torch.tensor([5.0]), torch.tensor([0.98]).log()).item() == 0, "not audited"


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_evidence_of_draws_tells_independent_noise_from_the_keyed_one(error):
    logits, noise = logits_and_noise()
    logits *= 3  # half of the tokens are nearly certain
    other = keyed_noise(row_keys(SEEDS + 1, POSITIONS), token_keys(300))
    wrong = logits + error * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    right, faulty = (
        draw_evidence(margins(logits, noise, sampled), logits.log_softmax(1).gather(1, sampled[:, None])[:, 0])
        for sampled in ((wrong + each).argmax(1) for each in (noise, other))
    )
    assert right.max() <= 0
    assert right.sum() < -5
    assert faulty[:40].sum() > 20, "40 tokens are enough"
