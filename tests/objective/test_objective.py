"""The settings of ``model.objective``: how the loss corrects for the difference between trainer and sampler, and what
its terms do."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Experience
from qerl_pl.module import QeRLModule
from qerl_pl.objective import LossInputs, Objective
from qerl_pl.objective.advantages import group_advantages
from qerl_pl.objective.correction import Rejection
from qerl_pl.objective.losses import entropy_threshold, kl_estimate
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.training.optimization import average_and_clip
from qerl_pl.training.passes import UpdateSettings
from qerl_pl.update import improve
from tests.updates import away_from_its_base, rows_of, steps_of, updated

ROWS, WIDTH, PROMPT = 4, 9, 3


def sampled_elsewhere(policy: Policy) -> tuple[Experience, torch.Tensor]:
    """Make a batch whose tokens count as sampled by a slightly different policy. Returns the batch, and the trainer's
    log-probability minus the sampler's at each token, [B, S] nats."""
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
        scored=torch.ones(ROWS, dtype=torch.bool),
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
    )
    return experience, gap


def test_the_ratio_starts_at_1_against_the_trainer_and_holds_the_difference_against_the_sampler(policy):
    experience, gap = sampled_elsewhere(policy)
    trainer, _ = updated(policy, experience, Objective())
    sampler, _ = updated(policy, experience, Objective(ratio_against="sampler"))
    assert trainer.metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert sampler.metrics["policy/ratio"] == pytest.approx(gap[experience.mask].exp().mean().item(), abs=1e-5)
    torch.testing.assert_close(sampler.old_logprobs, trainer.old_logprobs)  # reported whatever the ratio is against


def test_against_the_sampler_the_unclipped_gradient_is_that_of_untruncated_weights(policy):
    experience, _ = sampled_elsewhere(policy)
    never_clips = Objective(clip_low=0.99, clip_high=99.0, correction="none")
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
    resolved = kept.resolve()
    assert resolved.at_noise(0.0) is resolved
    assert Objective(correction="truncate").resolve().at_noise(0.01).correction == "truncate"
    experience, _ = sampled_elsewhere(policy)
    report, gradient = updated(policy, experience, resolved.at_noise(0.01))
    _, plain = updated(policy, experience, Objective(correction="none"))
    assert torch.equal(gradient, plain)
    assert "correction/outside_share" not in report.metrics


def test_a_batch_without_tokens_in_the_loss_changes_nothing_and_measures_nothing(policy):
    experience, _ = sampled_elsewhere(policy)
    empty = experience._replace(mask=torch.zeros_like(experience.mask))
    report, gradient = updated(policy, empty, Objective(correction="truncate", rejection=Rejection()))
    assert not gradient.any()
    assert not [name for name in report.metrics if name.startswith("correction/")]
    assert not [name for name, value in report.metrics.items() if torch.as_tensor(value).isnan()]


