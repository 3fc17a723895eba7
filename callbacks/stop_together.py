"""An error on one rank ends the run."""

from __future__ import annotations

import signal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StopTogether(Callback):
    """Ends the other processes of this machine when the first one fails; else they wait for it until a time-out.

    The other way round it is Lightning that looks after its child processes, and torchrun and SLURM end all of theirs.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.stop_together.StopTogether
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
