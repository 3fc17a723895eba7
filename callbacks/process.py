"""Lock a run's folder, and free the rollout engine and end the other processes of a run that fails."""

import errno
import fcntl
import os
import signal
import socket
import warnings
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common.run_folder import LOCK
from qerl_pl.module import QeRLModule

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock(Callback):
    """Holds a lock on the run's folder during training, so that no second process can train in it.

    The operating system frees the lock when the process ends, however it ends. ``train.py`` adds this callback to every
    run.

    Raises:
        ValueError: when training is set up, if another process holds the lock; the message names process and machine.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or self._file is not None:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            if error.errno in WITHOUT_LOCKS:
                rank_zero_warn(
                    f"the file system of {folder} has no locks: make sure that only one process trains there"
                )
                return
            raise ValueError(
                f"{holder} trains in {folder}; wait until it has ended, or start another run by --run_dir"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    on_exception = teardown


class CloseEngine(Callback):
    """Closes the rollout engine of a run that fails, so that a notebook gets its memory back.

    This is needed because Lightning calls the hook ``teardown`` only for runs that end without an error. If closing the
    engine fails too, a warning says so, and the user still sees the error that ended the run.
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: QeRLModule, exception: BaseException) -> None:
        try:
            pl_module.engine.close()
        except Exception as error:
            warnings.warn(f"the rollout engine could not be closed: {error!r}", RuntimeWarning, stacklevel=2)


class StopTogether(Callback):
    """When rank 0 fails, ends the processes that Lightning started for the run's other ranks on this machine; otherwise
    they would wait for rank 0 until a time-out.

    Other failures need no callback: when another rank fails, Lightning ends its child processes, and torchrun and SLURM
    end all processes of a job.
    """

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGKILL)
