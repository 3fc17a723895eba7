"""Close the rollout engine when a run fails."""

from __future__ import annotations

import warnings

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.module import QeRLModule


class CloseEngine(Callback):
    """Closes the rollout engine of a run that fails, so that a notebook gets its memory back.

    Lightning calls ``teardown`` only for runs that end without an error. If closing fails too, that is only a warning,
    because the user has to see the error of the run.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.close_engine.CloseEngine
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: QeRLModule, exception: BaseException) -> None:
        try:
            pl_module.engine.close()
        except Exception as error:
            warnings.warn(f"the rollout engine could not be closed: {error!r}", RuntimeWarning, stacklevel=2)
