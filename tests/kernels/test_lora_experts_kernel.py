"""The Triton kernel that adds LoRA adapters on the experts of a mixture equals its definition. It runs on the GPU if
there is one, else in Triton's interpreter."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.combinations import pairwise
from tests.reference.lora_experts import add_lora_reference

KERNELS = "qerl_pl.kernels.lora_experts"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16]  # the interpreter has no bf16
RANKS = [(rank, dtype) for rank in (1, 4, 8, 16) for dtype in DTYPES]
if DEVICE == "cpu":  # where the interpreter takes long, each rank has one dtype
    RANKS = [RANKS[0], RANKS[3], RANKS[4], RANKS[7]]


class Problem:
    """Random operands for the adapters on one product of a mixture of experts (gate and up, or down). Every third token
    does not use the adapter, and every eleventh row has the number of an expert that does not exist, so nothing may be
    added."""

    def __init__(
        self,
        tokens: int,
        chosen: int,
        experts: int,
        inputs: int,
        widths: tuple[int, ...],
        rank: int,
        dtype: torch.dtype,
        *,
        weighted: bool = False,
    ) -> None:
        generator = torch.Generator(DEVICE).manual_seed(tokens * inputs + rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        rows = tokens * chosen
        self.y = draw(rows, sum(widths))
        self.x = draw(rows if weighted else tokens, inputs)  # as of down, or of gate and up
        self.a = [draw(experts, rank, inputs) for _ in widths]
        self.b = [draw(experts, width, rank) for width in widths]
        ids = torch.randint(experts, (rows,), generator=generator, device=DEVICE, dtype=torch.int32)
        ids[::11] = torch.tensor([-1, experts, 2**31 - 1], device=DEVICE, dtype=torch.int32).repeat(rows)[
            : len(ids[::11])
        ]
        self.ids = ids.view(tokens, chosen)
        self.indices = torch.where(torch.arange(tokens + 5, device=DEVICE) % 3 == 1, -1, 0)
        self.enabled = torch.tensor([1, 0], device=DEVICE, dtype=torch.int32)
        self.weights = draw(tokens, chosen).abs().float() if weighted else None

    @property
    def operands(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor, Tensor | None]:
        return self.a, self.b, self.indices, self.enabled, self.ids, self.weights

    def added(self, kernels: ModuleType) -> Tensor:
        y = self.y.clone()
        kernels.add_lora(y, self.x, *self.operands)
        return y

    def check(self, y: Tensor) -> None:
        """Check a result ``y`` of the kernel: in rows with an adapter, the error of every element is within a bound
        that follows from its roundings, and all other rows are unchanged."""
        exact = add_lora_reference(self.y, self.x, *self.operands)
        token = torch.arange(len(y), device=DEVICE) // self.ids.shape[1]
        ids = self.ids.flatten()
        with_adapter = (self.indices[token] >= 0) & (ids >= 0) & (ids < len(self.a[0]))
        assert torch.equal(y[~with_adapter], self.y[~with_adapter])
        # The errors of fp32 sums are proportional to the sums of the terms' absolute values, so the same product is
        # computed with the absolute values of all operands.
        a, b = ([matrix.abs() for matrix in matrices] for matrices in (self.a, self.b))
        size = add_lora_reference(self.y.abs(), self.x.abs(), a, b, *self.operands[2:])
        terms = self.x.shape[1] + self.a[0].shape[1]
        rounding = torch.finfo(y.dtype).eps  # the interpreter cuts off, a GPU rounds to half of that
        bound = 3 * rounding * self.hidden_size() + rounding * exact.abs() + terms * 2**-23 * size
        excess = ((y.double() - exact).abs() - bound)[with_adapter]
        assert excess.numel() == 0 or excess.max() <= 0, excess.max()

    def hidden_size(self) -> Tensor:
        """Compute |w| |x A^T| |B^T| for each element of the output, where w is the expert's weight for the token. The
        errors by rounding x A^T and the update are proportional to it."""
        out = torch.zeros_like(self.y, dtype=torch.float64)
        for row, expert in enumerate(self.ids.flatten().tolist()):
            if 0 <= expert < len(self.a[0]):
                x = self.x[row * len(self.x) // len(self.y)].double()
                parts = zip(self.a, self.b, strict=True)
                out[row] = torch.cat([n[expert].double().abs() @ (m[expert].double() @ x).abs() for m, n in parts])
                out[row] *= 1 if self.weights is None else self.weights.flatten()[row].double()
        return out


PARTS = [((40, 40), False), ((150,), True), ((33, 33), True)]


@pytest.mark.parametrize(("part", "tokens", "kind"), pairwise(PARTS, (1, 7, 40), RANKS), ids=str)
def test_the_kernel_equals_its_definition(kernels, part, tokens, kind):
    (widths, weighted), (rank, dtype) = part, kind
    problem = Problem(tokens, 3, 5, 300, widths, rank, dtype, weighted=weighted)
    problem.check(problem.added(kernels))


@pytest.mark.parametrize("weighted", [False, True])
def test_one_expert_per_token_and_more_ids_than_a_thread_block_reads(kernels, weighted, monkeypatch):
    monkeypatch.setattr(kernels, "SCANNED", 256)
    monkeypatch.setattr(kernels, "FEW_SCANNED", 32)
    for tokens in (30, 300, 600):
        problem = Problem(tokens, 1, 3, 70, (24, 24), 4, DTYPES[1], weighted=weighted)
        problem.check(problem.added(kernels))


def test_the_number_of_thread_blocks_changes_no_bit(kernels, monkeypatch):
    problem = Problem(9, 2, 4, 530, (300, 300), 24, DTYPES[1])
    expected = problem.added(kernels)
    problem.check(expected)
    for programs in (1, 20, 1000):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        assert torch.equal(problem.added(kernels), expected), programs


def test_a_row_has_the_same_bits_in_every_batch(kernels):
    """Rows of other tokens, in whatever number, take no part in a row's sums."""
    problem = Problem(20, 2, 2, 300, (40, 40), 8, DTYPES[1])
    together = problem.added(kernels)
    for token in (0, 3, 18):
        rows, one = slice(2 * token, 2 * token + 2), slice(token, token + 1)
        y = problem.y[rows].clone()
        rest = problem.indices[one], problem.enabled, problem.ids[one]
        kernels.add_lora(y, problem.x[one], problem.a, problem.b, *rest)
        assert torch.equal(y, together[rows])


