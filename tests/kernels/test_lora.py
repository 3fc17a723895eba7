"""The Triton kernels that add a LoRA adapter to a linear layer's output equal their definition. They run on the GPU if
there is one, else in Triton's interpreter."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.combinations import pairwise
from tests.reference.lora import add_lora_reference

KERNELS = "qerl_pl.kernels.lora"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bf16 is left out on a CPU because Triton's interpreter multiplies its bits as if they were integers, and fp32 on a GPU
# because its products are rounded to TF32.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
REAL = [(3584, (3584, 512, 512)), (3584, (18944, 18944)), (27648, (5120,))]  # inputs and widths of fused linears
RANKS = [(rank, dtype) for rank in (8, 24, 32, 64) for dtype in DTYPES]
MANY = 150  # tokens, of several tiles
if DEVICE == "cpu":  # where the interpreter takes long, each rank has one dtype
    RANKS, MANY = [RANKS[0], RANKS[3], RANKS[4], RANKS[7]], 70
WIDTHS = [(40,), (33, 33), (70, 20, 9)]  # one linear, gate/up, q/k/v


class Problem:
    """Random inputs, outputs and adapter of one linear layer, for kernels that add the adapter to the outputs. Every
    third token does not use the adapter."""

    def __init__(self, tokens: int, inputs: int, rank: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(tokens * inputs + rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        self.x, self.y = draw(tokens, inputs), draw(tokens, sum(widths))
        self.a, self.b = [draw(rank, inputs) for _ in widths], [draw(width, rank) for width in widths]
        self.indices = torch.where(torch.arange(tokens + 5, device=DEVICE) % 3 == 1, -1, 0)
        self.with_adapter = self.indices[:tokens] >= 0

    def check(self, kernels: ModuleType, y: Tensor) -> None:
        """Check a kernel's result ``y``: the error of every element is within a bound that follows from its roundings,
        and rows of tokens without the adapter are unchanged."""
        assert torch.equal(y[~self.with_adapter], self.y[~self.with_adapter])
        exact = add_lora_reference(self.y, self.x, self.a, self.b, self.indices)
        # The errors of sums in fp32 are proportional to the sums of the terms' absolute values, so the same product is
        # computed with the absolute values of all operands.
        sizes = [[matrix.abs() for matrix in matrices] for matrices in (self.a, self.b)]
        size = add_lora_reference(self.y.abs(), self.x.abs(), sizes[0], sizes[1], self.indices)
        hidden = [(self.x.double() @ first.double().t()).abs() for first in self.a]
        rounded = torch.cat(
            [part @ second.double().abs().t() for part, second in zip(hidden, self.b, strict=True)], dim=1
        )
        rounding = torch.finfo(self.y.dtype).eps  # the interpreter cuts off, a GPU rounds to half of that
        terms = self.x.shape[1] + self.a[0].shape[0]
        bound = rounding * (rounded + exact.abs()) + terms * 2**-23 * size
        excess = ((y.double() - exact).abs() - bound)[self.with_adapter]
        assert excess.numel() == 0 or excess.max() <= 0, excess.max()


@pytest.mark.parametrize(("tokens", "widths", "kind"), pairwise((1, 17, MANY), WIDTHS, RANKS), ids=str)
def test_kernels_equal_their_definition(kernels, tokens, widths, kind):
    rank, dtype = kind
    problem = Problem(tokens, 300, rank, widths, dtype)  # more than two blocks of K, the last one short
    y = problem.y.clone()
    shrink, expand = kernels.shrink_tiles(tokens, 300, rank, len(widths)), kernels.expand_tiles(tokens, widths)
    kernels.expand(y, kernels.shrink(problem.x, problem.a, shrink), problem.b, problem.indices, expand)
    problem.check(kernels, y)


def test_a_fourth_slice_is_added_too(kernels):
    """A fused linear layer can have four parts, such as queries, keys, values and gate of a gated delta net. A call of
    the kernels takes at most three, so the fourth needs another call."""
    problem = Problem(17, 300, 24, (40, 33, 20, 70), DTYPES[1])
    y = problem.y.clone()
    kernels.add_lora(y, problem.x, problem.a, problem.b, problem.indices)
    problem.check(kernels, y)


@pytest.mark.parametrize("tokens", [1, pytest.param(20, marks=pytest.mark.long)])
def test_every_split_and_step_is_right(kernels, tokens):
    problem = Problem(tokens, 200, 24, (70, 20, 20), DTYPES[0])
    for k_block, chunk in [(16, 16), (16, 48), (64, 128), (256, 256)]:
        partials = kernels.shrink(problem.x, problem.a, kernels.ShrinkTiles(32, 16, k_block, chunk))
        for outputs, steps in [(16, 1), (16, 3), (128, 1)]:
            y = problem.y.clone()
            expand = kernels.ExpandTiles(16, outputs, steps)
            kernels.expand(y, partials, problem.b, problem.indices, expand)
            problem.check(kernels, y)


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
@pytest.mark.parametrize(("tokens", "rank"), [(0, 8), (3, 8), (1100, 72), (3, 128)])
def test_whoever_computes_it_the_result_is_the_same(kernels, tokens, rank, dtype):
    problem = Problem(tokens, 40, rank, (24, 9), dtype)
    y = problem.y.clone()
    kernels.add_lora(y, problem.x, problem.a, problem.b, problem.indices)
    problem.check(kernels, y)


def test_rows_may_lie_apart_and_garbage_stays_where_it_is(kernels):
    problem = Problem(6, 48, 8, (20, 10), torch.float16)
    problem.x[~problem.with_adapter] = float("nan")  # what a CUDA graph pads its batch with
    wide_x, wide_y = problem.x.new_full((6, 64), 7.0), problem.y.new_full((6, 40), 7.0)
    x, y = wide_x[:, 8:56], wide_y[:, 4:34]
    x.copy_(problem.x)
    y.copy_(problem.y)
    kernels.add_lora(y, x, problem.a, problem.b, problem.indices)
    problem.check(kernels, y)
    assert (wide_y[:, :4] == 7).all()
    assert (wide_y[:, 34:] == 7).all()


def test_offsets_beyond_32_bits_are_seen_in_the_inputs_and_in_the_outputs(kernels):
    wide, narrow = (torch.empty(81920, width, device="meta") for width in (27648, 5120))  # down_proj of Qwen2.5-32B
    assert kernels.have_short_offsets(narrow, narrow)
    assert not kernels.have_short_offsets(wide, narrow)
    assert not kernels.have_short_offsets(narrow, wide)
    assert not kernels.have_short_offsets(wide[:, :8]), "rows that lie apart"
    assert kernels.have_short_offsets(wide[: 2**31 // 27648])


def test_no_token_with_the_adapter_changes_nothing(kernels):
    problem = Problem(20, 48, 8, (20, 10), torch.float16)
    problem.y[0] = -0.0
    y = problem.y.clone()
    kernels.add_lora(y, problem.x, problem.a, problem.b, torch.full_like(problem.indices, -1))
    assert torch.equal(y.view(torch.int16), problem.y.view(torch.int16))


@pytest.mark.parametrize("size", REAL, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 64, 256, 1023, 5000])
def test_blocks_cover_the_matrices_and_fit_the_gpu(kernels, tokens, size):
    inputs, widths = size
    for rank in (8, 32, 64):
        shrink = kernels.shrink_tiles(tokens, inputs, rank, len(widths))
        expand = kernels.expand_tiles(tokens, widths)
        assert shrink.chunk % shrink.k_block == 0
        assert 1 <= -(-inputs // shrink.chunk) <= 32  # sums that each program of expand reads
        assert kernels.STAGES * shrink.k_block * (shrink.tokens + shrink.rank) * 2 <= 99 * 1024  # shared memory
        assert expand.tokens * expand.outputs <= 64 * 256  # registers


@pytest.mark.parametrize("size", REAL, ids=str)
@pytest.mark.parametrize("rank", [8, 64, 96])
def test_a_few_numbers_of_tokens_run_every_kernel(kernels, rank, size):
    inputs, widths = size
    most = kernels.MANY_TOKENS - 1 if rank > kernels.HIGH_RANK else 5 * kernels.MOST_TOKENS
    edges = range(kernels.EXPAND_TOKENS, min(most - 1, kernels.MOST_TOKENS + 100), kernels.EXPAND_TOKENS)
    # Between multiples of EXPAND_TOKENS, tile sizes are the same, so of the larger numbers only some are tried there.
    every = sorted({*range(1, 300), *edges, *(edge + 1 for edge in edges), *range(300, most, 61)})
    blocks = {
        tokens: (kernels.shrink_tiles(tokens, inputs, rank, len(widths)), kernels.expand_tiles(tokens, widths))
        for tokens in every
    }
    for fewest in (1, 60, 65):
        lowest: dict[object, int] = {}
        for tokens in every[fewest - 1 :]:
            lowest.setdefault(blocks[tokens], tokens)
        counts = kernels.token_counts(inputs, widths, rank, fewest=fewest)
        assert min(counts) == fewest
        assert list(lowest.values()) == counts
        assert len(counts) <= 15  # all are compiled when an engine starts


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_product_of_a_base_that_still_runs_is_waited_for(kernels):
    torch.use_deterministic_algorithms(False)  # what fills torch.empty would run between the base and the adapter
    problem = Problem(8, 3584, 32, (18944, 18944), torch.bfloat16)
    weight = torch.randn(2 * 18944, 3584, dtype=torch.bfloat16, device=DEVICE)
    x, found = torch.empty_like(problem.x), []

    def run() -> None:
        for scale in (1.0, 2.0, 0.5):  # outputs take turns in the memory of the graph
            torch.mul(problem.x, scale, out=x)
            y = x @ weight.t()
            kernels.add_lora(y, x, problem.a, problem.b, problem.indices)
            found.append(y.clone())

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(200):
        graph.replay()
    for first, last in zip(found[:3], found[3:], strict=True):
        assert torch.equal(first, last)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1000, 5000])
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize("size", [(3584, (3584, 512, 512)), (3584, (18944, 18944)), (18944, (3584,))], ids=str)
def test_real_shapes_captured_and_repeated(kernels, tokens, rank, size):
    inputs, widths = size
    problem = Problem(tokens, inputs, rank, widths, torch.bfloat16)
    y = problem.y.clone()

    def run() -> None:
        y.copy_(problem.y)
        kernels.add_lora(y, problem.x, problem.a, problem.b, problem.indices)

    run()
    first = y.clone()
    problem.check(kernels, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, first)
