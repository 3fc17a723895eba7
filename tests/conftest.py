"""Set-up for all tests."""

from __future__ import annotations

import ast
import gc
import math
import time
from collections.abc import Generator
from functools import cache
from importlib import import_module
from typing import Any

import pytest

import qerl_pl  # noqa: F401  (before torch, which reads how threads wait for each other)

# isort: split
import torch
from hypothesis import settings
from jsonargparse import _postponed_annotations, _typehints

from qerl_pl.common import phases
from qerl_pl.common.phases import _Silence
from tests.program import fork_server

gc.disable()  # until the tests begin: imports and the list of tests make millions of objects, which stay
settings.register_profile("no deadline", deadline=None)  # a loaded machine is not a failure
settings.load_profile("no deadline")

parsed = cache(ast.parse)


class ParsesOnce(_postponed_annotations.TypeCheckingVisitor):
    """Makes jsonargparse parse each module's source once per process.

    Otherwise jsonargparse parses the source of modules, such as Lightning's trainer, 130 times per command line, which
    takes half of the time for reading a configuration. The tests read several hundred configurations.
    """

    def update_aliases(self, module_source: str, module: str, aliases: dict, logger: Any = None) -> None:
        """Add the names under ``if TYPE_CHECKING``."""
        self.module, self.aliases, self.logger = module, aliases, logger
        self.visit(parsed(module_source))


_postponed_annotations.TypeCheckingVisitor = ParsesOnce
# Whether a class implements a protocol is found by reading its signatures, an eighth of the time for a configuration.
_typehints.implements_protocol = cache(_typehints.implements_protocol)


OWN_BYTES = 3 * 2**30
"""Most GPU memory that this process holds in addition to torch's: contexts, and vLLM's memory pool."""
TEST_BYTES, REAL_MODEL_BYTES = 16 * 2**30, 32 * 2**30
"""GPU memory that suffices for any test, and for one with a real model."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests of a GPU first, those of real models and those that start vLLM, so that the processes that
    share the tests end at about the same time."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("real", "vllm")])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Import vLLM before the tests if any of them starts it on a CPU. This saves time: tests.imports excludes the
    modules that are imported now from the garbage collections that every engine makes. Processes of tests are then
    forked from a fork of this process, unless it has several threads, which a fork would not have."""
    use_vllm = any(item.get_closest_marker("vllm") for item in session.items)
    on_cpu = not session.config.option.collectonly and not torch.cuda.is_available()
    if use_vllm and on_cpu:
        import_module("tests.imports")
    gc.enable()
    if use_vllm and on_cpu and torch.get_num_threads() == 1:
        fork_server()


@pytest.fixture(autouse=True)
def _no_phases_before() -> None:
    """Reset the record of when the program last printed something, as if each test had a process of its own.

    The program prints what it is doing if it has printed nothing for some seconds. Without the reset, the time since an
    earlier test's output would count, and a command would print this as soon as it starts.
    """
    _Silence.ended = -math.inf


@pytest.fixture
def phases_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program print what it is doing without waiting some seconds."""
    for name in ("FIRST_S", "LINE_S"):
        monkeypatch.setattr(phases, name, 0.0)


@pytest.fixture(autouse=True)
def _gpu_of_its_own(request: pytest.FixtureRequest) -> None:
    """Skip a test with the marker ``alone``, which measures the memory in use on the GPU, if other processes use this
    GPU."""
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


def lacks_room(item: pytest.Item) -> str:
    """Say how much memory other processes leave free on the GPU, if it is too little for a test; else return ""."""
    if not item.get_closest_marker("gpu") or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    needed = min(REAL_MODEL_BYTES if item.get_closest_marker("real") else TEST_BYTES, total // 2)
    return "" if free >= needed else f"{free / 2**30:.1f} GiB of the GPU are free; {needed / 2**30:.0f} are needed"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the time limit of the test, which the wait does not use up
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before a test that needs a GPU, wait up to ten minutes until other processes leave enough of its memory. After
    the test, free the memory that torch keeps cached, which other processes may need."""
    until = time.monotonic() + 600
    while lacks_room(item) and time.monotonic() < until:
        time.sleep(1)
    result = yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()
    return result


@pytest.fixture(autouse=True)
def _room_on_the_gpu(request: pytest.FixtureRequest) -> None:
    """Skip a test for which other processes leave too little memory of the GPU."""
    if reason := lacks_room(request.node):
        pytest.skip(reason)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the quickstart's model with random weights, which no test may change."""
    from qerl_pl.tools.tiny import make_tiny

    folder = tmp_path_factory.mktemp("base") / "tiny"
    make_tiny(folder, seed=0, sft_steps=0)
    return str(folder)
