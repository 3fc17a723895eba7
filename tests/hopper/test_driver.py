"""All CUDA sources of this project are compiled in parallel, and each of them only once per machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qerl_pl.hopper import driver, lora_hopper


@pytest.fixture
def loaded(monkeypatch, tmp_path) -> Iterator[list[bytes]]:
    """Imitate a GPU and an empty cache of compiled kernels. Yields a list to which the compiled code (cubin) of every
    kernel is added when it is loaded on this GPU."""
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


def test_an_error_of_the_compiler_reaches_the_caller(loaded):
    with pytest.raises(RuntimeError, match=r"lora_hopper\.cu does not compile"):
        driver.prepare([KERNELS[0]._replace(code="no such thing;")], GPU)
    assert not loaded
