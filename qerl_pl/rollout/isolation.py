"""Global state that belongs to the trainer, kept safe from what a rollout engine does in the same process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the global streams of Python, NumPy and torch (CPU and the current GPU) back as they were, come what may."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  (the legacy stream is global)
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


@contextmanager
def preserved_torch_settings() -> Iterator[None]:
    """Put torch's thread count, matrix product precision and default dtype back as they were, come what may."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker puts a function that does nothing in its place
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
