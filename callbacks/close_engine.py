"""Close the rollout engine when a run fails."""

from __future__ import annotations

import warnings

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.module import QeRLModule


class CloseEngine(Callback):
    """Closes the rollout engine of a run that fails, so that a notebook gets its memory back.

    Lightning calls ``teardown`` only for runs that end without an error. If closing the engine fails too, this is only
    a warning, so that the user sees the error that ended the run.

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
