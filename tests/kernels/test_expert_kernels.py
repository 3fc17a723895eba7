"""The Triton kernels for mixtures of experts equal their definitions. They run on the GPU if there is one, else in
Triton's interpreter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.quant import grouped
from qerl_pl.quant.grouped import Factors, Routes, sort_rows
from tests.combinations import pairwise

KERNELS = "qerl_pl.kernels.experts"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1, 1), (1, 1, 5), (7, 3, 5), (40, 2, 3), (17, 8, 9)]  # tokens, experts per token, experts with rows


@pytest.fixture
def _small_blocks(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels' blocks and tiles so small that long rows need several blocks, and that experts need several
    tiles or share one."""
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "TILE", (16, 32))


@pytest.fixture
def _definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of ``grouped`` compute by torch's operations on a GPU too."""
    monkeypatch.setattr(grouped, "_kernels", lambda _: None)


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def random_routes(tokens: int, chosen: int, experts: int) -> Routes:
    """Draw for each token ``chosen`` of ``experts`` experts. Two more experts, the first one and one in the middle, are
    chosen by no token."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, max(experts, chosen), generator=generator).argsort(dim=1)[:, :chosen]
    return Routes(*(part.to(DEVICE) for part in sort_rows(ids + 1 + (ids > 1), 2 + max(experts, chosen))))


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to ``dtype``; like the kernel, to bf16 by truncation if it runs in Triton's interpreter."""
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        value = (value.view(torch.int32) & -(2**16)).view(torch.float32)
    return value.to(dtype)


def summed_by_loops(rows: Tensor, routes: Routes, weights: Tensor | None) -> Tensor:
    sums = []
    for token, places in enumerate(routes.inverse.tolist()):
        total = torch.zeros(rows.shape[1], device=DEVICE)
        for choice, place in enumerate(places):
            part = rows[place].float()
            total += part if weights is None else rounded(part * weights[token, choice], rows.dtype).float()
        sums.append(rounded(total, rows.dtype))
    return torch.stack(sums)


@pytest.mark.parametrize(
    ("sizes", "width", "weighted", "dtype"), pairwise(SIZES, (1, 64, 200), (True, False), DTYPES), ids=str
)
@pytest.mark.usefixtures("_small_blocks", "_definitions")
def test_sums_have_the_bits_of_loops_and_of_their_definition(kernels, sizes, width, weighted, dtype):
    routes = random_routes(*sizes)
    rows, weights = draw(routes.order.numel(), width, dtype=dtype), draw(*sizes[:2]) if weighted else None
    found = kernels.summed(rows, routes.inverse, weights)
    assert torch.equal(found, summed_by_loops(rows, routes, weights))
    if DEVICE == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(found, grouped.summed(rows, routes, weights))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 64), (3, 200)])
@pytest.mark.usefixtures("_small_blocks", "_definitions")
def test_swiglu_and_its_gradients_equal_their_definition(kernels, rows, width, dtype):
    gate, up, d_product = (draw(rows, width + part, dtype=dtype, scale=4)[:, part:].contiguous() for part in range(3))
    gate[0, 0], share = -200, draw(rows, 1)  # exp(200) is infinite in fp32
    exact = [tensor.double().requires_grad_() for tensor in (gate, up, share)]
    product = torch.nn.functional.silu(exact[0]) * exact[1]
    d_exact = torch.autograd.grad((exact[2] * product * d_product.double()).sum(), exact)
    expected = d_exact[0], d_exact[1], d_exact[2][:, 0], product
    found = kernels.swiglu_gradients(gate, up, d_product, share)
    assert torch.equal(found[3], kernels.swiglu(gate, up))
    # The errors that are allowed: the activation is rounded before it is multiplied, and each result is rounded (in
    # bf16 Triton's interpreter truncates). exp(x) on a GPU has a relative error of about |x| 2^-24 in fp32, which
    # matters where a factor of the gate's gradient, 1 + g (1 - sigmoid(g)), is near 0.
    fp32 = 16 * torch.finfo(torch.float32).eps
    eps, tiny = torch.finfo(dtype).eps + fp32, 1e-5 if dtype == torch.float16 else 1e-6  # fp16 has steps of 2^-24
    slopes, terms = (share.double() * d_product * up).abs(), (product * d_product).abs().sum(1)
    sizes = fp32 * slopes, 0, eps * terms, 0
    for values, roundings in ((found, 2), (grouped.swiglu_gradients(gate, up, d_product, share), 5)):
        for value, right, size in zip(values, expected, sizes, strict=True):
            assert ((value - right).abs() <= roundings * (eps * right.abs() + size) + tiny).all()
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32, dtype]


