"""Show the progress of a run: one updated line on a terminal, one line per rollout elsewhere."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.phases import Phase, bar_on_stdout, phase
from qerl_pl.common.program import called_as
from qerl_pl.module import QeRLModule


class Progress(Callback):
    """Shows how many rollouts are done, the remaining time, reward and entropy.

    On a terminal, one line is updated, and a second one during validation; messages of the program are printed above
    them. In a job's log or a file there is one line per rollout, with seconds instead of entropy, and further lines
    while the first rollout or a validation lasts. While vLLM samples for long, it shows how many completions are
    finished (``qerl_pl.rollout.vllm.sampling_bar``). The reward is the mean over the scored completions of all ranks.
    The remaining time is computed from the mean time per rollout, validations included, since this process started to
    train. Each validation leaves a line with its reward and accuracy, and a complete run ends with the command that
    reports on it, if it has the files of TensorBoard's logger. A start that finds all rollouts done says so, and how to
    train longer, and a run that EarlyStopping ends says why. Lightning's own bar counts epochs and optimizer steps, so
    configs/base.yaml turns it off (``trainer.enable_progress_bar``).

    Args:
        every: rollouts from one line to the next if the output is no terminal. The last rollout always has a line.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.progress.Progress
              init_args: {every: 10}
    """

    def __init__(self, every: int = 1) -> None:
        require_at_least(1, every=every)
        self.every = every
        self._first, self._start = 0, 0.0
        self._trains = False
        self._rollouts: tqdm[Any] | None = None
        self._batches: tqdm[Any] | Phase | None = None
        self._waits = ExitStack()  # what closes the bar of batches, or the messages during the first rollout
        self._messages = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        if _has_terminal(trainer):
            loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
            self._messages.enter_context(logging_redirect_tqdm(loggers))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._first, self._start, self._trains = pl_module.rollout_index, time.perf_counter(), True
        if _has_terminal(trainer):
            self._rollouts = bar_on_stdout("rollouts", pl_module.num_rollouts, initial=self._first, leave=True)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, *_: Any) -> None:
        if pl_module.rollout_index == self._first and not _has_terminal(trainer):
            self._waits.enter_context(phase("the first rollout and its update"))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        self._waits.close()
        table = outputs["rollout"].sampled.table
        rewards = ranks.gather(table.total[table.scored])
        if not trainer.is_global_zero:
            return
        done, total = outputs["rollout_index"] + 1, pl_module.num_rollouts
        values: list[str] = []
        if table.rewarded:
            values.append(f"reward {rewards.double().mean().item():.3f}" if len(rewards) else "no completion scored")
        if (kl := outputs["update"].metrics.get("teacher/kl")) is not None:
            values.append(f"KL to the teacher {float(kl):.4f}")
        if self._rollouts is not None:
            entropy = float(trainer.callback_metrics.get("policy/entropy", float("nan")))
            self._rollouts.set_postfix_str(", ".join([*values, f"entropy {entropy:.3f} nats"]), refresh=False)
            self._rollouts.update(done - self._rollouts.n)
        elif done % self.every == 0 or done >= total:
            mean_s = (time.perf_counter() - self._start) / (done - self._first)
            left = timedelta(seconds=round(mean_s * (total - done)))
            seconds = sum(outputs["seconds"].values())
            values += [f"{seconds:.1f} s", f"{left} left"]
            print(f"rollout {done} of {total}: {', '.join(values)}", flush=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._close_rollouts()
        if not trainer.is_global_zero:
            return
        done, total = pl_module.rollout_index, pl_module.num_rollouts
        for callback in trainer.early_stopping_callbacks:
            if done < total and (why := callback.stopping_reason_message):
                print(f"stopped after rollout {done} of {total} by EarlyStopping: {why}", flush=True)
        if trainer.global_step >= trainer.max_steps > 0:
            took = timedelta(seconds=round(time.perf_counter() - self._start))
            has_curves = any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)  # report reads them
            folder = shlex.quote(str(trainer.default_root_dir))
            shown = f"; `{called_as('report')} {folder}` shows the run" if has_curves else ""
            print(f"trained for {took}{since_resume(self._first)}{shown}", flush=True)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        """Called by Lightning at the end of ``fit``, also if there was nothing to train."""
        if trainer.is_global_zero and not self._trains and trainer.global_step >= trainer.max_steps > 0:
            done = pl_module.rollout_index
            print(
                f"nothing to train: all {done} rollouts of {trainer.default_root_dir} are done; to train longer, raise "
                f"trainer.max_steps, the number of optimizer steps, which is {trainer.max_steps}",
                flush=True,
            )

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "validation", trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "test", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._begin(trainer, "predict", trainer.num_predict_batches)

    @override
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self._batches is not None:
            self._batches.update()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._end()
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            names = ("reward", "accuracy") if pl_module.is_rewarded else ("completion_tokens",)
            metrics = {name: trainer.callback_metrics.get(f"val/{name}") for name in names}
            shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items() if value is not None)
            tqdm.write(f"validation: {shown}", file=sys.stdout)
            sys.stdout.flush()

    @override
    def on_test_end(self, *_: Any, **__: Any) -> None:
        self._end()

    on_predict_end = on_test_end

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        self._end()
        self._close_rollouts()
        self._messages.close()

    on_exception = teardown  # after an error Lightning calls no teardown; the error is printed below the lines

    def _begin(self, trainer: Trainer, what: str, batches: list[int | float] | int | float) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        self._waits.close()
        if _has_terminal(trainer):
            bar = bar_on_stdout(f"{what}, batches", total, leave=trainer.state.fn != "fit")
            self._batches = self._waits.enter_context(closing(bar))
        else:
            self._batches = self._waits.enter_context(phase(what, total=int(total), unit="batches"))

    def _end(self) -> None:
        self._waits.close()
        self._batches = None

    def _close_rollouts(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
            self._rollouts = None


def since_resume(first: int) -> str:
    """Return words for a number of a resumed run that does not count the ``first`` rollouts, which were done before the
    resume; the empty string for a start from the beginning (``first`` is 0)."""
    return f" since the resume after rollout {first}" if first else ""


def _has_terminal(trainer: Trainer) -> bool:
    return trainer.is_global_zero and sys.stdout.isatty()
