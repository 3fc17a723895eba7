"""Validate once before the first step, so that curves start at the initial policy."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class ValidateFirst(Callback):
    """Runs the validation loop when a fresh run starts; a resumed run has done so already.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.validate_first.ValidateFirst
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0 or not trainer.enable_validation:
            return
        trainer.validating = True  # selects the loop that `log` writes to
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
