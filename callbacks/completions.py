"""Rollouts to files and to TensorBoard, so that one can read what the policy says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from qerl_pl import ranks
from qerl_pl.module import QeRLModule
from qerl_pl.whole import write_whole


class CompletionLogger(Callback):
    """Writes every completion to ``run_dir/completions/*.jsonl`` and a few of them to TensorBoard's text tab.

    One file a rollout (``train-000012.jsonl``), a validation (``validate-000040.jsonl``) or a prediction run, each
    written whole or not at all, so a resumed run writes the same files again instead of repeating lines. A file has the
    completions of all ranks, in the order that one rank would have written them.

    Args:
        every: rollouts between two that are written; validation and prediction are always written.
        num_text: completions shown in TensorBoard each time.

    Raises:
        ValueError: ``every`` is less than 1.
    """

    def __init__(self, every: int = 1, num_text: int = 4) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 (leave the callback out to write nothing)")
        self.every = every
        self.num_text = num_text

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        index = outputs["rollout_index"]
        if index % self.every == 0:
            rows = ranks.gather_groups(outputs["rollout"].evaluation.rows(), pl_module.sampling.num_completions)
            self._write(trainer, f"train-{index:06d}", rows)
            self._show(trainer, "completions/train", rows, index)

    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._finish(trainer, pl_module, "validate")

    def on_test_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._finish(trainer, pl_module, "test")

    def on_predict_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._finish(trainer, pl_module, "predict")

    def _finish(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        rows = pl_module.evaluated
        path = self._write(trainer, f"{stage}-{pl_module.rollout_index:06d}", rows)
        self._show(trainer, f"completions/{stage}", rows, max(0, pl_module.rollout_index - 1))  # as its scalars
        if trainer.is_global_zero and (stage != "validate" or trainer.state.fn != "fit"):
            print(f"{len(rows)} completions written to {path}")

    def _write(self, trainer: Trainer, name: str, rows: Iterable[dict[str, Any]]) -> Path:
        path = Path(trainer.default_root_dir) / "completions" / f"{name}.jsonl"
        if not trainer.is_global_zero:
            return path
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return path

    def _show(self, trainer: Trainer, tag: str, rows: list[dict[str, Any]], step: int) -> None:
        if not trainer.is_global_zero or not rows:
            return
        chosen = rows[:: max(1, len(rows) // max(1, self.num_text))][: self.num_text]
        text = "\n\n---\n\n".join(_as_text(row) for row in chosen)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(tag, text, step)


def _as_text(row: dict[str, Any]) -> str:
    """Markdown with the model's text indented as code, so that nothing in it is rendered."""
    head = f"reward {row['reward']}, answer {row['answer']}, {row['num_tokens']} tokens"
    body = "\n".join("    " + line for line in (row["prompt"] + row["completion"]).splitlines())
    return f"{head}\n\n{body}"