def test_equal_rewards_with_the_kl_in_the_reward_give_a_gradient_of_the_coefficients_size(policy):
    experience, _ = sampled_elsewhere(away_from_its_base(policy))
    equal = experience._replace(advantages=torch.zeros(ROWS))
    in_reward = Objective(kl_in="reward", kl_coefficient=1.0)
    _, tenth = updated(policy, equal, replace(in_reward, kl_coefficient=0.1))
    report, thousandth = updated(policy, equal, replace(in_reward, kl_coefficient=0.001))
    assert tenth.norm() > 0
    torch.testing.assert_close(thousandth, tenth / 100, rtol=1e-3, atol=1e-8)
    groups = report.experience.advantages.view(-1, 2)
    torch.testing.assert_close(groups.sum(1), torch.zeros(ROWS // 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("baseline", ["normalized", "centered", "leave_one_out"])
def test_a_kl_in_the_reward_of_small_weight_is_next_to_none(policy, baseline):
    experience, _ = sampled_elsewhere(away_from_its_base(policy))
    pairs = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), experience.scored.view(-1, 2)
    experience = experience._replace(advantages=group_advantages(*pairs, baseline).flatten())
    _, plain = updated(policy, experience, Objective(baseline=baseline))
    _, small = updated(policy, experience, Objective(baseline=baseline, kl_in="reward", kl_coefficient=1e-8))
    torch.testing.assert_close(small, plain, rtol=1e-4, atol=1e-6 * plain.abs().max().item())


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_what_is_logged_of_the_surrogate_is_a_mean_over_the_tokens_that_carry_it(policy, share):
    experience, gap = sampled_elsewhere(away_from_its_base(policy))
    own, _ = updated(policy, experience, Objective(top_entropy_share=share))
    assert own.metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    against = Objective(top_entropy_share=share, ratio_against="sampler", kl_coefficient=0.1, clip_low=0.0, clip_high=0)
    report, _ = updated(policy, experience, against)
    kept = experience.mask & (report.entropy >= entropy_threshold(report.entropy[experience.mask], share))
    assert kept.sum() < experience.mask.sum() or share == 1
    values = gap[kept]
    upwards = (values > 0) == (experience.advantages.unsqueeze(1).expand_as(gap)[kept] > 0)
    clipped = report.metrics["policy/clipped_low_share"] + report.metrics["policy/clipped_high_share"]
    assert clipped == pytest.approx(upwards.float().mean().item())
    assert report.metrics["policy/ratio"] == pytest.approx(values.exp().mean().item(), rel=1e-4)
    assert report.metrics["policy/kl_old"] == pytest.approx((values.expm1() - values).mean().item(), rel=1e-3)
    whole, _ = updated(policy, experience, replace(against, top_entropy_share=1.0))
    assert report.metrics["policy/kl_ref"] == pytest.approx(whole.metrics["policy/kl_ref"].item())  # over all tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low is -0\.1; expected 0 or more"),
        ({"clip_high": math.nan}, "clip_high is nan; expected a number"),
        ({"kl_coefficient": math.nan}, "kl_coefficient is nan; expected a finite number"),
        ({"entropy_coefficient": math.nan}, "entropy_coefficient is nan; expected a finite number"),
        ({"correction": "truncate", "correction_high": 0.5}, r"correction_high is 0\.5; expected 1 or more"),
        ({"correction": "mask", "correction_high": math.nan}, "correction_high is nan; expected a number"),
        (
            {"correction": "mask", "correction_low": 1, "correction_high": 1},
            "correction_low and correction_high are both 1",
        ),
        ({"correction": "mask", "correction_low": 1.5}, r"correction_low is 1\.5; expected 0 or more, at most 1"),
        ({"correction": "mask", "correction_low": -0.5}, r"correction_low is -0\.5; expected 0 or more, at most 1"),
        ({"max_ratio": 1.28}, r"max_ratio is 1\.28; expected more than 1 \+ clip_high = 1\.28"),
        ({"max_ratio": 1.5, "clip_high": 0.6}, r"max_ratio is 1\.5; expected more than 1 \+ clip_high = 1\.6"),
        ({"max_ratio": 1.0004, "surrogate": "sequence"}, r"max_ratio is 1\.0004; .* = 1\.0004, or null"),
        ({"max_ratio": 10.0, "surrogate": "cispo"}, r"max_ratio is 10\.0 and surrogate is 'cispo'.*expected null"),
        ({"correction_divisor": "kept"}, "correction_divisor is 'kept' and nothing is left out"),
        ({"correct_noise": False, "correction": "none"}, "correct_noise is false and nothing is corrected"),
        ({"correct_noise": False, "ratio_against": "sampler"}, "correct_noise is false and nothing is corrected"),
        ({"kl": "k1"}, "kl is 'k1' and kl_in 'loss': its gradient is zero"),
        ({"kl": "k2", "kl_in": "reward"}, "kl is 'k2' and kl_in 'reward', where only k1"),
        ({"kl": "k3", "kl_in": "reward"}, "kl is 'k3' and kl_in 'reward', where only k1"),
        ({"top_entropy_share": 0.0}, r"top_entropy_share is 0\.0; expected more than 0"),
    ],
)
def test_bounds_are_checked_before_anything_is_loaded_and_the_key_is_named(settings, message):
    with pytest.raises(ValueError, match=rf"model\.objective\.{message}"):
        Objective(**settings)


def expected_kl_gradient(objective: Objective, policy: Tensor, reference: Tensor) -> Tensor:
    """Compute the expected gradient of the KL term with respect to the logits [V] of one token, exactly: as a sum over
    all tokens that ``policy`` can sample. ``policy`` and ``reference`` are log-probabilities [V]."""
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    every = torch.ones(len(policy), 1, dtype=torch.bool)
    kl = objective.resolve().kl
    estimate = kl_estimate(logprobs.unsqueeze(1), reference.unsqueeze(1), every, kl).squeeze(1)
    probability = logprobs.detach().exp()
    if objective.kl_in == "loss":
        (probability * estimate).sum().backward()
    else:  # REINFORCE with the estimate as a cost
        (probability * estimate.detach() * logprobs).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    "objective",
    [
        Objective(kl_coefficient=1.0, kl_in="loss"),
        Objective(kl_coefficient=1.0, kl_in="loss", kl="k2"),
        Objective(kl_coefficient=1.0, kl_in="reward"),
    ],
    ids=["default in the loss", "k2 in the loss", "default in the reward"],
)
def test_every_kl_that_is_accepted_pulls_the_policy_to_its_base(objective):
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(6, generator=generator).double().log_softmax(0)
    policy = reference + 0.05 * torch.randn(6, generator=generator).double()
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    found = expected_kl_gradient(objective, policy, reference)
    assert torch.cosine_similarity(found, exact, 0) > 0.99
    assert 0.9 < found.norm() / exact.norm() < 1.1