def test_rows_may_lie_apart_and_garbage_stays_where_it_is(kernels):
    problem = Problem(6, 2, 3, 48, (20, 20), 8, DTYPES[1])
    problem.x[problem.indices[:6] < 0] = float("nan")  # what a CUDA graph pads its batch with
    wide_x, wide_y = problem.x.new_full((6, 64), 7.0), problem.y.new_full((12, 60), 7.0)
    x, y = wide_x[:, 8:56], wide_y[:, 4:44]
    x.copy_(problem.x)
    y.copy_(problem.y)
    kernels.add_lora(y, x, *problem.operands)
    problem.x.nan_to_num_()
    problem.check(y)
    assert (wide_y[:, :4] == 7).all()
    assert (wide_y[:, 44:] == 7).all()


@pytest.mark.parametrize("off", ["enabled", "indices"])
def test_no_adapter_changes_nothing(kernels, off):
    problem = Problem(5, 2, 3, 48, (20, 20), 8, DTYPES[1])
    getattr(problem, off).fill_(-1 if off == "indices" else 0)
    problem.y[1] = -0.0
    assert torch.equal(problem.added(kernels).view(torch.int16), problem.y.view(torch.int16))


def test_roundings_are_those_of_the_trainer(kernels):
    """The kernel rounds where the trainer does: x A^T before it is multiplied by B^T, and the update before it is
    added."""
    problem = Problem(1, 1, 1, 16, (16,), 1, torch.float16, weighted=True)
    problem.ids[:] = 0
    problem.x[:], problem.a[0][:], problem.b[0][:] = 1, 0, 1
    assert problem.weights is not None
    problem.a[0][0, 0, :2] = torch.tensor([2048, 1])  # 2049 becomes 2048 in fp16
    problem.y[:], problem.weights[:] = -2048, 1
    assert (problem.added(kernels) == 0).all()
    problem.a[0][0, 0, :2] = torch.tensor([2048, 0])
    problem.y[:], problem.weights[:] = -2048, 2049 / 2048
    assert (problem.added(kernels) == 0).all()


def test_few_rows_and_small_ranks_are_for_this_kernel(kernels):
    def is_faster(tokens: int, chosen: int, experts: int, rank: int) -> bool:
        return kernels.is_faster(torch.empty(tokens, chosen), torch.empty(experts, rank, 48, device="meta"))

    assert is_faster(1, 8, 128, 64)
    assert is_faster(512, 8, 128, 8)
    assert not is_faster(513, 8, 128, 8)
    assert not is_faster(1, 8, 128, 128)
    assert is_faster(128, 2, 8, 8)
    assert not is_faster(129, 2, 8, 8), "many rows of each expert"


def test_no_rows_are_no_launch(kernels):
    problem = Problem(3, 2, 3, 48, (20, 20), 8, DTYPES[1])
    rest = problem.indices, problem.enabled, problem.ids[:0]
    kernels.add_lora(problem.y[:0], problem.x[:0], problem.a, problem.b, *rest)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 512])
@pytest.mark.parametrize("part", ["gate and up", "down"])
def test_real_shapes_captured_and_repeated(kernels, part, tokens):
    """The sizes are those of Qwen3-30B-A3B. A CUDA graph gives the same bits in each replay. A replay after the adapter
    was changed in place computes with the changed adapter."""
    sizes = (128, 2048, (768, 768)) if part == "gate and up" else (128, 768, (2048,))
    problem = Problem(tokens, 8, *sizes, 8, torch.bfloat16, weighted=part == "down")
    problem.added(kernels)
    y, graph = problem.y.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.add_lora(y, problem.x, *problem.operands)
    found = []
    for _ in range(3):
        y.copy_(problem.y)
        graph.replay()
        found.append(y.clone())
    problem.check(found[0])
    assert all(torch.equal(found[0], other) for other in found[1:])
    problem.a[0].mul_(2)
    y.copy_(problem.y)
    graph.replay()
    problem.check(y)
