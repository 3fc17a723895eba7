"""Filter out messages of libraries that do not help a user of this program."""

import logging
import re
import threading
import warnings
from pathlib import Path

WARNINGS = (
    # vLLM initialises torch.distributed with one process, from which Lightning concludes that the run has several
    r"It is recommended to use .* when logging on epoch level",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # caused by code of Lightning
    r"Checkpoint directory .* exists and is not empty",  # true of every run that is resumed
    r"Experiment logs directory .* exists and is not empty",  # no data is lost, because metrics.csv is renamed
    r"The dirpath has changed from",  # always true of evaluations, which have a separate folder
    r".*there is no last checkpoint available",  # true of the first start with --ckpt_path last
    # that a checkpoint of ModelCheckpoint is written after the step, as is usual, with code that would change this
    r"Using ModelCheckpoint with manual optimization and every_n_train_steps",
    r"Precision loss occurred in moment calculation",  # some values that policy.jumps compares are almost equal
)
MESSAGES = {
    "lightning.pytorch.utilities.rank_zero": (
        r"\W*Tip: For seamless cloud",  # an advertisement
        r"TPU available: False",
        r"\W*Detected KeyboardInterrupt",  # the program prints its own message after Ctrl-C
        r"Restored all states from the checkpoint",  # an earlier message says this
        r"`Trainer.fit` stopped: `max_steps=",  # the regular end of a run; callbacks.progress.Progress reports it
        r"`Trainer\(val_check_interval=1\)` was configured",  # the option --smoke configures it
    ),
    "lightning.fabric.utilities.seed": (r"(\[rank: \d+\] )?Seed set to",),  # the run's config.yaml has the seed
    "vllm.triton_utils.importing": (r"Triton is installed, but doesn't include CPU backend",),  # on every CPU
}
"""Maps names of loggers to patterns, matched at the start, of messages that are not shown."""
_with_place = warnings.formatwarning


def quieten() -> None:
    """Suppress library messages that match the patterns in ``WARNINGS`` and ``MESSAGES``, and the tracebacks of errors
    in threads that the main thread reports later. Warnings of this program are printed in one line each."""
    warnings.formatwarning = _in_one_line
    threading.excepthook = _unless_kept
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name, patterns in MESSAGES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(patterns))


def _unless_kept(failed: threading.ExceptHookArgs) -> None:
    # A thread, such as TensorBoard's writer, may store an OSError, such as that of a full disk, in its attribute
    # ``exception``. The main thread raises it later, so the thread prints no traceback.
    if isinstance(failed.exc_value, OSError) and getattr(failed.thread, "exception", None) is failed.exc_value:
        return
    threading.__excepthook__(failed)


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    root = Path(__file__).parents[2]
    if any(Path(filename).is_relative_to(root / package) for package in ("qerl_pl", "callbacks", "datamodules")):
        return f"warning: {message}\n"
    return _with_place(message, category, filename, lineno, line)


class _Without(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._pattern.match(record.getMessage())
