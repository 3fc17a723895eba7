"""Checksums equal their definition on every device, and differ after any change."""

import pytest
import torch
from torch import Tensor

from qerl_pl.rollout.checksums import BITS, checksums


def checksum(tensor: Tensor) -> int:
    return checksums({"it": tensor})["it"]


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def by_definition(tensor: Tensor) -> int:
    """Compute the checksum with Python's integers, element by element."""
    total = 0
    for index, bits in enumerate(tensor.contiguous().view(-1).view(BITS[tensor.element_size()]).tolist()):
        factor = signed(index * -0x61C8864680B583EB)
        factor = signed((factor ^ (factor >> 30)) * -0x40A7B892E31B1A47)
        total += (bits + 1) * ((factor ^ (factor >> 27)) | 1)
    return signed(total)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (3, 1, 11)], ids=str)
def test_they_are_those_of_their_definition(shape, dtype):
    tensor = draw(*shape, dtype=dtype)
    assert checksum(tensor) == by_definition(tensor)


def test_each_tensor_has_its_own_and_keeps_its_place():
    tensors = {"b": draw(4, 3), "a": draw(100), "empty": draw(0), "wide": draw(2, 2, dtype=torch.float32)}
    found = checksums(tensors)
    assert list(found) == list(tensors)
    assert found == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert checksums({}) == {}


def test_strides_do_not_matter():
    wide = draw(6, 10)
    assert checksum(wide[:, 2:7]) == checksum(wide[:, 2:7].clone())
    assert checksum(wide.t()) == checksum(wide.t().contiguous()) != checksum(wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_shows(dtype):
    tensor = draw(2, 3, dtype=dtype)
    found = {checksum(tensor)}
    for index in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            changed = tensor.clone()
            bits = changed.view(-1).view(BITS[tensor.element_size()])
            bits[index] ^= torch.tensor(1, dtype=bits.dtype) << bit
            found.add(checksum(changed))
    assert len(found) == 1 + tensor.numel() * 8 * tensor.element_size()


def test_what_a_plain_sum_would_miss_shows():
    tensor = draw(40)
    swapped = tensor.clone()
    swapped[[3, 30]] = tensor[[30, 3]]
    assert len({checksum(tensor), checksum(swapped), checksum(tensor.flip(0)), checksum(tensor.roll(1))}) == 4
    assert len({checksum(torch.zeros(length)) for length in range(20)}) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same(dtype):
    tensors = {"one": draw(300, 70, dtype=dtype), "other": draw(5, dtype=dtype)}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert checksums(on_gpu | {"here": tensors["other"]}) == checksums(tensors | {"here": tensors["other"]})
