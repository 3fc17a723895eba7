"""A teacher computes the log-probabilities of its base as a policy without an adapter does, and the divergence of a
policy from itself as teacher is 0."""

import pytest
import torch

from qerl_pl.policy.policy import TeacherStates
from qerl_pl.policy.teacher import Teacher
from tests.policy.test_policy import batch, make_policy, with_adapter


@pytest.mark.parametrize("keep", ["gpu", "host"])
def test_a_teacher_scores_bit_for_bit_as_the_base_of_a_policy_does(base, keep):
    tokens, mask = batch()
    with torch.no_grad():
        expected = make_policy(base).token_stats(tokens, mask, temperature=0.7).logprobs
    teacher = Teacher(base, dtype=torch.float32, device="cpu", keep=keep)
    with teacher.ready():
        logprobs, hidden = teacher.score(tokens, mask, temperature=0.7)
    assert torch.equal(logprobs, expected)
    assert hidden.shape == (int(mask.sum()), teacher.model.config.hidden_size)
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


def test_weights_that_do_not_fit_on_the_device_go_back_to_host_memory(base):
    teacher, moves = Teacher(base, dtype=torch.float32, device="meta", keep="host"), []

    def to(device: torch.device) -> None:
        moves.append(device.type)
        if device.type == "meta":
            raise torch.OutOfMemoryError("some of the weights do not fit")

    teacher.model.to = to
    with pytest.raises(torch.OutOfMemoryError), teacher.ready():
        raise AssertionError("the weights are not on the device")
    assert moves == ["meta", "cpu"]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_divergence_of_a_policy_is_0_at_its_base_and_falls_along_its_gradient(base, beta):
    tokens, mask = batch()
    teacher = Teacher(base, dtype=torch.float32, device="cpu")
    _, hidden = teacher.score(tokens, mask, temperature=1.0)
    states = TeacherStates(hidden, teacher.head(1.0), beta)
    fresh = make_policy(base).token_stats(tokens, mask, temperature=1.0, teacher=states)
    assert fresh.divergence is not None
    assert fresh.agrees is not None
    assert fresh.divergence.abs().max() < 1e-6
    assert torch.equal(fresh.agrees, mask)
    policy = with_adapter(make_policy(base))
    before = policy.token_stats(tokens, mask, temperature=1.0, teacher=states).divergence
    assert before is not None
    assert (before[mask] > 0).all()
    assert not before[~mask].any()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(before.sum(), trained)
    step = 1e-4 / torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter -= step * gradient
        after = policy.token_stats(tokens, mask, temperature=1.0, teacher=states).divergence
    assert after is not None
    assert after.sum() < before.sum()
