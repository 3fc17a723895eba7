"""Laws of a policy update: changes of the inputs that leave the update as it is, and inputs for which loss, gradient
and metrics are finite."""

import math

import pytest
import torch
from torch import Tensor

from qerl_pl.common.types import Experience
from qerl_pl.objective import Objective
from qerl_pl.objective.correction import Rejection
from qerl_pl.objective.teacher import TeacherTerm
from qerl_pl.policy.policy import Policy, TeacherStates
from qerl_pl.policy.teacher import Teacher
from qerl_pl.update import UpdateReport
from tests.updates import away_from_its_base, rows_of, updated

GROUP, PROMPTS = 2, (1, 3, 4)
LENGTHS = (1, 5, 2, 1, 6, 6)  # of completions
OBJECTIVES = {
    "dapo": Objective(preset="dapo"),
    "grpo": Objective(preset="grpo", kl_coefficient=0.1),
    "dr_grpo": Objective(preset="dr_grpo", entropy_coefficient=0.05),
    "gspo": Objective(preset="gspo"),
    "cispo": Objective(preset="cispo", top_entropy_share=0.5),
    "masked and rejected": Objective(
        correction="mask", correction_low=0.5, correction_divisor="kept", rejection=Rejection("sequence")
    ),
    "kl in the reward": Objective(kl_in="reward", kl_coefficient=0.1),
    "teacher, sampled tokens": Objective(preset="grpo", teacher=TeacherTerm(coefficient=0.5)),
    "teacher, forward": Objective(preset="dapo", teacher=TeacherTerm(divergence="forward")),
    "teacher, reverse": Objective(preset="dr_grpo", teacher=TeacherTerm(divergence="reverse")),
}


