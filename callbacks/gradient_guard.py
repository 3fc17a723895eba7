"""Refuse optimizer steps that would damage the policy."""

import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.files import write_whole
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.loop import Rollout
from qerl_pl.training.terms import mini_batches


class GradientGuard(Callback):
    """Stops the run before an optimizer step whose gradient is not finite, or has a far larger norm than those of
    recent steps.

    The step is not taken, so adapter, optimizer and learning rate schedule keep their state. ``last.ckpt`` is from an
    earlier RL iteration, and the prompts and completions of the rollout are written to the folder ``faults`` in the
    run's folder. A loss that is not finite also stops the run, because its gradient is not finite. Steps whose gradient
    is 0 are not checked, and no step is compared with them.

    Steps on mini-batches with a signal are only compared with each other, and so are steps on mini-batches without a
    signal. In a mini-batch without a signal, all completions of each prompt earned the same reward; only terms of the
    loss such as the KL divergence or the entropy then have a gradient, which may be hundreds of times smaller than that
    of the rewards.

    Args:
        max_ratio: the run stops if the gradient norm before clipping exceeds its median over recent steps by this
            factor.
        window: number of steps in that median.
        min_steps: number of earlier steps with a gradient that a comparison needs; before that, only non-finite
            gradients stop the run.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.gradient_guard.GradientGuard
              init_args: {max_ratio: 10.0, window: 50}
    """

    def __init__(self, max_ratio: float = 100.0, window: int = 50, min_steps: int = 10) -> None:
        if not max_ratio > 1:
            raise ValueError(f"max_ratio is {max_ratio}; expected more than 1")
        if not 1 <= min_steps <= window:
            raise ValueError(f"min_steps is {min_steps} and window is {window}; expected 1 <= min_steps <= window")
        self.max_ratio, self.window, self.min_steps = max_ratio, window, min_steps
        self._norms: dict[bool, list[float]] = {True: [], False: []}  # by whether the mini-batch had a signal
        self._rollout: Rollout | None = None
        self._have_signal: list[bool] = []  # for each mini-batch of the rollout, over all ranks

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms[True], "norms_without_signal": self._norms[False]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._norms = {True: list(state_dict["norms"]), False: list(state_dict.get("norms_without_signal", ()))}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        pl_module.loop.observers.append(partial(self._after_rollout, pl_module))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: QeRLModule, optimizer: Optimizer) -> None:
        """Check the gradient; Lightning calls this inside ``optimizer.step``, before anything is changed."""
        norm = pl_module.grad_norm.item()
        if norm == 0:
            return
        has_signal = self._have_signal[trainer.global_step % len(self._have_signal)]
        norms = self._norms[has_signal]
        usual = statistics.median(norms) if len(norms) >= self.min_steps else math.inf
        if math.isfinite(norm) and norm <= self.max_ratio * usual:
            self._norms[has_signal] = [*norms, norm][-self.window :]
            return
        shown = f"{norm:.3g}, {norm / usual:.3g} times the usual {usual:.3g}" if math.isfinite(norm) else f"{norm}"
        raise CheckFailed(
            f"the gradient's norm in rollout {pl_module.rollout_index} is {shown}; the step was not taken. "
            f"Prompts and completions of the rollout: {self._write(trainer, pl_module)}. --ckpt_path last "
            "repeats the same rollout: raise GradientGuard.max_ratio if this is not a fault, or resume from "
            "previous.ckpt or best.ckpt with a lower learning rate"
        )

    def _after_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        self._rollout = rollout
        has_signal, number = rollout.chosen.has_signal, pl_module.settings.mini_batches
        of_groups = mini_batches(rollout.places, number)
        parts = ranks.gather_values([bool(has_signal[of_groups == index].any()) for index in range(number)])
        self._have_signal = [any(flags) for flags in zip(*parts, strict=True)]

    def _write(self, trainer: Trainer, pl_module: QeRLModule) -> Path:
        assert self._rollout is not None, "the rollout is stored before each update"
        name = f"rollout_{pl_module.rollout_index:06}_rank_{trainer.global_rank}.jsonl"
        path = Path(trainer.default_root_dir, "faults", name)
        rows = self._rollout.chosen.rows()
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return path
