"""Lock a run's folder, so that only one process at a time trains in it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common.run_folder import LOCK

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock(Callback):
    """Holds a lock on the run's folder during training, and refuses a folder in which another process trains.

    The operating system frees the lock when the process ends, however it ends. ``train.py`` adds this callback to every
    run.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.run_lock.RunLock
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the lock on the run's folder.

        Raises:
            ValueError: another process holds the lock; names the process and its machine.
        """
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
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
