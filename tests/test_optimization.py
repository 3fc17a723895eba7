"""Laws of the parameter groups and of the learning rate."""

import copy
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from qerl_pl.training.optimization import (
    Schedule,
    average_and_clip,
    check_groups,
    group_settings,
    lr_factor,
    lr_scheduler,
    parameter_groups,
    restore_settings,
)

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 4, 12])
def test_the_ramp_starts_above_zero_and_what_follows_is_the_usual_schedule(schedule, warmup):
    total = 12
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0)
    usual = get_scheduler(
        SchedulerType(schedule),
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3.0),
        num_warmup_steps=warmup,
        num_training_steps=total,
    )
    ours = lr_scheduler(optimizer, schedule=schedule, warmup_steps=warmup, total_steps=total)
    rates = []
    for step in range(total):
        if step < warmup:
            assert ours.get_last_lr()[0] == pytest.approx(3.0 * (step + 1) / warmup)
        else:
            assert ours.get_last_lr()[0] == pytest.approx(usual.get_last_lr()[0], abs=1e-12)
        rates.append(ours.get_last_lr()[0])
        for scheduler in (ours, usual):
            scheduler.optimizer.step()
            scheduler.step()
    assert min(rates) > 0, "every rollout is learnt from"
    assert lr_factor(total, schedule=schedule, warmup_steps=warmup, total_steps=total) in (0.0, 1.0)


def trained_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 4, bias=False))
    model[2].weight.requires_grad_(False)
    return model


def test_weight_decay_leaves_norms_and_biases_alone():
    model = trained_model()
    groups = parameter_groups(model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"0.weight"}
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert {id(parameter) for parameter in grouped} == {id(p) for p in model.parameters() if p.requires_grad}


def test_without_vectors_there_is_one_group_with_the_optimizers_own_decay():
    (group,) = parameter_groups([nn.Parameter(torch.zeros(2, 2))])
    assert "weight_decay" not in group


def test_the_moments_of_both_groups_come_back():
    first, second = trained_model(), trained_model()
    second.load_state_dict(first.state_dict())
    optimizers = [torch.optim.AdamW(parameter_groups(model.parameters()), lr=0.1) for model in (first, second)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    step(first, optimizers[0])
    state = copy.deepcopy(optimizers[0].state_dict())  # moments are shared, not copied, when they are loaded
    check_groups([state], parameter_groups(second.parameters()))
    optimizers[1].load_state_dict(state)
    second.load_state_dict(first.state_dict())
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(model, optimizer)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


class Counting(torch.optim.SGD):
    """Optimizer that keeps its state in its parameter groups, as Prodigy does."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        for group in self.param_groups:
            group["count"] = 0

    def step(self) -> None:
        for group in self.param_groups:
            group["count"] += 1


def test_a_resumed_optimizer_has_the_settings_of_the_start_and_the_checkpoints_state_in_its_groups():
    def start(momentum: float) -> tuple[Counting, LambdaLR, list[dict[str, Any]]]:
        optimizer = Counting(parameter_groups(trained_model().parameters()), lr=0.1, momentum=momentum)
        scheduler = lr_scheduler(optimizer, schedule="linear", warmup_steps=0, total_steps=10)
        return optimizer, scheduler, group_settings(optimizer)

    optimizer, scheduler, before = start(0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    state = copy.deepcopy(optimizer.state_dict())
    for momentum in (0.5, 0.25):
        resumed, schedule, settings = start(momentum)
        resumed.load_state_dict(copy.deepcopy(state))
        schedule.load_state_dict(scheduler.state_dict())
        restore_settings(resumed, schedule, settings, before)
        expected = {"count": 3, "momentum": momentum, "lr": pytest.approx(0.07)}
        assert [{name: group[name] for name in expected} for group in resumed.param_groups] == [expected] * 2


def test_an_optimizer_of_other_groups_is_refused():
    one_group = torch.optim.AdamW([p for p in trained_model().parameters() if p.requires_grad])
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters and this run \[1, 3\]"):
        check_groups([one_group.state_dict()], parameter_groups(trained_model().parameters()))


def test_a_step_without_any_gradient_is_a_step_with_a_zero_gradient():
    found = []
    for last in (None, torch.zeros(3, 2)):
        weight = nn.Parameter(torch.ones(3, 2))
        optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
        for gradient in (torch.full((3, 2), 0.5), last):
            weight.grad = None if gradient is None else gradient.clone()
            norm = average_and_clip([weight], max_norm=1.0)
            before = weight.detach().clone()
            optimizer.step()
        assert norm == 0
        assert not torch.equal(before, weight)  # by momentum and decay
        found.append(weight.detach())
    assert torch.equal(*found)
