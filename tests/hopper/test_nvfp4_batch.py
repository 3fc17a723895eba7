"""The NVFP4 GEMM for up to 2048 tokens (``nvfp4_batch``) compiles, its schedules fit the GPU, and its product is
right."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qerl_pl.hopper import costs, driver, nvfp4_batch
from qerl_pl.hopper.nvfp4_batch import (
    FULL_TILES,
    MOST_TOKENS,
    VARIANTS,
    Schedule,
    Variant,
    batch_linear,
    choose_schedule,
)
from tests.hopper.nvfp4_linears import (
    SHAPES,
    SHARED_OF_BLOCK,
    assert_nothing_else_is_written,
    assert_the_formula,
    few,
    on_gpu,
    random_linear,
)
from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.fragments import fragments

DECODED = (1, 33, 48, 64, 65, 96, 97, 128, 129, 192, 193, 256)
TOKENS = (*DECODED, 257, 384, 385, 1000, 1024, 2047, 2048)


def chosen(tokens: int, outputs: int, inputs: int) -> Schedule:
    """Where there is one."""
    schedule = choose_schedule(tokens, outputs, inputs)
    assert schedule is not None
    return schedule


def widths(schedule: Schedule, outputs: int) -> list[int]:
    """List the widths, in tiles, of the thread blocks along the outputs."""
    wide = schedule.wide(outputs)
    return [schedule.variant.tiles] * wide + [schedule.variant.tiles - 1] * (schedule.blocks - wide)


@pytest.mark.parametrize("variant", few(VARIANTS), ids=str)
def test_the_source_compiles_for_every_variant(variant):
    assert driver.compiled(nvfp4_batch.kernel(variant)).startswith(b"\x7fELF")


def test_an_sm_has_room_for_a_block_and_copies_run_ahead():
    for variant in VARIANTS:
        assert variant.shared_bytes <= SHARED_OF_BLOCK, variant
        assert variant.stage_bytes % 1024 == 0, "tiles begin where wgmma can read them"
        assert variant.stages >= (3 if variant.tokens == 256 else 4), variant
        kept = variant.stages * (variant.stage_bytes + 16) + 4 * variant.tiles * 256  # barriers, bf16 scales
        assert kept <= variant.shared_bytes, variant
        assert variant.tokens * (64 * variant.tiles + 4) * 4 <= variant.shared_bytes, "the sums"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_block_has_work_and_split_sums_are_computed_at_a_time(shape):
    outputs, inputs = shape
    for tokens in TOKENS:
        variant, splits, blocks = schedule = chosen(tokens, outputs, inputs)
        token_tiles = -(-tokens // variant.tokens)
        assert token_tiles <= 2 or tokens > 256, tokens
        assert 1 <= splits <= -(-inputs // 128), tokens
        assert splits == 1 or tokens > 256 or blocks * token_tiles <= costs.CONCURRENT_CLUSTERS[splits], tokens
        *others, last = widths(schedule, outputs)
        assert sum(others) < outputs // 64 <= sum(others) + last, tokens


@pytest.mark.parametrize("shape", [*SHAPES, (27648, 5120), (5120, 27648)], ids=str)
def test_what_is_compiled_before_a_graph_is_captured_is_all_that_is_chosen(shape):
    prepared = {kernel.name for kernel in nvfp4_batch.kernels_for(*shape)}
    for tokens, fuses in product(FULL_TILES, (True, False)):
        schedule = choose_schedule(tokens, *shape, fuses_lora=fuses)
        assert schedule is None or nvfp4_batch.kernel(schedule.variant).name in prepared


def test_a_number_of_tokens_has_the_schedule_of_the_next_one_with_as_many_token_tiles():
    assert FULL_TILES[-1] == MOST_TOKENS
    for tokens in range(1, MOST_TOKENS + 1):
        full = next(most for most in FULL_TILES if tokens <= most)
        schedule = chosen(tokens, *SHAPES[0])
        assert schedule == choose_schedule(full, *SHAPES[0])
        tiles = schedule.variant.token_tiles
        assert tiles(tokens) == tiles(full), "no token tile without tokens"


def test_the_rule_is_what_the_sweep_found():
    """``choose_schedule`` predicts the fastest schedule. The expected schedules were the fastest when all were
    measured: for 256 tokens or more on an H100, for fewer on an H200."""
    found = {
        (128, 37888, 3584): (128, 5, 1, 119),
        (192, 37888, 3584): (96, 5, 1, 132),
        (256, 37888, 3584): (128, 5, 1, 132),
        (128, 3584, 18944): (128, 4, 8, 14),
        (256, 3584, 18944): (256, 2, 4, 28),
        (64, 3584, 3584): (64, 2, 4, 28),
        (128, 4608, 3584): (128, 3, 4, 24),
        (256, 4608, 3584): (256, 2, 3, 36),
        (64, 27648, 5120): (64, 4, 1, 108),
        (256, 3584, 3584): (256, 2, 4, 28),
        (192, 27648, 5120): (96, 4, 1, 124),
        (256, 27648, 5120): (128, 4, 1, 124),
        (64, 55296, 5120): (64, 4, 1, 248),
        (128, 55296, 5120): (128, 4, 1, 248),
        (192, 55296, 5120): (96, 5, 1, 186),
        (256, 7168, 5120): (256, 2, 2, 56),
        (512, 3584, 18944): (256, 2, 2, 28),
        (512, 5120, 27648): (128, 5, 2, 16),
        (1024, 37888, 3584): (256, 2, 1, 296),
        (1024, 3584, 18944): (256, 2, 1, 28),
        (1024, 7168, 5120): (256, 2, 1, 56),
        (1024, 5120, 5120): (128, 5, 1, 16),
        (1024, 55296, 5120): (256, 2, 1, 462),
        (1024, 5120, 27648): (128, 5, 1, 16),
        (2048, 5120, 27648): (256, 2, 2, 40),
    }
    for shape, (tokens, columns, *others) in found.items():
        assert choose_schedule(*shape) == Schedule(Variant(tokens, columns), *others), shape


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"), [(0, 256, 128), (MOST_TOKENS + 1, 256, 128), (40, 288, 128), (40, 256, 160)]
)
def test_what_does_not_fit_is_left_to_others(tokens, outputs, inputs):
    assert choose_schedule(tokens, outputs, inputs) is None


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_the_formulas(shape):
    outputs, inputs = shape
    driver.prepare(nvfp4_batch.kernels_for(outputs, inputs), torch.device("cuda", 0))
    schedules = {tokens: schedule for tokens in TOKENS if (schedule := choose_schedule(tokens, *shape))}
    assert_the_formula(batch_linear, shape, schedules)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 5, 8])
def test_every_variant_and_split_gives_the_product_and_writes_nothing_else(variant, splits):
    shape, most = (704, 2176), variant.tokens  # 11 columns: the last block has some beyond the end
    fewest = -(-11 // variant.tiles)
    for blocks in range(fewest, 11 // (variant.tiles - 1) + 1) if splits == 1 else (fewest,):
        schedule = Schedule(variant, splits, blocks)
        assert_nothing_else_is_written(batch_linear, shape, schedule, 1, most - 3, most, 2 * most - 5)


@on_gpu
@pytest.mark.gpu
def test_a_cuda_graph_repeats_it():
    codes, scales = random_linear(512, 1024, "cuda")
    weight, ordered = fragments(codes, scales)
    one, schedule = torch.ones(1, device="cuda"), chosen(100, 512, 1024)
    driver.prepare(nvfp4_batch.kernels_for(512, 1024), weight.device)
    x = torch.randn(100, 1024, device="cuda").bfloat16()
    y = batch_linear(x, weight, ordered, one, None, schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch_linear(x, weight, ordered, one, None, schedule, out=y)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, batch_linear(x, weight, ordered, one, None, schedule))


@on_gpu
@pytest.mark.gpu
def test_an_address_that_the_copy_engine_cannot_take_is_an_error():
    weight, ordered = fragments(*random_linear(256, 128, "cuda"))
    x = torch.zeros(40 * 128 + 4, device="cuda", dtype=torch.bfloat16)[4:].view(40, 128)
    with pytest.raises(RuntimeError, match="CUDA"):
        batch_linear(x, weight, ordered, torch.ones(1, device="cuda"), None, chosen(40, 256, 128))
