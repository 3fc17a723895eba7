"""For all tests."""

from __future__ import annotations

import ast
import math
import time
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import settings
from jsonargparse import _postponed_annotations

from qerl_pl.common.phases import _Silence

settings.register_profile("no deadline", deadline=None)  # a loaded machine is not a failure
settings.load_profile("no deadline")

parsed = cache(ast.parse)


class ParsesOnce(_postponed_annotations.TypeCheckingVisitor):
    """Parses each module once per process.

    jsonargparse parses whole modules, Lightning's trainer among them, 130 times per command line. That is half of the
    time that reading a configuration takes, and the tests read several hundred.
    """

    def update_aliases(self, module_source: str, module: str, aliases: dict, logger: Any = None) -> None:
        """Add the names under ``if TYPE_CHECKING``."""
        self.module, self.aliases, self.logger = module, aliases, logger
        self.visit(parsed(module_source))


_postponed_annotations.TypeCheckingVisitor = ParsesOnce


OWN_BYTES = 3 * 2**30
"""Most that this process holds on a GPU besides torch's memory: contexts, and vLLM's memory pool."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests will start vLLM on a CPU, import it first, so that engines do not collect garbage in its modules."""
    if not torch.cuda.is_available() and any(item.get_closest_marker("vllm") for item in session.items):
        import_module("tests.imports")


@pytest.fixture(autouse=True)
def _no_phases_before() -> None:
    """Let each test's first phase follow no other, as in a process of its own.

    Otherwise the silence of the tests before counts, and a command that is called in a test names its first phase.
    """
    _Silence.ended = -math.inf


@pytest.fixture(autouse=True)
def _gpu_of_its_own(request: pytest.FixtureRequest) -> None:
    """Skip a test that measures the memory in use on the GPU while another process uses that GPU."""
    if request.node.get_closest_marker("alone") and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        held = [total - free]
        for _ in range(20):  # another process may have freed its memory at this moment
            time.sleep(0.02)
            free, _ = torch.cuda.mem_get_info()
            held.append(total - free)
        mine = torch.cuda.memory_reserved() + OWN_BYTES
        if max(held) > mine or max(held) - min(held) > 2**20:
            pytest.skip(f"other processes use this GPU: {max(held) / 2**30:.1f} GiB of it are held; stop them first")
