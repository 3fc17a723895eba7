"""When a vLLM engine ends, the memory of its tensors is freed even if something still refers to them, and no other
memory is freed."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qerl_pl.rollout.vllm.memory import referred_to, release


class Indices:
    """An object that is no torch module and holds a tensor in an attribute, like the objects through which vLLM calls
    LoRA kernels."""

    def __init__(self) -> None:
        self.table = torch.zeros(8192, dtype=torch.int64)


@pytest.mark.parametrize("count", [1, 256, 8192])
def test_what_dicts_lists_and_closures_hold_is_freed_and_its_neighbours_stay(count):
    held = {"dict": torch.zeros(count, dtype=torch.int64), "list": [torch.ones(count)], "object": Indices()}
    closure = (lambda table: lambda: table)(torch.ones(count, 2))
    view = held["dict"][count // 2 :]
    inside = [held["dict"], held["list"][0], held["object"].table, closure()]
    storages = [tensor.untyped_storage() for tensor in inside]
    other = [torch.full((count,), 7.0), torch.nn.Parameter(torch.full((count,), 7.0))]
    release(referred_to(), {storage.data_ptr(): storage.nbytes() for storage in storages})
    assert [storage.nbytes() for storage in storages] == [0] * 4
    assert view.untyped_storage().nbytes() == 0
    assert all((tensor == 7).all() for tensor in other)


def test_a_tensor_is_in_a_segment_by_its_memory_and_not_by_its_place_in_it():
    """``release`` frees the tensors whose memory lies in given segments. A segment holds many tensors, and a view's
    data may start after its storage does, so the address of the storage decides, and not that of the data."""
    memory = torch.zeros(4, 64)
    start, size = memory.data_ptr(), memory.untyped_storage().nbytes()
    tensor, alien = memory[2], torch.ones(64)
    release([tensor, alien], {start - 512: 512, start + size: 512})
    assert memory.untyped_storage().nbytes() == size
    release([tensor, alien], {start - 512: 1024})
    assert memory.untyped_storage().nbytes() == 0
    assert alien.sum() == 64


def test_tensors_without_memory_of_their_own_are_passed_over():
    with FakeTensorMode():
        fake = torch.zeros(3)
    meta, sparse = torch.zeros(3, device="meta"), torch.eye(2).to_sparse()
    borrowed = torch.from_numpy(np.ones(3))
    release(referred_to(), {borrowed.data_ptr(): 8})
    release([meta, sparse], {0: 2**62})
    assert borrowed.sum() == 3
    assert fake.shape == meta.shape
