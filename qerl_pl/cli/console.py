"""Filter library messages that do not help a user of this program. Each pattern has the reason next to it."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

WARNINGS = (
    r"It is recommended to use .* when logging on epoch level",  # vLLM's process group of one looks distributed
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning against torch
    r"Checkpoint directory .* exists and is not empty",  # expected when a run is resumed
    r"Experiment logs directory .* exists and is not empty",  # the program renames an earlier metrics.csv first
    r"The dirpath has changed from",  # expected when a run is evaluated
    r".*there is no last checkpoint available",  # expected at the first start with --ckpt_path last
)
MESSAGES = {
    "lightning.pytorch.utilities.rank_zero": (
        r"\W*Tip: For seamless cloud",  # an advertisement
        r"TPU available: False",
        r"`Trainer.fit` stopped: `max_steps=",  # a run that ends as it should; callbacks.progress.Progress says so
        r"`Trainer\(val_check_interval=1\)` was configured",  # --smoke does it
    ),
    "vllm.triton_utils.importing": (r"Triton is installed, but doesn't include CPU backend",),  # on every CPU
}
"""Name of a logger to patterns of the messages that are dropped, matched at their start."""
_with_place = warnings.formatwarning


def quieten() -> None:
    """Install the filters above; other warnings and messages are printed, this program's own warnings in one line."""
    warnings.formatwarning = _in_one_line
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name, patterns in MESSAGES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(patterns))


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning: without the place in the code where this program warns its user, which does not help them."""
    own = Path(__file__).parents[2]
    if any(Path(filename).is_relative_to(own / package) for package in ("qerl_pl", "callbacks", "datamodules")):
        return f"warning: {message}\n"
    return _with_place(message, category, filename, lineno, line)


class _Without(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._pattern.match(record.getMessage())
