"""Run kernels in Triton's interpreter if there is no GPU, and fill uninitialised memory with NaN."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.interpreter import interpreted


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Import the module of kernels that a test file names in its variable KERNELS."""
    with interpreted():
        yield importlib.import_module(request.module.KERNELS)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills torch.empty: an output that a kernel forgets is seen
    yield
    torch.use_deterministic_algorithms(False)
