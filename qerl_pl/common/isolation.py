"""Protect the trainer's global random state and torch settings from a rollout engine that runs in the same process."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def loaded(package: str) -> Any:
    """Return a package if it has been imported, else None: then it has no state to protect."""
    return sys.modules.get(package)


def rng_restorer() -> Callable[[], None]:
    """Return a function that sets the global random states of Python and, if imported, of NumPy and torch (CPU and
    current GPU) to their present values."""
    torch, numpy = loaded("torch"), loaded("numpy")
    parts = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        parts.append(partial(numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        parts.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            parts.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))

    def restore() -> None:
        for part in parts:
            part()

    return restore


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the states of ``rng_restorer`` at the end of the context."""
    restore = rng_restorer()
    try:
        yield
    finally:
        restore()


@contextmanager
def preserved_torch_settings() -> Iterator[None]:
    """Restore torch's thread count, matrix-product precision and default dtype at the end of the context, if torch has
    been imported."""
    if (torch := loaded("torch")) is None:
        yield
        return
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        # vLLM's CPU worker replaces set_num_threads by a function without effect
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Turn off torch's deterministic mode within the context, because some of vLLM's operations would raise errors."""
    import torch

    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
