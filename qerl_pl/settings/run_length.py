"""Check that the number of optimizer steps fits rollouts, passes and mini-batches."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from qerl_pl.objective import Objective


def check_run_length(
    *,
    max_steps: int,
    updates_per_rollout: int,
    mini_batches: int,
    warmup_steps: int,
    batch_size: int,
    objective: Objective,
) -> None:
    """Check that the run is a whole number of rollouts, and that a rollout's prompts divide into mini-batches.

    Args:
        max_steps: optimizer steps of the run; -1 if they are not given.
        updates_per_rollout: passes over each rollout.
        mini_batches: optimizer steps per pass.
        warmup_steps: optimizer steps of the learning rate's warm-up; as many as the run has give a warning.
        batch_size: prompts per rollout over all ranks.
        objective: the loss; its covariance penalty is 0 in the first optimizer step of a rollout.

    Raises:
        ValueError: max_steps is missing, below warmup_steps or no multiple of a rollout's optimizer steps, batch_size
            is no multiple of mini_batches, or a term of the loss would always be 0.
    """
    steps = updates_per_rollout * mini_batches
    if max_steps < 1:
        raise ValueError("trainer.max_steps is not set; schedules need the length of the run in optimizer steps")
    if max_steps % steps:
        each = f"model.updates_per_rollout ({updates_per_rollout})"
        if mini_batches > 1:
            each += f" x model.mini_batches ({mini_batches})"
        raise ValueError(f"trainer.max_steps ({max_steps}) is no multiple of {each}, the optimizer steps of a rollout")
    if batch_size % mini_batches:
        raise ValueError(
            f"data.batch_size ({batch_size} prompts) is no multiple of model.mini_batches ({mini_batches}): every "
            "optimizer step takes equally many prompts"
        )
    covariance = objective.covariance
    if covariance is not None and covariance.kind == "kl" and steps == 1 and objective.ratio_against == "trainer":
        raise ValueError(
            "model.objective.covariance.kind is 'kl' and a rollout has one optimizer step, in which the penalty is 0; "
            "expected kind: clip, or more model.updates_per_rollout or model.mini_batches"
        )
    if steps == 1 and objective.ratio_against == "trainer":
        usual = Objective(preset=objective.preset, surrogate=objective.surrogate)
        for name in ("clip_low", "clip_high", "max_ratio"):
            if (value := getattr(objective, name)) != getattr(usual, name):
                rank_zero_warn(
                    f"model.objective.{name} is {value} and a rollout has one optimizer step, in which the ratio is 1: "
                    "it has no effect, unless model.updates_per_rollout or model.mini_batches is more than 1"
                )
    if warmup_steps > max_steps:
        raise ValueError(
            f"model.warmup_steps is {warmup_steps}; expected at most trainer.max_steps ({max_steps}), or the learning "
            "rate never reaches its full value"
        )
    if warmup_steps == max_steps:
        rank_zero_warn(
            f"model.warmup_steps ({warmup_steps}) is no less than trainer.max_steps ({max_steps}): the learning rate "
            "never reaches its full value"
        )
