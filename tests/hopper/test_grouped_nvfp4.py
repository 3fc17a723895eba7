"""The Triton kernels that multiply the rows of a mixture of experts by NVFP4 weights equal loops over rows. They run on
the GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import E2M1_CODES

KERNELS = "qerl_pl.hopper.grouped_nvfp4"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter has no bf16


def draw_weights(kernels: ModuleType, experts: int, outputs: int, inputs: int) -> Any:
    """Draw a stack of random codes and block scales, which include the smallest and the largest ones."""
    generator = torch.Generator(DEVICE).manual_seed(outputs * inputs)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=DEVICE).to(torch.uint8)

    factor = torch.rand(experts, generator=generator, device=DEVICE) / 448
    return PackedWeight(draw(256, experts, outputs, inputs // 2), draw(127, experts, outputs, inputs // 16), factor)


def dense(stack: Any, expert: int) -> Tensor:
    """Dequantise an expert's matrix by a loop over its columns, [N, K] fp64."""
    codes, scales, factor = (tensor[expert] for tensor in vars(stack).values())
    values = torch.tensor(E2M1_CODES, dtype=torch.float64, device=DEVICE)
    columns = []
    for column in range(2 * codes.shape[1]):
        code = (codes[:, column // 2] >> (column % 2 * 4)) & 0xF
        columns.append(values[code.long()] * scales[:, column // 16].view(torch.float8_e4m3fn).double())
    return torch.stack(columns, dim=1) * factor.double()


def draw_rows(tokens: int, chosen: int, experts: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Draw inputs [T, K] and experts [T, k] of tokens; experts may be equal, and some have no rows."""
    generator = torch.Generator(DEVICE).manual_seed(tokens * inputs)
    x = torch.randn(tokens, inputs, generator=generator, device=DEVICE).to(DTYPE)
    return x, torch.randint(experts, (tokens, chosen), generator=generator, device=DEVICE, dtype=torch.int32)


def check(y: Tensor, x: Tensor, weights: list, ids: Tensor, shares: Tensor | None = None) -> None:
    """Check products: the error of every element is at most one rounding and what the fp32 sums allow."""
    found = ids.flatten().tolist()
    matrices = {expert: torch.cat([dense(stack, expert) for stack in weights]) for expert in set(found)}
    factor = torch.ones(len(found), device=DEVICE) if shares is None else shares.flatten()
    for row, expert in enumerate(found):
        inputs, matrix = x[row * len(x) // len(found)].double(), matrices[expert]
        exact, size = matrix @ inputs * factor[row].double(), matrix.abs() @ inputs.abs() * factor[row].double().abs()
        bound = torch.finfo(y.dtype).eps * exact.abs() + (len(inputs) + 8) * 2**-23 * size
        assert ((y[row].double() - exact).abs() <= bound).all(), row


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("slices", "per_row"), [(2, False), (1, False), (1, True)])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 128), (72, 272), (130, 96), (16, 16)])
def test_products_equal_the_definition(kernels, outputs, inputs, slices, per_row, tokens):
    """Gate and up in one launch, and down, whose rows have inputs and weights of their own."""
    x, ids = draw_rows(tokens, 3, 5, inputs)
    shares = None
    if per_row:
        x, shares = draw_rows(3 * tokens, 1, 1, inputs)[0], torch.randn(tokens, 3, device=DEVICE)
    weights = [draw_weights(kernels, 5, outputs, inputs) for _ in range(slices)]
    y = kernels.multiply(x, weights, kernels.find_rows(ids, 5), shares)
    check(y, x, weights, ids, shares)


@pytest.mark.parametrize("tile", [(16, 64), (32, 128), (64, 128, 256, 8)], ids=str)
@pytest.mark.parametrize("experts", [2, 300])
def test_more_rows_of_an_expert_than_a_tile(kernels, experts, tile):
    """All rows are one expert's, of fewer or of more experts than rows."""
    x, ids = draw_rows(35, 4, experts, 160)
    ids.fill_(experts - 1)
    weights = [draw_weights(kernels, experts, 24, 160)]
    y = kernels.multiply(x, weights, kernels.find_rows(ids, experts), None, kernels.Tile(*tile))
    check(y, x, weights, ids)


@pytest.mark.parametrize(
    ("inputs", "tile"), [(128, None), (400, (16, 64)), (160, (32, 128)), (256, (64, 128, 256, 8))], ids=str
)
def test_sums_that_fp32_holds_exactly_are_rounded_once(kernels, inputs, tile):
    """Inputs are integers, block scales 1 or 2, and tensor scales powers of 2, so fp32 holds every sum exactly. With
    every tile, the result is the exact product, rounded to the dtype of the outputs."""
    x, ids = draw_rows(9, 2, 4, inputs)
    x = (4 * x).round()
    stack = draw_weights(kernels, 4, 100, inputs)
    stack.block_scale.copy_(0x38 + 8 * (stack.block_scale % 2))
    stack.global_scale.copy_(2.0 ** torch.arange(4))
    y = kernels.multiply(x, [stack], kernels.find_rows(ids, 4), None, tile and kernels.Tile(*tile))
    exact = [dense(stack, expert) @ x[row // 2].double() for row, expert in enumerate(ids.flatten().tolist())]
    assert torch.equal(y, torch.stack(exact).to(DTYPE))


def test_every_code_times_every_scale_is_exact(kernels):
    """Inputs are 1 in one column and 0 in the others, so each output is a single weight."""
    pair = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 1, 128)
    scales = torch.arange(127, dtype=torch.uint8, device=DEVICE)
    stack = PackedWeight(
        pair.repeat(1, 127, 1), scales[None, :, None].repeat(2, 1, 16), torch.tensor([1.0, 0.5], device=DEVICE)
    )
    ids = torch.arange(2, device=DEVICE).repeat(256, 1)
    y = kernels.multiply(torch.eye(256, dtype=DTYPE, device=DEVICE), [stack], kernels.find_rows(ids, 2))
    for expert in range(2):
        assert torch.equal(y.view(256, 2, 127)[:, expert].T.double(), dense(stack, expert))


@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_found(kernels, dtype, tokens, monkeypatch):
    """``find_rows`` lists each row (a token with one of its experts) once, in the list of the row's expert, and leaves
    out rows whose expert's index is out of range. This also holds if thread blocks read the experts' indices in several
    parts."""
    monkeypatch.setattr(kernels, "SCANNED", 64)
    ids = draw_rows(tokens, 3, 20, 16)[1].to(dtype)
    ids.view(-1)[1::7] = torch.tensor([-1, 20, 1000], device=DEVICE).repeat(len(ids))[: len(ids.view(-1)[1::7])]
    rows = kernels.find_rows(ids, 20)
    assert len(rows.expert) == min(20, ids.numel())
    found = {}
    for expert, count, row in zip(rows.expert.tolist(), rows.count.tolist(), rows.row.tolist(), strict=True):
        if count:
            assert expert not in found
            found[expert] = row[:count]
    flat = ids.flatten().tolist()
    assert found == {e: [s for s, expert in enumerate(flat) if expert == e] for e in set(flat) if 0 <= e < 20}


def test_rows_without_an_expert_are_not_computed(kernels):
    x, ids = draw_rows(6, 2, 3, 48)
    x[2] = float("nan")
    ids[2] = torch.tensor([-1, 3])
    weights = [draw_weights(kernels, 3, 20, 48)]
    y = kernels.multiply(x, weights, kernels.find_rows(ids, 3)).view(6, 2, 20)
    kept = [0, 1, 3, 4, 5]
    check(y[kept].flatten(0, 1), x[kept], weights, ids[kept])


def test_no_rows_are_no_launch(kernels):
    x, ids = draw_rows(2, 2, 3, 48)
    weights = [draw_weights(kernels, 3, 20, 48)]
    assert kernels.multiply(x[:0], weights, kernels.find_rows(ids[:0], 3)).shape == (0, 20)


def test_bad_inputs_are_refused(kernels):
    x, ids = draw_rows(2, 2, 3, 48)
    stack, rows = draw_weights(kernels, 3, 20, 48), kernels.find_rows(ids, 3)
    shares = torch.ones(2, 2, device=DEVICE)
    codes, scales, factor = vars(stack).values()
    short = PackedWeight(codes[:, :, :-4].contiguous(), scales, factor)
    wrong = [
        (r"x: .*; expected .* rows of 48", (x[:, :32], [stack])),
        (r"x: torch\.float16", (x.half(), [stack])),
        (r"x: .*strides", (x.T.contiguous().T, [stack])),
        (r"x has 3 rows; expected one per token, 2, or per row, 4", (x[[0, 0, 1]], [stack])),
        (r"weights has 3 slices", (x, [stack] * 3)),
        (r"40 columns; expected a multiple of 16", (x, [short])),
        (r"weights: .*uint8 \(3, 19, 24\)", (x, [stack, replace(stack, codes=codes[:, 1:])])),
        (r"weights: .*float64 \(3,\)", (x, [replace(stack, global_scale=factor.double())])),
        (r"weights: .*e4m3fn", (x, [replace(stack, block_scale=scales.view(torch.float8_e4m3fn))])),
        (r"shares: .*float64", (x, [stack], shares.double())),
        (r"shares: .*\(1, 2\); expected contiguous fp32 for 4 rows", (x, [stack], shares[:1])),
    ]
    for message, (inputs, weights, *rest) in wrong:
        with pytest.raises(ValueError, match=message):
            kernels.multiply(inputs, weights, rows, *rest)
    for bad in (ids.float(), ids.flatten(), ids.T):
        with pytest.raises(ValueError, match="ids: "):
            kernels.find_rows(bad, 3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 32, 256, 512])
@pytest.mark.parametrize("part", ["gate and up", "down"])
def test_real_shapes_captured_and_repeated(kernels, part, tokens):
    """The sizes are those of Qwen3-30B-A3B. A CUDA graph gives the same bits in each replay. A replay after the inputs
    and the tokens' experts were changed in place computes with the new ones."""
    gated = part == "gate and up"
    outputs, inputs = (768, 2048) if gated else (2048, 768)
    x, ids = draw_rows(tokens if gated else 8 * tokens, 8, 128, inputs)
    ids, shares = ids[:tokens], None if gated else torch.rand(tokens, 8, device=DEVICE)
    weights = [draw_weights(kernels, 128, outputs, inputs) for _ in range(1 + gated)]

    def run() -> Tensor:
        return kernels.multiply(x, weights, kernels.find_rows(ids, 128), shares)

    expected, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, expected)
    ids[:] = ids.flip(0, 1) // 2
    x *= 2
    graph.replay()
    tokens = max(1, tokens // 256)  # that are compared
    rows = 8 * tokens
    check(
        y[:rows], x[: tokens if gated else rows], weights, ids[:tokens], shares if shares is None else shares[:tokens]
    )
    assert y.isfinite().all()


@pytest.mark.slow
@pytest.mark.long
def test_the_code_for_hopper_keeps_its_loop_short():
    """The loop has so few instructions per weight that reading the weights takes longer than unpacking them, and a
    thread block takes so few registers and so little shared memory that four of them fit on an SM. The loop does not
    use the stack, on which other parts of the kernel keep a few registers."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper.compiled_nvfp4", "--tokens", "128"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [line["shape"]["part"] for line in lines] == ["gate and up", "down"]
    for line in lines:
        assert line["issued"] <= 3.4, line
        assert line["alu"] <= 1.6, line
        assert line["registers"] <= 65536 / 4 / 128, line
        assert line["shared_bytes"] <= 227 * 1024 / 4 - 1024, line
        assert line["stack_bytes"] <= 64, line
        assert line["spills"] == 0, line
