"""Random NVFP4 linear layers for the tests of the Hopper kernels, and checks that the tests of several kernels use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.hopper.nvfp4_decode import humming_bias
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import E2M1_CODES
from tests.reference.decode_linear import decode_linear_reference
from tests.reference.fragments import fragments

SHAPES = [
    (4608, 3584),
    (37888, 3584),
    (3584, 18944),
    (5120, 5120),
    (55296, 5120),
    (256, 128),
    (2304, 1408),
    (22016, 2048),
    (1152, 896),  # Qwen2.5-0.5B: the last thread block has two warps with outputs
    (896, 896),
    (9728, 896),
    (896, 4864),
    (960, 576),  # SmolLM2-135M: the last stage is half
    (3072, 576),
    (576, 1536),
    (320, 192),
    (64, 64),
]
SHARED_OF_BLOCK, SHARED = 227 * 1024, 228 * 1024  # bytes of shared memory: thread block, and SM of an H100
E2M1 = torch.tensor(E2M1_CODES)


def few(variants: Sequence[Any]) -> list[Any]:
    """Return a kernel's variants as test parameters, seven of every eight marked ``long``, because compiling a variant
    takes seconds."""
    return [pytest.param(each, marks=[pytest.mark.long] if at % 8 else []) for at, each in enumerate(variants)]


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_linear(outputs: int, inputs: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Draw e2m1 codes [N, K] uint8 and scales [N, K / 16] e4m3. Scales may have any value that is not negative, zero,
    subnormal numbers and the largest number included."""
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = torch.randint(0, 127, (outputs, inputs // 16), dtype=torch.uint8, device=device)
    return codes, scales.view(torch.float8_e4m3fn)


def rows_of(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Return the part of a weight that computes outputs ``start`` to ``stop``, as views. Both numbers are multiples of
    64, because the weight is in tile order, the order in which the Hopper kernels read weights."""
    return PackedWeight(weight.codes[:, 2 * start : 2 * stop], weight.block_scale[:, start:stop], weight.global_scale)


def assert_the_formula(linear: Callable[..., Tensor], shape: tuple[int, int], schedules: dict[int, Any]) -> None:
    """Check a kernel's product against that with the dequantised weight, with bias and without, and that a second call
    gives the same bits. ``schedules`` has the schedule to use for each number of tokens."""
    outputs, inputs = shape
    codes, scales = random_linear(outputs, inputs, "cuda")
    weight, ordered = fragments(codes, scales)
    global_scale, bias = torch.tensor([0.37], device="cuda"), torch.randn(outputs, device="cuda").bfloat16()
    for tokens, schedule in schedules.items():
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        exact = decode_linear_reference(x, E2M1.cuda()[codes.long()], scales, global_scale)
        for ordered_bias, expected in ((None, exact), (humming_bias(bias), exact + bias.float())):
            found, again = (linear(x, weight, ordered, global_scale, ordered_bias, schedule) for _ in range(2))
            assert (found.float() - expected).abs().max() <= 2**-7 * expected.abs().max()
            assert torch.equal(found, again), "sums have a fixed order"


def assert_nothing_else_is_written(
    linear: Callable[..., Tensor], shape: tuple[int, int], schedule: Any, *token_counts: int
) -> None:
    """Check for each number of tokens that the kernel's product is right, and that the kernel does not write to the
    rows of memory before and after its output."""
    outputs, inputs = shape
    codes, scales = random_linear(outputs, inputs, "cuda")
    weight, ordered = fragments(codes, scales)
    one = torch.ones(1, device="cuda")
    for tokens in token_counts:
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        exact = decode_linear_reference(x, E2M1.cuda()[codes.long()], scales, one)
        y = torch.full((tokens + 2, outputs), 7.0, device="cuda", dtype=torch.bfloat16)
        linear(x, weight, ordered, one, None, schedule, out=y[1:-1])
        assert (y[1:-1].float() - exact).abs().max() <= 2**-7 * exact.abs().max()
        assert (y[[0, -1]] == 7).all()