def test_the_kl_to_the_base_is_reported_where_it_was_measured_alone(policy):
    experience, _ = sampled_elsewhere(away_from_its_base(policy))
    assert "policy/kl_ref" not in updated(policy, experience, Objective())[0].metrics
    assert updated(policy, experience, Objective(kl_coefficient=0.1))[0].metrics["policy/kl_ref"] > 0
    silent = experience._replace(advantages=torch.zeros(ROWS))
    report, _ = updated(policy, silent, Objective())
    assert not any(name.startswith("policy/") for name in report.metrics), "no token carried the loss"


def test_masked_tokens_are_in_the_divisor_or_not_as_it_is_said(policy):
    experience, gap = sampled_elsewhere(away_from_its_base(policy))
    masked = Objective(correction="mask", correction_low=0.95, correction_high=1.05, correct_noise=True)
    inside = experience.mask & (gap.exp() >= 0.95) & (gap.exp() <= 1.05)
    assert 0 < inside.sum() < experience.mask.sum()
    _, all_tokens = updated(policy, experience, masked)
    _, kept_tokens = updated(policy, experience, replace(masked, correction_divisor="kept"))
    grown = experience.mask.sum() / inside.sum()
    torch.testing.assert_close(kept_tokens, grown * all_tokens, rtol=1e-3, atol=1e-7)


def test_a_rejected_row_weighs_nothing_and_leaves_the_divisor_if_so_said(policy):
    experience, gap = sampled_elsewhere(away_from_its_base(policy))
    means = gap[:, PROMPT:].mean(dim=1).exp()
    low, high = means.sort().values[[0, -1]].tolist()
    bounds = Rejection(low=min(1.0, 1.0001 * low), high=max(1.0, 0.9999 * high))
    rejecting = Objective(rejection=bounds, correction_divisor="kept", aggregation="sequence")
    report, gradient = updated(policy, experience, rejecting)
    out = (means < bounds.bounds[0]) | (means > bounds.bounds[1])
    assert 0 < out.sum() < ROWS
    assert report.metrics["correction/rejected_share"] == pytest.approx(out.float().mean().item())
    without = experience._replace(mask=experience.mask & ~out.unsqueeze(1))
    _, expected = updated(policy, without, Objective(aggregation="sequence"))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-7)


