"""Measure the seconds spent in named phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up wall-clock seconds by phase; a phase may be entered several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of a ``with`` block to the phase ``name``. The GPU is synchronised at the block's start and
        end, because kernels run asynchronously."""
        start = _now()
        try:
            yield
        finally:
            self.seconds[name] += _now() - start


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
