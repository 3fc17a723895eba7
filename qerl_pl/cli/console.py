"""Filter library messages that do not help a user of this program. Each pattern has the reason next to it."""

from __future__ import annotations

import logging
import re
import warnings

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
    ),
    "vllm.triton_utils.importing": (r"Triton is installed, but doesn't include CPU backend",),  # on every CPU
}
"""Name of a logger to patterns of the messages that are dropped, matched at their start."""


def quieten() -> None:
    """Install the filters above; all other warnings and log messages are printed as before."""
    for pattern in WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    for name, patterns in MESSAGES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(patterns))


class _Without(logging.Filter):
    def __init__(self, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = re.compile("|".join(patterns))

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._pattern.match(record.getMessage())
