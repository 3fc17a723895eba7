"""Updates of a small policy, for tests."""

from typing import Any

import torch
from torch import Tensor

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Experience
from qerl_pl.objective import Objective, ResolvedObjective
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.training.passes import UpdateSettings
from qerl_pl.update import UpdateReport, improve


def away_from_its_base(policy: Policy) -> Policy:
    """Give the policy an adapter that is not zero; returns the same policy."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


def rows_of(experience: Experience, rows: Any) -> Experience:
    """Select rows, by any index of the first dimension, in a given order."""
    return Experience(**{name: values[rows] for name, values in experience._asdict().items() if values is not None})


def updated(
    policy: Policy,
    experience: Experience,
    objective: Objective | ResolvedObjective,
    teacher: Teacher | None = None,
    **settings: Any,
) -> tuple[UpdateReport, Tensor]:
    """Compute the gradient of one update, on groups of two rows, without changing the policy. Returns the report of the
    update, and the gradient of all trained parameters as one vector."""
    report, [gradient] = steps_of(policy, experience, objective, teacher, **settings)
    return report, gradient


def steps_of(
    policy: Policy,
    experience: Experience,
    objective: Objective | ResolvedObjective,
    teacher: Teacher | None = None,
    **settings: Any,
) -> tuple[UpdateReport, list[Tensor]]:
    """Compute the gradients of an update without changing the policy. Returns the report of the update, and for each of
    its optimizer steps the gradient of all trained parameters as one vector."""
    gradients: list[Tensor] = []

    def step() -> Tensor:
        parts = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
        gradients.append(torch.cat([torch.zeros(0), *parts]))
        policy.zero_grad()
        return torch.zeros(())

    report = improve(
        policy,
        experience,
        objective.resolve() if isinstance(objective, Objective) else objective,
        UpdateSettings(**{"group_size": 2, "max_tokens": 6, "micro_batch_tokens": 40, **settings}),
        step=step,
        watch=Stopwatch(),
        teacher=teacher,
    )
    return report, gradients
