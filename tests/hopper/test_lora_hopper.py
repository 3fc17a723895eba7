"""Adapters that the NVFP4 kernels add themselves: which adapters the kernels accept, and that their results equal x W^T
+ (x A^T) B^T."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.hopper import driver, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.hopper.lora_hopper import CHUNKS_IN_FLIGHT, FEW_TOKENS, MOST_TOKENS, Adapter, Schedule, Update, shrink
from tests.hopper.nvfp4_linears import E2M1, SHARED_OF_BLOCK, few, on_gpu, random_linear
from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.decode_linear import decode_linear_reference
from tests.reference.fragments import fragments
from tests.reference.lora import add_lora_reference

MODULES = {"decode": nvfp4_decode, "batch": nvfp4_batch}


def draw(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def with_adapter(
    name: str,
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    schedule: Any,
    adapter: Adapter,
    parts: Schedule | None,
    out: Tensor,
) -> Tensor:
    """Multiply by a linear layer with its adapter, by the kernel "decode" or "batch". ``parts`` is the schedule of the
    separate kernel that computes h = x A^T for "batch"; "decode" computes h itself, so ``parts`` is None."""
    if name == "decode":
        return nvfp4_decode.decode_linear(x, *weights, bias, schedule, out=out, adapter=adapter)
    assert parts is not None
    update = Update(shrink(x, adapter.a, adapter.indices, parts), adapter.b)
    return nvfp4_batch.batch_linear(x, *weights, bias, schedule, out=out, update=update)


def adapter(widths: tuple[int, ...], inputs: int, rank: int, device: str = "cuda") -> tuple[list[Tensor], list[Tensor]]:
    """Draw the matrices A and B of each slice."""
    a = [draw(rank, inputs, device=device) for _ in widths]
    return a, [draw(width, rank, device=device) for width in widths]


def blocks(
    num_tokens: int, a: list[Tensor], b: list[Tensor], *, spare: int = 132, seconds: float = 1.0
) -> Schedule | None:
    """Return the schedule that ``lora_hopper.choose_schedule`` chooses for the kernel of h = x A^T, or None if it
    leaves the adapter to other kernels. ``spare`` SMs are free during the ``seconds`` until h is needed."""
    return lora_hopper.choose_schedule(num_tokens, a, b, lora_hopper.SpareSMs(spare, seconds))


def all_blocks(num_tokens: int, slices: int) -> list[Schedule]:
    """List schedules of the kernel for h = x A^T: all sizes of tiles (tokens per tile), each with one cluster, a
    cluster per two tiles, and a cluster per tile."""
    tiles = {size: -(-num_tokens // size) for size in CHUNKS_IN_FLIGHT[slices]}
    return sorted({Schedule(size, clusters) for size in tiles for clusters in (1, -(-tiles[size] // 2), tiles[size])})


KERNELS = [lora_hopper.kernel(tokens, slices) for slices in CHUNKS_IN_FLIGHT for tokens in CHUNKS_IN_FLIGHT[slices]]


@pytest.mark.parametrize("kernel", few(KERNELS), ids=lambda kernel: kernel.name)
def test_the_source_compiles_for_every_number_of_slices_and_tokens(kernel):
    assert driver.compiled(kernel).startswith(b"\x7fELF")


def test_an_sm_has_room_for_a_block():
    assert max(kernel.shared_bytes for kernel in KERNELS) <= SHARED_OF_BLOCK


@pytest.mark.parametrize(
    ("widths", "inputs", "rank", "possible"),
    [
        ((256,), 128, 8, True),
        ((256, 128, 64), 3584, 64, True),
        ((13824, 13824), 128, 32, True),
        ((27648, 27648), 128, 32, True),
        ((256,), 128, 72, False),
        ((256,), 128, 4, False),
        ((256,), 144, 8, False),
        ((256, 96), 128, 8, False),
        ((64, 64, 64, 64), 128, 8, False),
    ],
)
def test_what_the_kernels_take(widths, inputs, rank, possible):
    a, b = adapter(widths, inputs, rank, "cpu")
    for tokens in (1, FEW_TOKENS, FEW_TOKENS + 1, MOST_TOKENS):
        assert (blocks(tokens, a, b) is not None) is possible
    for tokens in (0, MOST_TOKENS + 1):
        assert blocks(tokens, a, b) is None
    assert blocks(1, [a[0].float(), *a[1:]], b) is None
    assert blocks(1, a, [b[0].half(), *b[1:]]) is None


@pytest.mark.parametrize("widths", [(48,), (48, 32), (48, 32, 16)])
def test_a_kernel_is_told_where_slices_begin(widths):
    _, b = adapter(widths, 32, 16, "cpu")
    hidden, *matrices, first1, first2, rank = lora_hopper.arguments(Update(torch.empty(len(widths), 5, 16), b))
    assert hidden.shape == (len(widths), 5, 16)
    assert rank == 16
    starts = [0, first1, first2, 2**31]
    for n in range(sum(widths)):
        slice = next(i for i, (start, end) in enumerate(pairwise(starts)) if start <= n < end)
        assert slice == sum(n >= sum(widths[: i + 1]) for i in range(len(widths) - 1))
        assert matrices[slice] is b[slice]
    assert lora_hopper.arguments(None) == [None] * 4 + [0] * 3


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 32, 40, 64])
@pytest.mark.parametrize(("inputs", "slices"), [(32, 1), (3584, 3), (18944, 1), (2080, 2)])
def test_shrink_is_the_product_and_zero_without_the_adapter(inputs, slices, rank):
    a, _ = adapter((16,) * slices, inputs, rank)
    for tokens in (1, 8, 9, 16, 31, 32, 33, 64, 65, 100, 256):
        x, indices = draw(tokens, inputs), torch.randint(-1, 1, (tokens + 3,), device="cuda")
        found, *others = (shrink(x, a, indices, schedule) for schedule in all_blocks(tokens, slices) for _ in range(2))
        with_adapter = (indices[:tokens] >= 0).unsqueeze(1)
        exact = torch.stack([x.float() @ matrix.float().T for matrix in a]) * with_adapter
        assert found.shape == (slices, tokens, rank)
        assert (found.float() - exact).abs().max() <= 2**-8 * exact.abs().max()
        assert all(torch.equal(found, other) for other in others), "sums have one order, however work is shared"
        assert not found[:, ~with_adapter.flatten()].any()


def assert_base_and_adapter(
    name: str, widths: tuple[int, ...], inputs: int, rank: int, token_counts: tuple[int, ...]
) -> None:
    """Check the sum of base and adapter by the kernel ``name`` with all schedules for the adapter, called directly and
    in a CUDA graph. Numbers of tokens for which the kernel has no schedule are left out."""

    module = MODULES[name]
    codes, scales = random_linear(sum(widths), inputs, "cuda")
    weight, ordered = fragments(codes, scales)
    global_scale, bias = torch.tensor([2.0**-7], device="cuda"), draw(sum(widths))
    a, b = adapter(widths, inputs, rank)
    driver.prepare([*module.kernels_for(sum(widths), inputs), *lora_hopper.all_kernels()], weight.device)
    schedules = {
        tokens: schedule for tokens in token_counts if (schedule := module.choose_schedule(tokens, sum(widths), inputs))
    }
    assert schedules
    all_ways = [
        (tokens, schedule, parts)
        for tokens, schedule in schedules.items()
        for parts in ([None] if name == "decode" else all_blocks(tokens, len(widths)))
    ]
    for tokens, schedule, parts in all_ways:
        x, indices = draw(tokens, inputs), torch.randint(-1, 1, (tokens,), device="cuda")
        y = torch.empty(tokens, sum(widths), device="cuda", dtype=torch.bfloat16)

        def run(x=x, indices=indices, schedule=schedule, y=y, parts=parts) -> Tensor:
            weights, ordered_bias = (weight, ordered, global_scale), nvfp4_decode.humming_bias(bias)
            return with_adapter(name, x, weights, ordered_bias, schedule, Adapter(a, b, indices), parts, y)

        base = decode_linear_reference(x, E2M1.cuda()[codes.long()], scales, global_scale) + bias.float()
        exact = add_lora_reference(base, x, a, b, indices)
        if (indices >= 0).any():
            assert (exact - base).abs().max() > 2**-4 * exact.abs().max(), "the adapter is to be seen"
        found = run().clone()
        assert (found - exact).abs().max() <= 2**-7 * exact.abs().max()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                run()
        y.zero_()
        graph.replay()
        assert torch.equal(y, found)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize(
    ("widths", "inputs"),
    [((3584, 512, 512), 3584), ((3584,), 18944), ((18944, 18944), 3584), ((128, 64, 64), 128), ((1024, 256), 2176)],
    ids=str,
)
def test_base_and_adapter_are_the_formula(name, widths, inputs, rank):
    assert_base_and_adapter(name, widths, inputs, rank, (1, 8, 13, 16, 32, 33, 50, 64, 65, 96, 100, 128, 200, 256))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("variant", nvfp4_decode.VARIANTS, ids=str)
@pytest.mark.parametrize(("splits", "rank"), [(1, 32), (2, 64), (5, 16), (8, 32)])
def test_every_variant_and_split_adds_the_adapter_in_one_launch(variant, splits, rank):

    widths, inputs, one = (512, 256), 2176, torch.ones(1, device="cuda")  # 136 k-blocks: not whole stages of 16
    codes, scales = random_linear(sum(widths), inputs, "cuda")
    weights = *fragments(codes, scales), one
    a, b = adapter(widths, inputs, rank)
    schedule = nvfp4_decode.Schedule(variant, splits)
    for tokens in (1, variant.tokens - 3, variant.tokens):
        x, indices = draw(tokens, inputs), torch.randint(-1, 1, (tokens,), device="cuda")
        y, given = torch.empty(tokens, sum(widths), device="cuda", dtype=torch.bfloat16), Adapter(a, b, indices)
        base = decode_linear_reference(x, E2M1.cuda()[codes.long()], scales, one)
        exact = add_lora_reference(base, x, a, b, indices)
        found, *others = (with_adapter("decode", x, weights, None, schedule, given, None, y).clone() for _ in range(4))
        assert (found - exact).abs().max() <= 2**-7 * exact.abs().max()
        assert all(torch.equal(found, other) for other in others), "the counters are zero again after each launch"


@on_gpu
@pytest.mark.gpu
def test_base_and_adapter_in_thread_blocks_of_one_tile(monkeypatch):
    schedule = nvfp4_batch.Schedule(nvfp4_batch.Variant(256, 2), 1, 8)
    assert schedule.wide(704) == 3, "the others have one of the 11 tiles each"
    monkeypatch.setattr(nvfp4_batch, "choose_schedule", lambda *_, **__: schedule)
    assert_base_and_adapter("batch", (512, 192), 1152, 32, (200, 256))


@on_gpu
@pytest.mark.gpu
def test_base_and_adapter_with_64_tokens_in_the_kernel_for_few():
    assert_base_and_adapter("decode", (13824, 13824), 5120, 32, (33, 64))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("between", ["kernel", "early kernel", "nothing"])
def test_inputs_that_the_last_kernel_writes_are_waited_for(name, between):
    """In a CUDA graph a kernel may start before the kernel whose output it reads has ended. The products equal those of
    kernels that run one after the other."""
    module = MODULES[name]
    size, rank, tokens = 2048, 32, 64 if name == "batch" else 8
    codes, scales = random_linear(size, size, "cuda")
    weight, ordered = fragments(codes, scales)
    global_scale, a, b = torch.tensor([2.0**-14], device="cuda"), *adapter((size,), size, rank)
    indices, schedule = (
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        module.choose_schedule(tokens, size, size),
    )
    driver.prepare([*module.kernels_for(size, size), *lora_hopper.all_kernels()], weight.device)
    between = {
        "kernel": torch.tanh,
        "early kernel": torch.compile(torch.tanh, options={"triton.enable_pdl": True}),
        "nothing": lambda y: y,
    }[between]

    def layers(x: Tensor, *, slowly: bool) -> Tensor:
        for _ in range(12):
            y = torch.empty_like(x)  # made before ``shrink``, because deterministic mode fills it by another kernel
            weights, parts = (weight, ordered, global_scale), Schedule(tokens, 1)
            with_adapter(name, x, weights, None, schedule, Adapter(a, b, indices), parts, y)
            if slowly:
                torch.cuda.synchronize()
            x = between(y)
        return x

    x = draw(tokens, size)
    expected = layers(x, slowly=True)
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(x, slowly=False)
    for _ in range(50):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
