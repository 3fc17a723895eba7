"""Messages of libraries that no user of this program needs: all that are held back, with the reason, in one place."""

from __future__ import annotations

import logging
import re
import warnings

WARNINGS = (
    r"It is recommended to use .* when logging on epoch level",  # vLLM's process group of one looks distributed
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning against torch
    r"Checkpoint directory .* exists and is not empty",  # so it should be when a run goes on
    r"The dirpath has changed from",  # so it should be when a run is evaluated
    r".*there is no last checkpoint available",  # the first start of a command that may be repeated; its hint is wrong
)
MESSAGES = {
    "lightning.pytorch.utilities.rank_zero": (
        r"\W*Tip: For seamless cloud",  # an advertisement
        r"TPU available: False",
    ),
    "vllm.triton_utils.importing": (r"Triton is installed, but doesn't include CPU backend",),  # on every CPU
}
"""A logger's name to the beginnings of what it says."""


def quieten() -> None:
    """Hold the messages back from now on; everything else is said as before."""
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
