"""The NVFP4 GEMM for up to 64 tokens (``nvfp4_decode``) compiles, its schedules fit the GPU, its weights have the
layout of the library Humming, and its product is right."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch.nn import functional as F

from qerl_pl.hopper import costs, driver, lora_hopper, nvfp4_decode
from qerl_pl.hopper.nvfp4_decode import BITS, VARIANTS, choose_schedule, decode_linear, humming_bias
from qerl_pl.hopper.tile_order import words_in_tile_order
from tests.hopper.nvfp4_linears import (
    SHAPES,
    SHARED,
    SHARED_OF_BLOCK,
    assert_nothing_else_is_written,
    assert_the_formula,
    few,
    on_gpu,
    random_linear,
)
from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.fragments import fragments


@pytest.mark.parametrize("variant", few(VARIANTS), ids=str)
def test_the_source_compiles_for_every_variant(variant):
    assert driver.compiled(nvfp4_decode.kernel(variant)).startswith(b"\x7fELF")


def test_an_error_of_the_compiler_is_shown():
    kernel = nvfp4_decode.kernel(VARIANTS[0])._replace(code="no such thing;")
    with pytest.raises(RuntimeError, match=r"nvfp4_decode\.cu does not compile for sm_90a: .*no such|.*identifier"):
        driver.compiled(kernel)


def test_an_sm_has_room_for_the_blocks():
    for variant in VARIANTS:
        assert variant.shared_bytes <= SHARED_OF_BLOCK, variant
        assert variant.blocks * (variant.shared_bytes + 1024) <= SHARED, variant
        tile = variant.tokens * 32 * variant.k_blocks * variant.groups
        assert tile % 1024 == 0, f"tiles of {variant} begin where wgmma can read them"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_block_has_work_and_a_cluster_is_portable(shape):
    for tokens in (1, 8, 9, 16, 17, 32, 33, 64):
        schedule = choose_schedule(tokens, *shape)
        if schedule is None:
            assert tokens > 32
            continue
        variant, splits = schedule
        assert tokens <= variant.tokens < (2 if shape[1] % 128 == 0 else 4) * max(tokens, 8)
        assert shape[1] % 128 == 0 or variant.groups * variant.k_blocks == 4, f"{tokens}: stages end where K ends"
        assert 1 <= splits <= 8, tokens
        assert splits <= max(1, shape[1] // 16 // (variant.k_blocks * variant.groups)), tokens


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(0, 256, 128), (33, 256, 128), (65, 55296, 5120), (8, 288, 128), (8, 256, 160)]
)
def test_what_does_not_fit_is_left_to_others(tokens, outputs, inputs):
    assert choose_schedule(tokens, outputs, inputs) is None


def test_a_lanes_weights_lie_side_by_side():
    codes, scales = random_linear(128, 64)
    words, ordered = fragments(codes, scales)
    assert words.shape == (4, 256)
    assert words.dtype == torch.int32
    for k_block in range(4):
        for tile in range(2):
            for lane in range(32):
                g, c = lane // 4, lane % 4
                for j in range(4):
                    word = words[k_block, (tile * 32 + lane) * 4 + j].item() % 2**32
                    output, first = 64 * tile + 16 * j + g, 16 * k_block + 2 * c
                    places = [(0, 0), (0, 8), (8, 0), (8, 8), (0, 1), (0, 9), (8, 1), (8, 9)]
                    places_of_bits = [[(at + high) % 32 for at in bits] for high in (0, 16) for bits in BITS]
                    found = [sum((word >> at & 1) << bit for bit, at in enumerate(bits)) for bits in places_of_bits]
                    assert found == [codes[output + row, first + tile].item() for row, tile in places]
                    for half in range(2):
                        byte = ordered.view(torch.uint8)[k_block, 64 * tile + 8 * g + 2 * j + half]
                        assert byte == scales.view(torch.uint8)[output + 8 * half, k_block]


def test_the_kernel_finds_the_bias_in_hummings_order():
    ordered = humming_bias(torch.arange(128))
    for n in range(0, 128, 4):  # as the source has it
        at = (n & ~31) + ((n >> 1) & 2) * 8 + ((n >> 3) & 3) * 2
        assert [ordered[at + i].item() for i in (0, 1, 8, 9)] == [n, n + 1, n + 2, n + 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_fetched_ahead_lies_in_the_next_weight(shape):
    outputs, inputs = shape
    weight = torch.empty(inputs // 16, 2 * outputs, dtype=torch.int32, device="meta")
    for tokens, blocks in product((1, 8, 32, 64), (1, 3, 112, 592)):
        _, parts, stride, fetching, size = nvfp4_decode._fetched(weight, tokens, blocks)
        assert fetching * size <= costs.FETCHED_AHEAD, (tokens, blocks)
        assert parts * stride <= weight.nbytes, (tokens, blocks)
        # as the source has it
        places = sorted(block % parts * stride + block // parts * size for block in range(fetching))
        assert all(one + size <= other for one, other in pairwise(places)), "nothing is fetched twice"
        assert all(place % 16 == 0 and place + size <= weight.nbytes for place in places), (tokens, blocks)
        if (schedule := choose_schedule(tokens, outputs, inputs)) and blocks > 100 and weight.nbytes > 2**20:
            assert {place // stride for place in places} == set(range(schedule.splits)), "the start of each part"
            assert fetching * size > 0.8 * min(costs.FETCHED_AHEAD, parts * stride), (tokens, blocks)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_fetching_the_next_weight_ahead_changes_no_bit(tokens):
    shape = 768, 2176
    codes, scales = random_linear(*shape, "cuda")
    weight, ordered = fragments(codes, scales)
    one, x = torch.ones(1, device="cuda"), torch.randn(tokens, shape[1], device="cuda").bfloat16()
    schedule = choose_schedule(tokens, *shape)
    assert schedule is not None
    y = decode_linear(x, weight, ordered, one, None, schedule)
    for outputs, inputs in SHAPES:
        following = torch.zeros(inputs // 16, 2 * outputs, dtype=torch.int32, device="cuda")
        assert torch.equal(y, decode_linear(x, weight, ordered, one, None, schedule, next_weight=following))
        assert not following.any()


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_the_formulas(shape):
    outputs, inputs = shape
    driver.prepare(nvfp4_decode.kernels_for(outputs, inputs), torch.device("cuda", 0))
    schedules = {
        tokens: schedule for tokens in (1, 3, 8, 9, 16, 27, 32, 33, 64) if (schedule := choose_schedule(tokens, *shape))
    }
    assert_the_formula(decode_linear, shape, schedules)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 5, 8])
def test_every_variant_and_split_gives_the_product_and_writes_nothing_else(variant, splits):
    shape = 768, 2176  # 136 k-blocks: not whole stages of 16
    schedule = nvfp4_decode.Schedule(variant, splits)
    assert_nothing_else_is_written(decode_linear, shape, schedule, 1, variant.tokens - 3, variant.tokens)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("splits", [1, 3, 4, 8])
@pytest.mark.parametrize("rank", [0, 8, 64])
def test_a_gated_product_has_the_bits_of_the_product_and_silu_apart(variant, splits, rank):
    outputs, inputs = 1280, 2176  # gate and up of 640 each
    codes, scales = random_linear(outputs, inputs, "cuda")
    weight, ordered = fragments(codes, scales)
    factor = torch.tensor([1e-2 * inputs**-0.5], device="cuda")  # silu is neither 0 nor the identity
    schedule, token_counts = nvfp4_decode.Schedule(variant, splits), (1, variant.tokens - 3, variant.tokens)
    a, b = (torch.randn(2, *shape, device="cuda").bfloat16() * 0.02 for shape in ((rank, inputs), (outputs // 2, rank)))
    for tokens in token_counts:
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        adapter = lora_hopper.Adapter([*a], [*b], torch.arange(tokens, device="cuda") % 3 - 1) if rank else None
        gate, up = decode_linear(x, weight, ordered, factor, None, schedule, adapter=adapter).chunk(2, dim=1)
        assert 0.1 < gate.abs().median() < 10
        assert not gate.isnan().any()
        y = torch.full((tokens + 2, outputs // 2), 7.0, device="cuda", dtype=torch.bfloat16)
        decode_linear(x, weight, ordered, factor, None, schedule, out=y[1:-1], adapter=adapter, gated=True)
        assert torch.equal(y[1:-1], F.silu(gate) * up)
        assert (y[[0, -1]] == 7).all(), "nothing else is written"


def test_gate_and_up_with_a_bias_are_refused():
    x, weight, scales = torch.ones(1, 256).bfloat16(), torch.ones(16, 512, dtype=torch.int32), torch.ones(16, 256)
    schedule = nvfp4_decode.Schedule(VARIANTS[0], 1)
    with pytest.raises(AssertionError, match="no bias"):
        decode_linear(x, weight, scales, torch.ones(1), torch.ones(256), schedule, gated=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.vllm
def test_the_layout_is_hummings_but_for_the_order_of_bits_in_a_word():
    from tests.bench.bench_schedules import humming_linear

    codes, scales = random_linear(512, 384, "cuda")
    bias = torch.randn(512, device="cuda").bfloat16()
    _, tensors = humming_linear(codes, scales, bias)
    weight, ordered = fragments(codes, scales)
    assert torch.equal(words_in_tile_order(tensors["weight"]).flatten(), weight.flatten())
    assert torch.equal(tensors["weight_scale"].view(torch.uint8).flatten(), ordered.view(torch.uint8).flatten())
    assert torch.equal(tensors["bias"].flatten(), humming_bias(bias))