def test_each_mini_batch_takes_the_step_of_its_prompts_alone(policy):
    experience, _ = sampled_elsewhere(away_from_its_base(policy))
    _, found = steps_of(policy, experience, Objective(), num_mini_batches=2)
    halves = [rows_of(experience, rows) for rows in ([0, 1], [2, 3])]
    for gradient, half in zip(found, halves, strict=True):
        torch.testing.assert_close(gradient, updated(policy, half, Objective())[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_after_an_update_the_kl_term_is_that_of_the_policy_being_trained(kind):
    """After an update, tokens are still those that the old policy sampled. With importance weights, the mean gradient
    of the KL term over these tokens equals the mean over tokens of the new policy. Both means are sums over the
    vocabulary."""
    generator = torch.Generator().manual_seed(0)
    reference, old, new = torch.randn(3, 6, 1, generator=generator).double().log_softmax(dim=1)
    every, one = torch.ones(6, 1, dtype=torch.bool), torch.ones(6).double()
    objective = Objective(kl_coefficient=1.0, kl=kind, correction="none")

    def gradient(sampled_from: Tensor, against: Tensor) -> Tensor:
        logprobs = new.clone().requires_grad_()
        for token in range(6):
            probability = sampled_from[token].exp().item()
            inputs = LossInputs(
                logprobs=logprobs[token : token + 1],
                entropy=torch.zeros(1, 1),
                old_logprobs=against[token : token + 1],
                ref_logprobs=reference[token : token + 1],
                advantages=0 * one[:1],
                mask=every[:1],
                kept=every[:1],
                counted=every[:1],
                divisor=torch.tensor(1.0),
                policy_divisor=torch.tensor(1.0),
            )
            loss, _, _ = objective.resolve().loss(inputs)
            (probability * loss).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    torch.testing.assert_close(gradient(old, old), gradient(new, new))


@pytest.mark.parametrize("kept", [[2, 3], [4, 5], [2, 3, 4, 5]])
def test_a_ratio_of_the_sequence_is_over_all_of_it_whichever_tokens_carry_the_loss(kept):
    mask = torch.tensor([[False, False, True, True, True, True]])
    logprobs = torch.tensor([[0.0, 0.0, -1.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    carry = torch.zeros_like(mask)
    carry[0, kept] = True
    objective = Objective(surrogate="sequence", aggregation="sequence", clip_low=0.9, clip_high=0.9)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        advantages=torch.ones(1, dtype=torch.float64),
        mask=mask,
        kept=carry,
        counted=mask,
        divisor=torch.tensor(1.0),
        policy_divisor=torch.tensor(1.0),
    )
    loss, surrogate, _ = objective.resolve().loss(inputs)
    loss.backward()
    ratio, share = math.exp(0.25), len(kept) / 4
    assert float(surrogate.ratio) == pytest.approx(ratio * len(kept))
    assert loss.item() == pytest.approx(-ratio * share)
    assert logprobs.grad is not None
    expected = torch.where(mask, -ratio * share / 4, 0.0)
    torch.testing.assert_close(logprobs.grad, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_wherever_a_number_is_read(value):
    for build in (
        lambda: Sampling(temperature=value),
        lambda: Sampling(top_p=value),
        lambda: LoraSettings(alpha=value),
        lambda: LoraSettings(dropout=value),
        lambda: Objective(top_entropy_share=value),
        lambda: Objective(max_ratio=value),
        lambda: Objective(correction_low=value),
    ):
        with pytest.raises(ValueError, match=f"is {value}; expected a finite number"):
            build()


@pytest.mark.parametrize(
    "objective",
    [
        Objective(max_ratio=1.3),
        Objective(rejection=Rejection("sequence", high=math.inf), correction="none"),
        Objective(max_ratio=1.001, surrogate="sequence"),
        Objective(surrogate="cispo", clip_low=math.inf),
        Objective(correction="truncate", correction_low=1.0, correction_high=1.0),
        Objective(correction="mask", correction_high=math.inf),
        Objective(max_ratio=3.0, clip_low=0.0, clip_high=0.0),
    ],
    ids=str,
)
def test_what_the_settings_accept_the_update_accepts(policy, objective):
    experience, _ = sampled_elsewhere(policy)
    report, gradient = updated(policy, experience, objective)
    assert report.metrics["train/loss"].isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("cut", "message"),
    [(Sampling(4, max_tokens=8, top_p=0.95), "top_p 0.95"), (Sampling(4, max_tokens=8, top_k=20), "top_k 20")],
    ids=["top_p", "top_k"],
)
def test_training_on_a_cut_distribution_is_refused(base, cut, message):
    rewards = [WeightedReward("format", think_answer_format, 1.0)]
    with pytest.raises(ValueError, match=f"{message}.*val_sampling"):
        QeRLModule(TransformersEngine(), rewards, base=base, sampling=cut)
    QeRLModule(TransformersEngine(), rewards, base=base, val_sampling=cut)


@pytest.mark.parametrize("why", ["no live row", "all rejected", "all masked"])
def test_an_update_without_signal_is_one_step_with_a_zero_gradient(policy, why):
    experience, _ = sampled_elsewhere(away_from_its_base(policy))
    objective = Objective()
    if why == "no live row":
        experience = experience._replace(advantages=torch.zeros(ROWS))
    elif why == "all rejected":
        objective = Objective(rejection=Rejection(low=1.0, high=1.0 + 1e-9))
    else:
        experience = experience._replace(mask=torch.zeros_like(experience.mask))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    steps: list[list[Tensor]] = []

    def step() -> Tensor:
        norm = average_and_clip(trained, max_norm=1.0)
        steps.append([parameter.grad for parameter in trained if parameter.grad is not None])
        return norm

    improve(
        policy,
        experience,
        objective.resolve(),
        UpdateSettings(group_size=2, max_tokens=WIDTH - PROMPT, micro_batch_tokens=WIDTH),
        step=step,
        watch=Stopwatch(),
    )
    policy.zero_grad()
    assert [len(gradients) for gradients in steps] == [len(trained)]
    assert all(not gradient.any() for gradient in steps[0])
