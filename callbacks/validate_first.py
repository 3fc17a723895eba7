"""Validate before the first step and after the last one, so that curves show the policy before and after training."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class ValidateFirst(Callback):
    """Runs a validation before the first step of a new run (not of a resumed one) and after the last step, even if
    ``trainer.val_check_interval`` does not ask for one there."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step > 0 or not trainer.enable_validation:
            return
        trainer.validating = True  # selects the loop that `log` writes to
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True  # Lightning validates when a run stops