# Triton's interpreter multiplies the bits of bf16 values as if they were integers.
@pytest.mark.parametrize(
    ("sizes", "shape", "transposed", "dtype"),
    pairwise(SIZES, [(1, 1), (8, 64), (24, 200)], (True, False), DTYPES if DEVICE == "cuda" else DTYPES[:2]),
    ids=str,
)
@pytest.mark.usefixtures("_small_blocks")
def test_products_are_added_to_the_rows_of_their_expert(kernels, sizes, shape, transposed, dtype):
    rank, width = shape
    routes = random_routes(*sizes)
    size, experts = routes.order.numel(), len(routes.ends)
    before, rows = draw(size, width, dtype=dtype), draw(size, rank, dtype=dtype)
    # as the adapter's B, of which gate and up are halves, and as A
    wide = draw(experts, 2 * width, rank, dtype=dtype)[:, width:].mT if transposed else None
    matrices = draw(experts, rank, width, dtype=dtype) if wide is None else wide
    begins, total = [0, *routes.ends.tolist()], before.clone()
    exact, terms = before.double(), before.double().abs()
    for expert, part in enumerate(map(slice, begins, begins[1:])):
        exact[part] += rows[part].double() @ matrices[expert].double()
        terms[part] += rows[part].double().abs() @ matrices[expert].double().abs()
    kernels.add_grouped(total, rows, matrices, routes.ends)
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + (rank + 1) * 2**-23 * terms + 2**-25  # rounded once
    assert ((total - exact).abs() <= bound).all()


@pytest.mark.parametrize("rank", [8, 72, None], ids=lambda rank: f"rank{rank}")  # 72 is above KERNEL_RANK
@pytest.mark.parametrize("sizes", [(1, 1, 1), (19, 3, 5)], ids=str)
def test_gradients_of_experts_by_kernels_are_those_by_torch(kernels, monkeypatch, sizes, rank):
    routes, hidden, inner = random_routes(*sizes), 72, 40
    experts = len(routes.ends)
    dense = [draw(experts, *shape) / 8 for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
    parts: Any = tuple(lambda _, part=part: part for part in dense)
    shapes = [] if rank is None else [(rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank)]
    leaves = [draw(sizes[0], hidden), draw(*sizes[:2]), *(draw(experts, *shape) / 8 for shape in shapes)]
    found: list[list[Tensor]] = []
    for by in (kernels, None):
        monkeypatch.setattr(grouped, "_kernels", lambda _, by=by: by)
        x, weights, *factors = (leaf.clone().requires_grad_() for leaf in leaves)
        out = grouped.grouped_experts(x, weights, routes, parts, Factors(*factors) if factors else None)
        out.backward(draw(*out.shape))
        found.append([out.detach(), *(leaf.grad for leaf in (x, weights, *factors) if leaf.grad is not None)])
    assert len(found[0]) == len(found[1]) == 1 + len(leaves)
    for mine, right in zip(*found, strict=True):
        assert (mine - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.gpu
def test_rows_whose_offsets_exceed_32_bits_are_read_and_written(kernels):
    rows = torch.zeros(2**20 + 8, 2048, dtype=torch.bfloat16, device="cuda")
    rows[-8:] = last = draw(8, 2048, dtype=torch.bfloat16)
    inverse = torch.arange(len(rows) - 8, len(rows), device="cuda").view(2, 4)
    assert torch.equal(kernels.summed(rows, inverse, None), last.view(2, 4, 2048).float().sum(1).bfloat16())
    ones, ends = rows.new_ones(len(rows), 8), torch.tensor([len(rows)], dtype=torch.int32, device="cuda")
    kernels.add_grouped(rows, ones, rows.new_full((1, 8, 2048), 0.125), ends)
    assert torch.equal(rows[-8:], last + 1)
    share = rows.new_ones(len(rows), 1, dtype=torch.float32)
    product = kernels.swiglu_gradients(rows, rows, rows, share)[3]
    assert torch.equal(product[-8:], kernels.swiglu(last + 1, last + 1))
    assert torch.equal(kernels.swiglu(rows, rows)[-8:], product[-8:])
