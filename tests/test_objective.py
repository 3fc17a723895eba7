"""Which difference between trainer and sampler the loss makes up for, as YAML says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qerl_pl.module import QeRLModule
from qerl_pl.objective import Objective
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.stopwatch import Stopwatch
from qerl_pl.tools.tiny import make_tiny
from qerl_pl.types import Experience
from qerl_pl.update import UpdateReport, improve

ROWS, WIDTH, PROMPT = 4, 9, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("objective") / "tiny"
    make_tiny(folder, seed=0, sft_steps=0)
    return str(folder)


@pytest.fixture
def policy(base) -> Policy:
    return load_policy(base, dtype=torch.float32, lora=LoraSettings(rank=4, alpha=8), seed=0)


def sampled_elsewhere(policy: Policy) -> tuple[Experience, torch.Tensor]:
    """A batch whose sampler is not the trainer, and log(trainer / sampler), [B, S] nats."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 250, (ROWS, WIDTH), generator=generator)
    sampled = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    sampled[:, PROMPT:] = True
    gap = torch.where(sampled, 0.1 * torch.randn(ROWS, WIDTH, generator=generator), 0.0)
    with torch.no_grad():
        own = policy.token_stats(tokens, sampled, temperature=1.0).logprobs
    experience = Experience(
        tokens=tokens,
        lengths=torch.full((ROWS,), WIDTH),
        sampled=sampled,
        mask=sampled,
        sampler_logprobs=own - gap,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        scored=torch.ones(ROWS, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    )
    return experience, gap


def updated(policy: Policy, experience: Experience, objective: Objective) -> tuple[UpdateReport, torch.Tensor]:
    """One update without a step: the report, and the gradient of every B in one vector."""
    report = improve(
        policy,
        experience,
        objective,
        group_size=2,
        temperature=1.0,
        max_tokens=WIDTH - PROMPT,
        num_updates=1,
        micro_batch_tokens=2 * WIDTH,
        backward=lambda loss: loss.backward(),
        step=lambda: torch.zeros(()),
        watch=Stopwatch(),
    )
    gradients = [p.grad.flatten() for n, p in policy.named_parameters() if "lora_B" in n and p.grad is not None]
    policy.zero_grad()
    return report, torch.cat(gradients)


def test_the_ratio_starts_at_1_against_the_trainer_and_holds_the_difference_against_the_sampler(policy):
    experience, gap = sampled_elsewhere(policy)
    trainer, _ = updated(policy, experience, Objective())
    sampler, _ = updated(policy, experience, Objective(ratio_against="sampler"))
    assert trainer.metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert sampler.metrics["policy/ratio"] == pytest.approx(gap[experience.mask].exp().mean().item(), abs=1e-5)
    torch.testing.assert_close(sampler.old_logprobs, trainer.old_logprobs)  # reported whatever the ratio is against


def test_against_the_sampler_the_unclipped_gradient_is_that_of_untruncated_weights(policy):
    experience, _ = sampled_elsewhere(policy)
    never_clips = Objective(clip_low=0.99, clip_high=99.0)
    truncated = replace(never_clips, correction="truncate", correction_high=99.0)
    _, plain = updated(policy, experience, never_clips)
    _, against = updated(policy, experience, replace(never_clips, ratio_against="sampler"))
    _, weighted = updated(policy, experience, truncated)
    torch.testing.assert_close(against, weighted, rtol=1e-4, atol=1e-7)
    assert (against - plain).norm() > 0.01 * plain.norm()


def test_a_ratio_against_the_sampler_is_not_corrected_a_second_time():
    with pytest.raises(ValueError, match="ratio_against is 'sampler' and correction is 'mask'"):
        Objective(ratio_against="sampler", correction="mask")


def test_noise_that_is_kept_leaves_noise_free_rollouts_corrected(policy):
    kept = Objective(correction="truncate", correct_noise=False)
    assert kept.at_noise(0.0) is kept
    assert Objective(correction="truncate").at_noise(0.01).correction == "truncate"
    experience, _ = sampled_elsewhere(policy)
    report, gradient = updated(policy, experience, kept.at_noise(0.01))
    _, plain = updated(policy, experience, Objective())
    assert torch.equal(gradient, plain)
    assert "correction/outside_share" not in report.metrics


@pytest.mark.parametrize(
    ("cut", "said"),
    [(Sampling(4, max_tokens=8, top_p=0.95), "top_p 0.95"), (Sampling(4, max_tokens=8, top_k=20), "top_k 20")],
    ids=["top_p", "top_k"],
)
def test_training_on_a_cut_distribution_is_refused(base, cut, said):
    rewards = [WeightedReward("format", think_answer_format, 1.0)]
    with pytest.raises(ValueError, match=f"{said}.*val_sampling"):
        QeRLModule(base, TransformersEngine(), rewards, sampling=cut)
    QeRLModule(base, TransformersEngine(), rewards, val_sampling=cut)
