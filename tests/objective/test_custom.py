"""Functions that a user has written and names in the settings by their import path: a surrogate loss, and
advantages."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qerl_pl.objective import LossInputs, Objective
from qerl_pl.objective.advantages import group_advantages
from qerl_pl.objective.losses import clipped_policy_loss

SOURCE = """
import torch

NOT_A_FUNCTION = 3

def clipped(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)

def bound(logprobs, clip_high):
    return logprobs * clip_high

def many(logprobs, rewards):
    return logprobs

def nameless(a, b):
    return a

def raises(logprobs):
    return logprobs[7]

def of_rows(logprobs, advantages):
    return (logprobs * advantages).sum(dim=1)

def constant(logprobs):
    return torch.zeros_like(logprobs)

def infinite(logprobs):
    return logprobs / 0

def finite_at_first(logprobs):
    return logprobs / (len(logprobs) == 2)

def large_later(logprobs):
    if len(logprobs) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return logprobs

def whole_numbers(rewards):
    return rewards.long()

def too_large(rewards):
    return rewards.double() * 1e39

def in_place(logprobs, mask, advantages, old_logprobs, **others):
    mask.zero_()
    return logprobs.sub_(old_logprobs) * advantages.mul_(others.get("clip_high", 1))

def any_arguments(**given):
    given["scored"].zero_()
    return given["rewards"].sub_(given["rewards"].mean())

def centered(rewards, scored):
    mean = rewards.sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True)
    return rewards - mean
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_functions", None)


def inputs() -> LossInputs:
    """Make the inputs of a loss for four rows, in which some tokens are left out of the loss. Tokens outside of the
    mask have an impossible log-probability, 3, which the loss must not read."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    old = torch.where(mask, -torch.rand(4, 6, generator=generator), 3.0)
    logprobs = (old + 0.4 * torch.randn(4, 6, generator=generator)).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros(4, 6),
        old_logprobs=old,
        advantages=torch.randn(4, generator=generator),
        mask=mask,
        kept=mask & (torch.rand(4, 6, generator=generator) < 0.8),
        counted=mask,
        divisor=torch.tensor(9.0),
        policy_divisor=torch.tensor(9.0),
        importance=torch.rand(4, 6, generator=generator),
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [{}, {"clip_low": 0.1, "clip_high": 0.1}])
def test_a_surrogate_that_is_written_as_ours_gives_the_same_loss_and_gradient(aggregation, bounds):
    found = []
    for surrogate in ("clipped", "own_functions.clipped"):
        batch = inputs()
        loss, _, _ = Objective(surrogate=surrogate, aggregation=aggregation, **bounds).resolve().loss(batch)
        loss.backward()
        assert batch.logprobs.grad is not None
        found.append((loss.detach(), batch.logprobs.grad))
    torch.testing.assert_close(found[0], found[1])


def test_advantages_of_ones_own_are_taken_as_they_are_but_0_without_a_score():
    rewards = torch.tensor([[1.0, 0.0, 5.0], [1.0, 1.0, 1.0]])
    scored = torch.tensor([[True, True, False], [True, True, True]])
    own = Objective(baseline="own_functions.centered").resolve().baseline
    found = group_advantages(rewards, scored, own)
    assert found.tolist() == group_advantages(rewards, scored, "centered").tolist()
    assert found[0, 2] == 0
    assert group_advantages(rewards, torch.zeros_like(scored), own).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"surrogate": "ppo"}, "surrogate is 'ppo'; expected clipped, sequence, cispo, or the import path"),
        ({"surrogate": "own_missing.loss"}, "surrogate is 'own_missing.loss', .*No module named 'own_missing'"),
        ({"surrogate": "own_functions.none"}, "surrogate is 'own_functions.none', .*no attribute 'none'"),
        ({"surrogate": "own_functions.NOT_A_FUNCTION"}, "3 is not a callable object"),
        ({"surrogate": "own_broken.loss"}, "own_broken.loss', which .*division by zero"),
        ({"surrogate": "own_functions.many"}, r"parameters are \(logprobs, rewards\); expected logprobs and, .*mask"),
        ({"surrogate": "own_functions.nameless"}, r"parameters are \(a, b\)"),
        ({"surrogate": "own_functions.bound"}, r"parameters are \(logprobs, clip_high\)"),
        ({"surrogate": "own_functions.raises"}, "own_functions.raises failed: IndexError"),
        ({"surrogate": "own_functions.of_rows"}, r"returned torch.float32 \[2\]; expected .* \[2, 3\]"),
        ({"surrogate": "own_functions.constant"}, "do not depend on logprobs"),
        ({"surrogate": "own_functions.infinite"}, "returned a nan or infinite number"),
        ({"surrogate": "own_functions.clipped", "max_ratio": 3.0}, "max_ratio is 3.0, which .* does not take"),
        ({"surrogate": "own_functions.clipped", "preset": "grpo"}, "preset is 'grpo', which has 'clipped'"),
        ({"baseline": "mean"}, "baseline is 'mean'; expected normalized, batch_normalized"),
        ({"baseline": "own_functions.clipped"}, "expected rewards and, as far as it needs them, scored"),
        ({"baseline": "own_functions.whole_numbers"}, r"returned torch.int64 \[2, 3\]"),
        ({"baseline": "own_functions.too_large"}, "returned a nan or infinite number"),
    ],
    ids=str,
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=rf"^model\.objective\..*{message}") as error:
        Objective(**settings)
    assert "\n" not in str(error.value)


def test_a_function_may_change_its_arguments_and_take_any():
    batch, objective = inputs(), Objective(surrogate="own_functions.in_place", clip_high=0.5).resolve()
    before = [value if value is None else value.detach().clone() for value in batch]
    assert batch.importance is not None
    values = (batch.logprobs - batch.old_logprobs) * batch.advantages.unsqueeze(1) * 0.5
    loss, _, _ = objective.loss(batch)
    torch.testing.assert_close(loss, torch.where(batch.kept, values * batch.importance, 0.0).sum() / 9)
    loss.backward()
    for value, old in zip(batch, before, strict=True):
        torch.testing.assert_close(value, old, rtol=0, atol=0)
    scored, own = torch.ones(1, 2, dtype=torch.bool), Objective(baseline="own_functions.any_arguments").resolve()
    assert group_advantages(torch.tensor([[1.0, 0.0]]), scored, own.baseline).tolist() == [[0.5, -0.5]]
    assert scored.all()


def test_a_value_that_is_not_finite_ends_the_update():
    objective = Objective(surrogate="own_functions.finite_at_first").resolve()
    with pytest.raises(ValueError, match="finite_at_first returned a nan or infinite number"):
        objective.loss(inputs())


def test_a_function_that_runs_out_of_memory_lets_the_pass_be_repeated():
    objective = Objective(surrogate="own_functions.large_later").resolve()
    with pytest.raises(torch.OutOfMemoryError):
        objective.loss(inputs())


def test_settings_that_a_function_takes_reach_it():
    objective = Objective(surrogate="own_functions.bound", clip_high=0.5).resolve()
    batch = inputs()
    assert batch.importance is not None
    expected: Tensor = torch.where(batch.kept, 0.5 * batch.logprobs * batch.importance, 0.0).sum() / 9
    loss, surrogate, _ = objective.loss(batch)
    torch.testing.assert_close(loss, expected)
    ours = clipped_policy_loss(*batch[:1], batch.old_logprobs, batch.advantages, batch.kept, torch.ones(4))
    torch.testing.assert_close(surrogate.ratio, ours.ratio)
    assert surrogate.clipped_high == 0
    assert replace(objective, clip_high=0.5) == objective
