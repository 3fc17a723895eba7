"""Show the progress of a run: one updated line on a terminal, one line per rollout elsewhere."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from typing_extensions import override

from qerl_pl.common.phases import Phase, phase
from qerl_pl.common.program import called_as
from qerl_pl.module import QeRLModule

BAR = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} left{postfix}"


class Progress(Callback):
    """Shows how many rollouts are done, the remaining time, reward and entropy.

    On a terminal this is one line, and a second one during validation; messages of the program are printed above
    them. In a job's log or a file it is one line per rollout, and lines while the first rollout or a validation
    lasts. The reward is the mean over rank 0's completions. The remaining time follows from the mean time per rollout
    since this start, including validations. Each validation leaves a line with its reward and accuracy, and a run
    that is complete ends with the command that shows its curves. Lightning's own bar counts epochs and optimizer
    steps, so configs/base.yaml turns it off (``trainer.enable_progress_bar``).

    Args:
        every: rollouts from one line to the next where the output is no terminal. The last rollout always has a line.

    Raises:
        ValueError: ``every`` is less than 1.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.progress.Progress
              init_args: {every: 10}
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 rollout")
        self.every = every
        self._first, self._start = 0, 0.0
        self._rollouts: tqdm[Any] | None = None
        self._batches: tqdm[Any] | None = None
        self._waiting: Phase | None = None
        self._waits = ExitStack()
        self._messages = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        if _has_terminal(trainer):
            loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
            self._messages.enter_context(logging_redirect_tqdm(loggers))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._first, self._start = pl_module.rollout_index, time.perf_counter()
        if _has_terminal(trainer):
            self._rollouts = _bar("rollouts", pl_module.num_rollouts, initial=self._first, leave=True)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self._first and not _has_terminal(trainer):
            self._waits.enter_context(phase("the first rollout and its update"))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        done, total = outputs["rollout_index"] + 1, pl_module.num_rollouts
        self._waits.close()
        reward = outputs["rollout"].sampled.table.total.mean().item()
        if self._rollouts is not None:
            entropy = float(trainer.callback_metrics.get("policy/entropy", float("nan")))
            self._rollouts.set_postfix_str(f"reward {reward:.3f}, entropy {entropy:.3f} nats", refresh=False)
            self._rollouts.update(done - self._rollouts.n)
            return
        if done % self.every and done < total:
            return
        each = (time.perf_counter() - self._start) / (done - self._first)
        left = timedelta(seconds=round(each * (total - done)))
        seconds = sum(outputs["seconds"].values())
        print(f"rollout {done} of {total}: reward {reward:.3f}, {seconds:.1f} s, {left} left", flush=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "validation", trainer.num_val_batches)

    @override
    def on_validation_batch_end(self, *args: Any) -> None:
        self._advance()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._close_batches()
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            found = {name: trainer.callback_metrics.get(f"val/{name}") for name in ("reward", "accuracy")}
            said = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if value is not None)
            tqdm.write(f"validation: {said}", file=sys.stdout)
            sys.stdout.flush()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._close_rollouts()
        if trainer.is_global_zero and trainer.global_step >= trainer.max_steps > 0:
            took = timedelta(seconds=round(time.perf_counter() - self._start))
            folder = shlex.quote(str(trainer.default_root_dir))
            print(f"trained for {took}; `{called_as('report')} {folder}` shows the run", flush=True)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "test", trainer.num_test_batches)

    @override
    def on_test_batch_end(self, *args: Any) -> None:
        self._advance()

    @override
    def on_test_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._close_batches()

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "predict", trainer.num_predict_batches)

    @override
    def on_predict_batch_end(self, *args: Any) -> None:
        self._advance()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._close_batches()

    @override
    def teardown(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: QeRLModule, exception: BaseException) -> None:
        self._close()  # Lightning leaves teardown out; the error is printed below the last state of the lines

    def _begin(self, trainer: Trainer, what: str, batches: list[int | float] | int | float) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        if not _has_terminal(trainer):
            self._waits.close()
            self._waiting = self._waits.enter_context(phase(what, total=int(total), unit="batches"))
        else:
            self._batches = _bar(f"{what}, batches", total, leave=trainer.state.fn != "fit")

    def _advance(self) -> None:
        if self._batches is not None:
            self._batches.update()
        elif self._waiting is not None:
            self._waiting.update()

    def _close(self) -> None:
        self._waits.close()
        self._close_batches()
        self._close_rollouts()
        self._messages.close()

    def _close_rollouts(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
            self._rollouts = None

    def _close_batches(self) -> None:
        if self._waiting is not None:
            self._waits.close()
            self._waiting = None
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def _has_terminal(trainer: Trainer) -> bool:
    return trainer.is_global_zero and sys.stdout.isatty()


def _bar(description: str, total: float, *, leave: bool, initial: int = 0) -> tqdm[Any]:
    return tqdm(
        desc=description,
        total=total,
        initial=initial,
        leave=leave,
        bar_format=BAR,
        file=sys.stdout,
        dynamic_ncols=True,
        smoothing=0,
        mininterval=0,
        disable=False,
    )
