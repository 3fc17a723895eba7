"""Handle Ctrl-C, SIGTERM, SIGUSR1 and the end of trainer.max_time: finish the step, write a checkpoint, and exit."""

import signal
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from callbacks.validate_first import ValidateFirst
from qerl_pl.common.program import SIGNALS, Stopped


class GracefulStop(Callback):
    """Ends the run after the current RL iteration, with a checkpoint, at the first Ctrl-C, SIGTERM or SIGUSR1.

    A second signal ends the run at once. After either, the exit status of the program is 128 plus the signal's number,
    so that a scheduler does not take the run for a finished one. When trainer.max_time is over, the run also ends after
    the current iteration with a checkpoint, but with exit status 0. A signal before the first iteration ends the run at
    once, because there is nothing to save.

    Under SLURM, Lightning would handle SIGUSR1 by writing a checkpoint in the middle of an iteration, which no run can
    resume, and by requeueing the job, which ends it. Here ``docs/launch/slurm.sh`` requeues the job when the run has
    ended.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """Return the program's exit status: 0, or 128 plus the number of the signal that ended the run."""
        return 128 + self._asked if self._asked else 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning appends the Timer of trainer.max_time. The Timer must run before this callback; otherwise the time
        # could end between this callback's check and the Timer's.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: not isinstance(callback, Timer))  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked = 0
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # pyright: ignore[reportAttributeAccessIssue]
        is_over = any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)
        if trainer.strategy.reduce_boolean_decision(bool(self._asked) or is_over, all=False):
            trainer.should_stop = True  # LastCheckpoint saves when this is set
            every = trainer.val_check_batch or float("inf")
            due = (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % every == 0
            is_last = trainer.global_step >= trainer.max_steps
            if is_last and any(isinstance(callback, ValidateFirst) for callback in trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
                due = True
            if not due:  # Lightning validates whenever a run stops; an uninterrupted run would not at this step
                trainer.limit_val_batches = 0
            if not is_last:
                rank_zero_info(f"stopped after step {trainer.global_step}; resume with --ckpt_path last")

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    on_exception = on_train_end

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            raise Stopped(128 + signum)
        self._asked = signum
        name = SIGNALS[signal.Signals(signum)]
        print(f"\n{name}: finishing this step, then writing a checkpoint (again: stop at once)", flush=True)
