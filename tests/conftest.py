"""For all tests."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import settings
from jsonargparse import _postponed_annotations

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests will start vLLM on a CPU, import it first, so that engines do not collect garbage in its modules."""
    if not torch.cuda.is_available() and any(item.get_closest_marker("vllm") for item in session.items):
        import_module("tests.imports")
