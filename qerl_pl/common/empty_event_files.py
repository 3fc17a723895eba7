"""Delete TensorBoard's event files in which nothing was logged, such as those of a run whose settings were refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger

# bytes; a record has the data's length, a checksum of the length, the data, and a checksum of the data
LENGTH, CHECKSUM = 8, 4


def remove(loggers: Iterable[Logger]) -> None:
    """Delete the event files that this process has opened and that hold only one record, the version of TensorBoard's
    format.

    Lightning opens an event file before a run is set up. Call this on one rank, after the loggers are closed.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in Path(logger.log_dir).glob(f"events.out.tfevents.*.{os.getpid()}.*"):
                if is_empty(path):
                    path.unlink()


def is_empty(path: Path) -> bool:
    """Return whether an event file has no record after the first one, which is the version of the format."""
    with path.open("rb") as file:
        first = int.from_bytes(file.read(LENGTH), "little")
    return path.stat().st_size <= LENGTH + CHECKSUM + first + CHECKSUM
