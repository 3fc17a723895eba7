"""``launch``, this project's shorter way to start a compiled Triton kernel, does what Triton's launch does, for all
kinds of arguments."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from qerl_pl.kernels import launching

KERNELS = "tests.kernels.scaling"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 100


def launched(kernels: ModuleType, x: Tensor, stride: int, number: int, block: int) -> Tensor:
    out = x.new_empty(SIZE)
    launching.launch(
        kernels.scaling_kernel, (-(-SIZE // block),), (x, out, SIZE, stride, number), {"BLOCK": block}, num_warps=1
    )
    return out


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("stride", "number"), [(1, 1), (1, 16), (16, 1), (3, 17), (16, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_kind_of_number_and_dtype(kernels, dtype, stride, number, block):
    for first in (0, 1, 8):  # an address that is no multiple of 16, too
        x = torch.randn(first + SIZE * stride, device=DEVICE).to(dtype)[first:]
        exact = (x[::stride].float() * number + block).to(dtype)
        torch.testing.assert_close(launched(kernels, x, stride, number, block), exact)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_kernel_is_looked_up_by_kinds_of_numbers_and_not_by_numbers(kernels):
    compiled = launching._compiled
    x = torch.randn(SIZE * 64, device=DEVICE)
    before = compiled.cache_info().currsize
    for number in (3, 5, 7, 9, 33):
        launched(kernels, x, 2, number, 32)
    assert compiled.cache_info().currsize == before + 1
