"""An error leaves no rollout engine behind."""

from __future__ import annotations

import warnings

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.module import QeRLModule


class CloseEngine(Callback):
    """Closes the rollout engine of a run that fails, so that a notebook gets its memory back.

    Lightning calls ``teardown`` for runs that end well. An engine that cannot be closed any more is a warning, as it is
    the run's own error that the user has to see.

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
