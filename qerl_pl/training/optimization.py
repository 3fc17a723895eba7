"""Build the optimizer and the learning-rate schedule, and average gradients over ranks and clip them."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from qerl_pl.common import ranks

Schedule = Literal["constant_with_warmup", "linear", "cosine"]


def make_optimizer(build: Callable[[list[dict[str, Any]]], Optimizer], parameters: Iterable[Tensor]) -> Optimizer:
    """Build the optimizer by calling ``build``, with the parameters split into groups by ``parameter_groups``. Raises
    ValueError if the optimizer refuses its settings, such as a negative learning rate, or if its trial step on a small
    matrix fails, is not finite, or goes along the gradient instead of against it.
    """
    groups = parameter_groups(parameters)
    try:
        made = build(groups)
        trial = _trial_step(build, groups[0]["params"][0].device) if groups else None
    except Exception as error:  # an optimizer may raise any error
        raise ValueError(
            f"model.optimizer refuses its settings: {error or type(error).__name__}; change model.optimizer.init_args"
        ) from error
    kind = type(made).__name__
    if trial is not None and not trial <= 0:
        raise ValueError(
            f"model.optimizer {kind} changes a weight of 0 by {trial} in a step with gradient 1; expected a finite "
            "number below 0: change model.optimizer.init_args (lr, weight_decay, maximize)"
        )
    if trial == 0:
        rank_zero_warn(f"model.optimizer {kind} changes nothing in a trial step (lr 0?): the run would learn nothing")
    return made


def _trial_step(build: Callable[[list[dict[str, Any]]], Optimizer], device: torch.device) -> float:
    """Return by how much an optimizer with the run's settings changes a weight of 0 in its first step with a gradient
    of 1; NaN if the change is infinite."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    weight.grad = torch.ones_like(weight)
    build([{"params": [weight]}]).step()
    change = weight.detach()[0, 0].item()
    return change if math.isfinite(change) else math.nan  # the caller would accept -inf as a number below 0


def parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Split the parameters that require a gradient into matrices and vectors (norm weights). Vectors get no weight
    decay, because it would pull them towards 0, while the neutral value of a norm weight is near 1."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
    return [*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups


def check_groups(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if the optimizer state of a checkpoint (``saved``, a list of one state, or empty) has groups
    with other numbers of parameters than ``groups``, those of this run's optimizer."""
    for state in saved:
        had = [len(group["params"]) for group in state["param_groups"]]
        wanted = [len(group["params"]) for group in groups]
        if had != wanted:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {had} parameters and this run {wanted} (matrices, then "
                "norms without weight decay): other parameters were trained, or by another version of this program; "
                "start in a new --run_dir"
            )


def lr_factor(step: int, *, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Return the factor of the learning rate in optimizer step ``step``, counted from 0. The factor rises linearly to 1
    over ``warmup_steps``. Then "constant_with_warmup" stays at 1; "linear" and "cosine" fall to 0 at ``total_steps``.
    """
    # The warm-up begins at 1 / warmup_steps and not at 0, because a step at rate 0 would waste a rollout.
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant_with_warmup":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def lr_scheduler(optimizer: Optimizer, *, schedule: Schedule, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Create the learning-rate scheduler that multiplies the rate of every parameter group by ``lr_factor``."""
    return LambdaLR(
        optimizer, partial(lr_factor, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps)
    )


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of an optimizer's parameter groups, except the learning rate, which the schedule sets."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def restore_settings(
    optimizer: Optimizer,
    scheduler: LambdaLR,
    settings: Sequence[dict[str, Any]],
    before: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Set an optimizer's settings (learning rate, betas, ...) to those of this run's configuration, after a checkpoint
    was loaded, which replaced them; log every value that differs.

    ``settings`` is what ``group_settings`` returned before the loading, and ``before`` what it returned in the earlier
    process that wrote the checkpoint; None if that is unknown. Values that are equal in both stay as the checkpoint has
    them, because some optimizers, such as Prodigy, keep state in their parameter groups. The scheduler must already be
    at the checkpoint's optimizer step.
    """
    changed = {}
    groups = optimizer.param_groups
    had = before or [{} for _ in settings]
    for group, configured, old, factor in zip(groups, settings, had, scheduler.lr_lambdas, strict=True):
        new = {name: value for name, value in configured.items() if name not in old or old[name] != value}
        changed |= {name: (group.get(name), value) for name, value in new.items() if group.get(name) != value}
        group.update(new, lr=configured["initial_lr"] * factor(scheduler.last_epoch))
    scheduler.base_lrs = [group["initial_lr"] for group in groups]
    for name, (saved, now) in changed.items():
        name = "lr" if name == "initial_lr" else name
        rank_zero_info(f"model.optimizer: {name} is {now} from here on; the checkpoint had {saved}")


def average_and_clip(parameters: Iterable[Tensor], *, max_norm: float) -> Tensor:
    """Average the gradients over ranks, clip them, and return the norm [] of all gradients before clipping. Every rank
    must call this function. With ``max_norm`` 0, gradients are not clipped.

    A parameter without a gradient gets the gradient 0. This happens to all of them if no row contributes to the loss
    (all advantages are 0, or all rows were rejected or masked). The optimizer then still makes a step: the schedule
    advances, and AdamW moves by its momentum and decays the weights. TRL and verl do the same.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    ranks.average_gradients(trained)
    return torch.nn.utils.clip_grad_norm_(trained, max_norm or float("inf"))
