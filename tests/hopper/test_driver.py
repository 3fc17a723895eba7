"""CUDA sources are compiled together, once a machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from qerl_pl.hopper import driver, lora_hopper


@pytest.fixture
def loaded(monkeypatch, tmp_path) -> Iterator[list[bytes]]:
    """Cubins that were loaded on a device that is not there; the cache is empty."""
    from triton import knobs

    found: list[bytes] = []
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(
        driver, "load", lambda kernel, device: found.append(driver._cubin(kernel).result().read_bytes())
    )
    driver._cubin.cache_clear()
    yield found
    driver._cubin.cache_clear()


KERNELS = [lora_hopper.kernel(tokens, 1) for tokens in (8, 16)]
GPU = torch.device("cuda", 0)


def test_kernels_are_compiled_once_a_machine(loaded, monkeypatch):
    driver.prepare([*KERNELS, KERNELS[0]], GPU)
    assert loaded == [driver.compiled(kernel) for kernel in KERNELS]
    monkeypatch.setattr(driver, "compiled", lambda kernel: pytest.fail(f"{kernel.name} is compiled again"))
    driver._cubin.cache_clear()  # another process
    driver.prepare(KERNELS, GPU)
    assert loaded[:2] == loaded[2:]
    with pytest.raises(pytest.fail.Exception, match="is compiled again"):
        driver.prepare([KERNELS[0]._replace(code=KERNELS[0].code + "\n")], GPU)


def test_kernels_are_compiled_at_the_same_time(loaded, monkeypatch):
    together = threading.Barrier(len(KERNELS), timeout=20)

    def compiled(kernel: driver.Kernel) -> bytes:
        together.wait()
        return kernel.name.encode()

    monkeypatch.setattr(driver, "compiled", compiled)
    driver.prepare(KERNELS, GPU)
    assert loaded == [kernel.name.encode() for kernel in KERNELS]


def test_compiling_can_start_before_kernels_are_needed(loaded, monkeypatch):
    compiled, begun, may_end = [], threading.Event(), threading.Event()

    def slowly(kernel: driver.Kernel) -> bytes:
        begun.set()
        may_end.wait(20)
        compiled.append(kernel)
        return kernel.name.encode()

    monkeypatch.setattr(driver, "compiled", slowly)
    driver.start_compiling(KERNELS)
    assert begun.wait(20)
    assert not compiled, "the caller did not wait"
    may_end.set()
    driver.prepare(KERNELS, GPU)
    assert len(loaded) == len(compiled) == 2, "each once"


def test_an_error_of_the_compiler_reaches_the_caller(loaded):
    with pytest.raises(RuntimeError, match=r"lora_hopper\.cu does not compile"):
        driver.prepare([KERNELS[0]._replace(code="no such thing;")], GPU)
    assert not loaded
