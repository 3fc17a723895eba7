"""Run Triton kernels in Triton's interpreter on machines without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch


@contextmanager
def interpreted() -> Iterator[None]:
    """Without a GPU, set TRITON_INTERPRET within the context. Triton reads it when kernels are defined, so the modules
    of kernels have to be imported within the context."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    # For each sum and product of integers the interpreter computes in 64 bits whether it overflows, which takes a third
    # of its time. It drops the result, because only its debug mode uses it.
    assert not interpreter_builder.options.debug
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