def batch(policy: Policy, *, gap: float = 0.1) -> Experience:
    """Make three groups of two completions of 1 to 6 tokens, after prompts of 1 to 4 tokens; one completion has no
    score. At each token the log-probabilities of sampler and trainer differ by a normally distributed number whose
    standard deviation is ``gap``, in nats."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor(PROMPTS).repeat_interleave(GROUP)
    lengths = prompts + torch.tensor(LENGTHS)
    columns = torch.arange(int(lengths.max()))
    sampled = (columns >= prompts.unsqueeze(1)) & (columns < lengths.unsqueeze(1))
    tokens = torch.randint(0, 250, sampled.shape, generator=generator)
    for row in range(1, len(tokens), GROUP):
        tokens[row, : prompts[row]] = tokens[row - 1, : prompts[row]]
    scored = torch.tensor([True, True, True, True, True, False])
    with torch.no_grad():
        own = policy.token_stats(tokens, sampled, temperature=1.0).logprobs
    noise = gap * torch.randn(sampled.shape, generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.7, -0.7, 0.0, 0.0])
    return Experience(
        tokens=tokens,
        lengths=lengths,
        sampled=sampled,
        mask=sampled & scored.unsqueeze(1),
        sampler_logprobs=torch.where(sampled, own - noise, 0.0),
        scored=scored,
        advantages=advantages,
    )


def assert_same(one: tuple[UpdateReport, Tensor], other: tuple[UpdateReport, Tensor]) -> None:
    """Check that metrics and gradients of two updates are equal up to rounding."""
    torch.testing.assert_close(other[1], one[1], rtol=1e-4, atol=1e-6)
    names = one[0].metrics.keys() - {"train/micro_batch_tokens"}
    assert names == other[0].metrics.keys() - {"train/micro_batch_tokens"}
    for name in names:
        first, second = (float(report.metrics[name]) for report, _ in (one, other))
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_update_does_not_depend_on_the_order_of_groups_or_on_the_passes(policy, teacher, objective):
    policy = away_from_its_base(policy)
    experience = batch(policy)
    whole = updated(policy, experience, objective, teacher)
    assert whole[1].norm() > 0
    order = torch.tensor([4, 5, 1, 0, 3, 2])
    assert_same(whole, updated(policy, rows_of(experience, order), objective, teacher))
    assert_same(whole, updated(policy, experience, objective, teacher, micro_batch_tokens=10))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_padding_may_hold_anything(policy, teacher, objective):
    policy = away_from_its_base(policy)
    experience = batch(policy)

    def padded(values: Tensor, fill: float) -> Tensor:
        wide = torch.nn.functional.pad(values, (0, 3))
        inside = torch.arange(wide.shape[1]) < experience.lengths.unsqueeze(1)
        return torch.where(inside, wide, torch.full_like(wide, fill))

    filled = experience._replace(
        tokens=padded(experience.tokens, 7),
        sampled=padded(experience.sampled, 0),
        mask=padded(experience.mask, 0),
        sampler_logprobs=padded(experience.sampler_logprobs, math.nan),
    )
    assert_same(updated(policy, experience, objective, teacher), updated(policy, filled, objective, teacher))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("nats", [60.0, 1e4])
def test_a_sampler_that_is_far_away_leaves_loss_gradient_and_metrics_finite(policy, teacher, objective, nats):
    policy = away_from_its_base(policy)
    report, gradient = updated(policy, batch(policy, gap=nats), objective, teacher)
    assert gradient.isfinite().all()
    assert not [name for name, value in report.metrics.items() if not math.isfinite(float(value))]


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_policy_that_is_its_base_has_no_kl_to_it(policy, kl_in):
    experience = batch(policy, gap=0.0)
    held = Objective(kl_in=kl_in, kl_coefficient=0.5)
    report, gradient = updated(policy, experience, held)
    # Equal passes may round differently, because on some processors a sum depends on the memory addresses of its terms.
    assert abs(float(report.metrics["policy/kl_ref"])) < 1e-6
    assert abs(float(report.metrics["policy/kl_old"])) < 1e-6
    _, free = updated(policy, experience, Objective())
    # Rounding errors of fp32 sums are proportional to the largest terms, and differ among processors.
    torch.testing.assert_close(gradient, free, rtol=1e-5, atol=1e-6 * float(free.abs().max()))


@pytest.mark.parametrize("divergence", ["sampled", "forward", "reverse", "jensen_shannon"])
def test_a_teacher_that_is_the_policy_changes_nothing(policy, divergence):
    own = Teacher(policy.base, dtype=torch.float32, device="cpu")
    experience = batch(policy)
    taught = Objective(teacher=TeacherTerm(coefficient=10.0, divergence=divergence))
    report, gradient = updated(policy, experience, taught, own)
    _, alone = updated(policy, experience, Objective())
    torch.testing.assert_close(gradient, alone, rtol=1e-4, atol=1e-6)
    assert float(report.metrics["teacher/kl"]) == pytest.approx(0.0, abs=1e-6)
    if divergence != "sampled":
        assert float(report.metrics["teacher/divergence"]) == pytest.approx(0.0, abs=1e-6)
        assert float(report.metrics["teacher/agreement"]) == 1.0


def test_without_advantages_the_sampled_term_is_the_policy_gradient_of_the_log_ratio(policy, teacher):
    """The gradient is compared with that of a loss in loops over sampled tokens t: - sum_t w_t importance_t (log q_t -
    log p_t) log p_t. Teacher q and policy p are constants in the factor in brackets, and w_t gives tokens of a row, and
    rows, equal weights."""
    policy = away_from_its_base(policy)
    experience = batch(policy)
    objective = Objective(preset="grpo", teacher=TeacherTerm(coefficient=0.5))
    report, gradient = updated(policy, experience._replace(advantages=torch.zeros(6)), objective, teacher)
    stats = policy.token_stats(experience.tokens, experience.sampled, temperature=1.0)
    taught, _ = teacher.score(experience.tokens, experience.sampled, temperature=1.0)
    loss, kl, count = torch.zeros(()), 0.0, 0
    rows = [row for row in range(6) if experience.mask[row].any()]
    for row in rows:
        tokens = experience.mask[row].nonzero().flatten().tolist()
        for token in tokens:
            logprob = stats.logprobs[row, token]
            importance = (logprob.detach() - experience.sampler_logprobs[row, token]).exp().clamp(max=2.0)
            advantage = taught[row, token] - logprob.detach()
            loss = loss - 0.5 * importance * advantage * logprob / len(tokens) / len(rows)
            kl, count = kl - float(advantage), count + 1
    expected = torch.autograd.grad(loss, [p for p in policy.parameters() if p.requires_grad])
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-7)
    assert float(report.metrics["teacher/kl"]) == pytest.approx(kl / count, rel=1e-4)


@pytest.mark.parametrize(("divergence", "share"), [("forward", 0.0), ("jensen_shannon", 0.5), ("reverse", 1.0)])
def test_without_advantages_the_other_terms_are_means_of_the_divergence(policy, teacher, divergence, share):
    policy = away_from_its_base(policy)
    experience = batch(policy)._replace(advantages=torch.zeros(6))
    objective = Objective(preset="dapo", teacher=TeacherTerm(coefficient=2.0, divergence=divergence))
    report, gradient = updated(policy, experience, objective, teacher)
    _, hidden = teacher.score(experience.tokens, experience.sampled, temperature=1.0)
    states = TeacherStates(hidden, teacher.head(1.0), share)
    stats = policy.token_stats(experience.tokens, experience.sampled, temperature=1.0, teacher=states)
    assert stats.divergence is not None
    mean = stats.divergence[experience.mask].mean()
    expected = torch.autograd.grad(2.0 * mean, [p for p in policy.parameters() if p.requires_grad])
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-7)
    assert float(report.metrics["teacher/divergence"]) == pytest.approx(mean.item(), rel=1e-4)
    assert float(report.metrics["train/loss"]) == pytest.approx(2 * mean.item(), rel=1e-4)
