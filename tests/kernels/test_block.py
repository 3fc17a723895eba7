"""Kernels between a block's linears against their definitions: on the GPU where there is one, else interpreted."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

KERNELS = "qerl_pl.kernels.block"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-6
# Roundings of an element: the norm's quotient and product, or the gate's one; and what fp32 sums and exponentials add.
NORM, GATE, SUMS = 2, 1, 2**-18


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(found: Tensor, exact: Tensor, *, roundings: int) -> None:
    """Within so many roundings of the dtype, half a unit in the last place each (a whole one where it is cut off)."""
    info = torch.finfo(found.dtype)
    bound = exact.abs() * (roundings * info.eps + SUMS) + roundings * info.smallest_normal
    assert found.shape == exact.shape
    assert found.is_contiguous()
    excess = (found.double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 0, excess.max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (2, 3, 100), (5, 1024), (0, 8), (2, 3584)], ids=str)
def test_a_norm_is_its_definition(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = draw(*shape, dtype=dtype) * 3, draw(shape[-1], dtype=dtype, seed=1)
    if x.numel():
        exact, _ = kernels.rms_norm_reference(x, None, weight, EPSILON)
        check(kernels.rms_norm(x, weight, EPSILON), exact, roundings=NORM)
    else:
        assert kernels.rms_norm(x, weight, EPSILON).shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 100), (5, 1024)], ids=str)
def test_a_residual_is_added_before_it_is_rounded(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype):
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1) * 100
    weight = draw(shape[-1], dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, EPSILON)
    exact, exact_total = kernels.rms_norm_reference(x, residual, weight, EPSILON)
    check(normed, exact, roundings=NORM)
    check(total, exact_total, roundings=1)
    assert torch.equal(x, before[0]), "inputs are left as they are"
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 20), (2, 3, 200), (4, 2050), (0, 8)], ids=str)
def test_the_gate_is_its_definition(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype):
    x = draw(*shape, dtype=dtype) * 4
    check(kernels.silu_and_mul(x), kernels.silu_and_mul_reference(x), roundings=GATE)


def test_a_gate_that_is_shut_or_wide_open_stays_finite(kernels: ModuleType):
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], device=DEVICE)
    found = kernels.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])
    assert found.tolist() == [[0, 0, 0, 100, 1e4]]


def test_rows_may_lie_apart(kernels: ModuleType):
    wide, weight = draw(4, 96), draw(32, seed=1)
    x, residual = wide[:, 8:40], wide[:, 50:82]
    for found, expected in zip(
        kernels.add_rms_norm(x, residual, weight, EPSILON),
        kernels.add_rms_norm(x.contiguous(), residual.contiguous(), weight, EPSILON),
        strict=True,
    ):
        assert torch.equal(found, expected)
    assert torch.equal(kernels.silu_and_mul(x), kernels.silu_and_mul(x.contiguous()))


def test_a_norm_forgets_the_scale_of_its_row(kernels: ModuleType):
    x, weight = draw(3, 64), draw(64, seed=1)
    torch.testing.assert_close(kernels.rms_norm(x * 8, weight, 0.0), kernels.rms_norm(x, weight, 0.0))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 8, 32, 256])
def test_a_chain_that_is_launched_early_computes_what_it_does_in_turn(kernels: ModuleType, tokens: int):
    torch.use_deterministic_algorithms(False)  # what fills torch.empty would run between the kernels
    from qerl_pl.kernels import lora

    H, width, rank, layers = 3584, 2 * 4736, 32, 6
    dtype = torch.bfloat16
    indices = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    wide, narrow = [draw(width, H, dtype=dtype) / 60], [draw(H, width // 2, dtype=dtype) / 60]
    a = [draw(rank, H, dtype=dtype) / 60, draw(rank, H, dtype=dtype, seed=1) / 60]
    b = [draw(width // 2, rank, dtype=dtype, seed=seed) / 6 for seed in (2, 3)]
    down = [draw(rank, width // 2, dtype=dtype, seed=4) / 60], [draw(H, rank, dtype=dtype, seed=5) / 6]
    weight, x = draw(H, dtype=dtype, seed=6), draw(tokens, H, dtype=dtype, seed=7)

    def run(pause) -> tuple[Tensor, Tensor]:
        normed, residual = kernels.rms_norm(x, weight, EPSILON), x
        for _ in range(layers):
            pause()
            both = normed @ wide[0].t()
            pause()
            partials = lora.shrink(normed, a)
            pause()
            lora.expand(both, partials, b, indices)
            pause()
            inner = kernels.silu_and_mul(both)
            pause()
            out = inner @ narrow[0].t()
            pause()
            partials = lora.shrink(inner, down[0])
            pause()
            lora.expand(out, partials, down[1], indices)
            pause()
            normed, residual = kernels.add_rms_norm(out, residual, weight, EPSILON)
        return normed, residual

    expected = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(100):
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        for first, second in zip(found, expected, strict=True):
            assert torch.equal(first, second)
