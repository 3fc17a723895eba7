"""End all processes of a run when one of them fails."""

from __future__ import annotations

import signal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StopTogether(Callback):
    """Ends the other processes of this machine when rank 0 fails; otherwise they would wait for it until a time-out.

    When another rank fails, Lightning ends its child processes, and torchrun and SLURM end all processes of a job.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.stop_together.StopTogether
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
