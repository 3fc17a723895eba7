"""Memory plans: the parts that a plan adds up, the settings that it chooses, and its advice for models that do not
fit."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_pl.memory import fitting
from qerl_pl.memory.advice import Change, advice, advice_text, with_changes
from qerl_pl.memory.fitting import (
    AMPLE,
    LARGE_STEP,
    LARGEST_MICRO_BATCH,
    STEP,
    USUAL_MICRO_BATCH,
    cache_bytes,
    checkpointing_options,
    fitted,
    longest_completion,
    smallest_gpu,
    time_per_token,
    usable,
    usual_micro_batch,
)
from qerl_pl.memory.parts import kv_token_bytes
from qerl_pl.memory.plan import MOMENTS, TRAINING, Plan, plan
from qerl_pl.memory.settings import FEW_GRAPH_SEQUENCES, GRAPH_SEQUENCES, EngineMemory, RunMemory, state_bytes
from qerl_pl.memory.shape import ModelShape, config_shape
from qerl_pl.policy.recompute import Recompute, ladder
from qerl_pl.quant.formats import Format
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.tools.plan import without_native_kernels
from tests.families import tiny_config
from tests.memory.conftest import recurrent_config, small_config
from tests.random_models import model_config

GIB = 2**30
SHAPES = {name: config_shape(model_config(name), NVFP4, torch.bfloat16) for name in ("3B", "7B", "32B")}
PAPER = RunMemory(
    rows=128, prompt_tokens=256, completion_tokens=4096, gradient_checkpointing=True, engine=EngineMemory()
)
HALVES = RunMemory(rows=8, prompt_tokens=100, completion_tokens=412, micro_batch_tokens=1024)


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("gib", [24, 48, 80, 141])
def test_what_is_chosen_fits_or_is_as_small_as_it_may_be(size, gib):
    result = fitted(SHAPES[size], PAPER, gib * GIB)
    least = cache_bytes(SHAPES[size], PAPER, EngineMemory(), num_sequences=1)
    assert result.micro_batch_tokens >= PAPER.longest_row
    assert result.kv_cache_bytes >= least
    if result.train > usable(gib * GIB):
        assert result.micro_batch_tokens == PAPER.longest_row
    if result.peak > max(result.train, usable(gib * GIB)):
        assert result.kv_cache_bytes == least


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True, "auto"])
def test_the_smallest_card_is_the_first_that_a_run_fits_on(size, checkpointing):
    run = replace(PAPER, gradient_checkpointing=checkpointing)
    smallest = smallest_gpu(SHAPES[size], run)
    fits = [fitted(SHAPES[size], run, gib * GIB).peak <= usable(gib * GIB) for gib in range(1, smallest + 20)]
    assert fits == [gib >= smallest for gib in range(1, smallest + 20)]


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("gib", [8, 24, 80])
def test_the_longest_completion_fits_and_a_longer_one_does_not(size, gib):
    run = replace(PAPER, rows=8, gradient_checkpointing="auto")

    def fits(tokens: int) -> bool:
        tried = replace(run, completion_tokens=tokens, evaluation_tokens=tokens)
        return fitted(SHAPES[size], tried, gib * GIB).peak <= usable(gib * GIB)

    longest = longest_completion(SHAPES[size], run, gib * GIB)
    assert longest % STEP == 0
    assert longest == 0 or fits(longest)
    assert not fits(longest + STEP)
    assert longest <= longest_completion(SHAPES[size], replace(run, rank=8), gib * GIB)
    fp8 = replace(run, engine=EngineMemory(kv_cache_dtype="fp8"))
    assert longest <= longest_completion(SHAPES[size], fp8, gib * GIB)
    assert longest <= longest_completion(SHAPES[size], run, 2 * gib * GIB)


@pytest.mark.parametrize(("max_num_seqs", "cached"), [(256, 128), (16, 16)])
def test_a_large_gpu_gets_the_usual_micro_batch_and_a_cache_for_the_rows_sampled_together(max_num_seqs, cached):
    result = fitted(SHAPES["3B"], replace(PAPER, engine=EngineMemory(max_num_seqs=max_num_seqs)), 141 * GIB)
    assert result.micro_batch_tokens == usual_micro_batch(SHAPES["3B"])
    assert result.kv_cache_bytes == cache_bytes(SHAPES["3B"], PAPER, EngineMemory(), num_sequences=cached)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("gib", [12, 24, 48, 80, 141])
@pytest.mark.parametrize("size", ["0.5B", "1.5B", "7B"])
def test_a_cache_stays_allocated_where_memory_is_ample_and_then_costs_nothing_else(size, gib, level):
    """A run whose cache stays allocated has the cache and the level of gradient checkpointing that it would have
    anyway, and micro-batches that are at least as large, up to the usual ones of the model."""
    shape = config_shape(model_config(size), NVFP4, torch.bfloat16)
    run = RunMemory(rows=320, prompt_tokens=512, completion_tokens=1024, engine=EngineMemory(sleep_level=level))
    found = fitted(shape, replace(run, gradient_checkpointing="auto"), gib * GIB)
    assert found.run.engine is not None
    given = replace(found.run, engine=replace(found.run.engine, keeps_cache=False), micro_batch_tokens=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "AMPLE", 0.0)
        without = fitted(shape, given, gib * GIB)
    assert not without.keeps_cache
    assert found.run.gradient_checkpointing == without.run.gradient_checkpointing
    assert found.kv_cache_bytes == without.kv_cache_bytes
    if found.keeps_cache:
        assert level == 0
        assert found.peak <= usable(int(AMPLE * gib * GIB))
        assert without.micro_batch_tokens <= found.micro_batch_tokens <= usual_micro_batch(shape)
        assert found.run.engine.graph_sequences == GRAPH_SEQUENCES
        assert found.parts["KV cache"]["block"] == found.kv_cache_bytes
        assert "stays allocated" in found.summary()
    else:
        assert without.run.engine is not None
        kept = replace(without.run, engine=replace(without.run.engine, keeps_cache=True))
        assert level == 1 or plan(shape, kept).peak > usable(int(AMPLE * gib * GIB))
        assert found.micro_batch_tokens == without.micro_batch_tokens
    assert found.keeps_cache or (gib, level) != (141, 0) or size == "7B"


def test_small_models_have_larger_micro_batches():
    shapes = {
        size: config_shape(model_config(size), NVFP4, torch.bfloat16) for size in ("0.5B", "1.5B", "3B", "7B", "32B")
    }
    usual = {size: usual_micro_batch(shape) for size, shape in shapes.items()}
    assert list(usual.values()) == sorted(usual.values(), reverse=True)
    assert usual["0.5B"] == LARGEST_MICRO_BATCH > usual["1.5B"] > usual["3B"]
    assert usual["3B"] == usual["7B"] == usual["32B"] == USUAL_MICRO_BATCH
    assert all(tokens % LARGE_STEP == 0 for tokens in usual.values())


@pytest.mark.parametrize("gib", range(6, 42, 6))
@pytest.mark.parametrize("size", SHAPES)
def test_graphs_for_many_sequences_take_nothing_that_a_run_needs(size, gib):
    """With graphs of decoding steps for up to 512 sequences, a run has the same KV cache and recomputes as much as with
    those for 64; where this is impossible, it has those for 64."""
    run = replace(PAPER, rows=16, gradient_checkpointing="auto")
    found, few = (
        fitted(SHAPES[size], replace(run, engine=EngineMemory(graph_sequences=most)), gib * GIB) for most in (512, 64)
    )
    assert found.run.engine is not None
    assert found.kv_cache_bytes == few.kv_cache_bytes
    assert found.run.gradient_checkpointing == few.run.gradient_checkpointing
    assert (found.peak <= usable(gib * GIB)) == (few.peak <= usable(gib * GIB))
    assert found.run.engine.graph_sequences == 512 or found == few


def test_what_is_given_is_kept():
    engine = EngineMemory(kv_cache_bytes=GIB, graph_sequences=FEW_GRAPH_SEQUENCES)
    given_run = replace(PAPER, micro_batch_tokens=5000, engine=engine)
    assert fitted(SHAPES["32B"], given_run, 24 * GIB).run == given_run


@settings(deadline=None, max_examples=30)
@given(
    name=st.sampled_from(["rows", "prompt_tokens", "completion_tokens", "micro_batch_tokens", "rank", "state_bytes"]),
    more=st.integers(1, 10**4),
    checkpointing=st.booleans(),
)
def test_more_of_anything_takes_no_less_memory(name, more, checkpointing):
    run = replace(HALVES, gradient_checkpointing=checkpointing, engine=EngineMemory(kv_cache_bytes=GIB))
    value = min(getattr(run, name) + more, 512 if name == "rank" else 10**9)
    larger, smaller = plan(SHAPES["7B"], replace(run, **{name: value})), plan(SHAPES["7B"], run)
    assert all(larger.total(moment) >= smaller.total(moment) for moment in MOMENTS)


def test_the_engine_gives_back_what_its_sleep_level_says():
    def train(level: int) -> int:
        return plan(SHAPES["7B"], replace(HALVES, engine=EngineMemory(kv_cache_bytes=7 * GIB, sleep_level=level))).train

    shape = SHAPES["7B"]
    slots = 2 * 32 * sum(number * (rows + columns) for number, block in shape.linears for _, rows, columns in block)
    assert train(0) - train(1) == shape.linear_bytes + shape.other_bytes + slots
    alone = plan(shape, HALVES)
    assert "engine's base" not in alone.parts


@pytest.mark.parametrize("level", [0, 1])
def test_a_base_that_trainer_and_engine_have_in_common_counts_once(level: int):
    def planned(one_copy: bool, dtype: str = "auto") -> Plan:
        engine = EngineMemory(kv_cache_bytes=7 * GIB, sleep_level=level, one_copy=one_copy, dtype=dtype)
        return plan(SHAPES["7B"], replace(HALVES, engine=engine))

    one, two, shape = planned(one_copy=True), planned(one_copy=False), SHAPES["7B"]
    assert 0.99 * shape.engine_packed_bytes < shape.fitting_bytes < shape.engine_packed_bytes, "all but tensor scales"
    assert two.total("rollout") - one.total("rollout") == shape.fitting_bytes
    assert two.total("start") - one.total("start") == shape.fitting_bytes, "no copy of its own even while it loads"
    assert two.train - one.train == (0 if level else shape.fitting_bytes)
    assert "one copy of 3.4 GiB" in one.summary()
    assert "copy" not in two.summary()
    wide = planned(one_copy=True, dtype="float32")
    assert wide.total("rollout") == planned(one_copy=False, dtype="float32").total("rollout")


def test_experts_that_trainer_and_engine_have_in_common_count_once():
    shape = config_shape(model_config("30B-A3B", num_layers=2), NVFP4, torch.bfloat16)
    weights = 2 * 3 * shape.experts.num * shape.experts.inner * shape.hidden
    assert shape.fitting_bytes > weights * (1 / 2 + 1 / 16)
    assert 0.99 * shape.engine_packed_bytes < shape.fitting_bytes < shape.engine_packed_bytes, "all but tensor scales"


@pytest.mark.parametrize("size", ["7B", "32B"])
@pytest.mark.parametrize("one_copy", [False, True])
def test_the_cache_takes_what_rollouts_leave(size, one_copy):
    engine = EngineMemory(one_copy=one_copy)
    run = replace(PAPER, rows=32, engine=engine)
    least, wanted = (cache_bytes(SHAPES[size], run, engine, num_sequences=num) for num in (1, 32))
    seen = set()
    for gib in range(8, 72):
        result = fitted(SHAPES[size], run, gib * GIB)
        if least < result.kv_cache_bytes < wanted:
            assert result.total("rollout") == pytest.approx(usable(gib * GIB), abs=2**20)
        seen.add(result.kv_cache_bytes)
    assert len(seen) > 3, "some cards hold some of the sequences"


def test_an_engine_that_dequantises_has_a_dense_copy_of_its_widest_linear():
    def largest(shape: ModelShape, *, dequantises: bool) -> int:
        engine = EngineMemory(kv_cache_bytes=GIB, dequantises=dequantises)
        return plan(shape, replace(HALVES, engine=engine)).parts["engine's passes"]["start"]

    shape = SHAPES["7B"]
    assert largest(shape, dequantises=True) - largest(shape, dequantises=False) == 2 * 2 * shape.inner * shape.hidden
    other = replace(shape, fitting_bytes=0)  # a base in another format
    assert largest(other, dequantises=True) == largest(other, dequantises=False)


def test_linears_that_do_not_fit_the_native_kernels_have_two_copies_and_are_named():
    shape = config_shape(small_config(intermediate_size=528), NVFP4, torch.bfloat16)
    assert shape.fitting_bytes < shape.engine_packed_bytes
    assert shape.unfit == ("gate_proj+up_proj (1056 x 128)", "down_proj (128 x 528)")
    assert "down_proj (128 x 528)" in without_native_kernels(shape)
    whole = config_shape(small_config(), NVFP4, torch.bfloat16)
    assert whole.unfit == ()
    assert without_native_kernels(whole) == ""
    assert config_shape(small_config(), None, torch.bfloat16).fitting_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "copies"), [("auto", 152064, 1), ("float32", 152064, 0), ("auto", 100278, 0)]
)
def test_embeddings_that_are_shared_with_an_engine_of_the_same_dtype_count_once(dtype, vocabulary, copies):
    """vLLM pads a vocabulary of 100278 tokens, that of OLMo 3, so it cannot share the embeddings."""
    run = replace(HALVES, engine=EngineMemory(dtype=dtype, kv_cache_bytes=GIB))
    shape = replace(SHAPES["7B"], vocabulary=vocabulary)
    apart = plan(shape, replace(run, shared_embeddings=False))
    assert apart.peak - plan(shape, run).peak == copies * shape.embedding_bytes


@pytest.mark.parametrize(
    ("fmt", "capability", "dense"), [(NF4, (9, 0), True), (MXFP4, (9, 0), False), (MXFP4, (12, 0), True)]
)
def test_an_engine_that_lacks_kernels_for_a_format_holds_dense_weights(fmt, capability, dense, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    shape = config_shape(small_config(), fmt, torch.bfloat16)
    other = config_shape(small_config(), None if dense else fmt, torch.bfloat16)
    assert shape.engine_linear_bytes == other.linear_bytes
    assert shape.engine_packed_bytes == (0 if dense else shape.linear_bytes)


@pytest.mark.parametrize(("batch_tokens", "tokens"), [(100, 612), (1024, 1024), (10**6, 8 * 612)])
def test_the_cache_of_transformers_holds_a_batch_and_at_least_the_longest_sequence(batch_tokens, tokens):
    shape, run = SHAPES["7B"], replace(HALVES, evaluation_tokens=512, batch_tokens=batch_tokens)
    cache = tokens * kv_token_bytes(shape, 2)
    assert plan(shape, run).parts["KV cache"]["rollout"] == cache + cache // shape.num_layers


@pytest.mark.parametrize("fmt", [None, NVFP4, NF4], ids=["dense", "nvfp4", "nf4"])
@pytest.mark.parametrize(("trainer", "engine"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_an_engine_of_another_dtype_takes_what_it_takes_beside_a_trainer_of_that_dtype(
    fmt: Format | None, trainer: str, engine: str
):
    def parts(trainer: str, engine: str) -> dict[str, int]:
        dtype = getattr(torch, trainer)
        run = replace(HALVES, itemsize=dtype.itemsize, shared_embeddings=False, engine=EngineMemory(dtype=engine))
        result = fitted(config_shape(small_config(), fmt, dtype), run, 80 * GIB)
        return {name: part["start"] for name, part in result.parts.items() if "start" in part}

    mixed, alike, auto = parts(trainer, engine), parts(engine, engine), parts(trainer, "auto")
    follow = {"engine's base", "engine's adapter", "KV cache", "engine's passes", "fragmentation"}
    assert {name: mixed[name] for name in follow} == {name: alike[name] for name in follow}
    assert {name: mixed[name] for name in mixed if name not in follow} == {
        name: auto[name] for name in auto if name not in follow
    }
    larger, smaller = (mixed, auto) if engine == "float32" else (auto, mixed)
    assert all(larger[name] > smaller[name] for name in follow)
    assert parts(trainer, trainer) == auto


def test_the_phases_of_training_are_those_with_gradients():
    result = plan(SHAPES["7B"], HALVES)
    assert set(result.parts["gradients"]) == set(TRAINING)
    assert result.peak == max(result.total(moment) for moment in MOMENTS)


@pytest.mark.parametrize("gib", [20, 24, 30, 40, 60])
@pytest.mark.parametrize("size", ["7B", "32B"])
def test_advice_is_short_and_enough_where_anything_is(size, gib):
    run = replace(PAPER, gradient_checkpointing=False, micro_batch_tokens=32768)
    changes = advice(SHAPES[size], run, gib * GIB)
    assert (changes == []) == (fitted(SHAPES[size], run, gib * GIB).peak <= usable(gib * GIB))

    def peak(some: list[Change]) -> int:
        changed = with_changes(run, {change.key: change.value for change in some})
        return fitted(SHAPES[size], changed, gib * GIB).peak

    assert [change.peak for change in changes] == [peak(changes[: number + 1]) for number in range(len(changes))]
    if changes and changes[-1].peak <= usable(gib * GIB):
        for left_out in changes:
            assert peak([change for change in changes if change is not left_out]) > usable(gib * GIB), left_out
    assert all(change.key in advice_text(changes, gib * GIB) for change in changes)


def test_the_first_thing_to_change_is_the_size_of_a_micro_batch():
    run = replace(PAPER, micro_batch_tokens=65536, engine=EngineMemory(max_num_seqs=8))
    assert [change.key for change in advice(SHAPES["7B"], run, 24 * GIB)] == ["model.micro_batch_tokens"]


def test_a_change_of_training_is_found_though_rollouts_take_more():
    run = replace(PAPER, gradient_checkpointing=False, engine=EngineMemory(kv_cache_bytes=60 * GIB))
    before = fitted(SHAPES["7B"], run, 32 * GIB)
    assert before.total("rollout") > before.train > usable(32 * GIB)
    keys = [change.key for change in advice(SHAPES["7B"], run, 32 * GIB)]
    assert set(keys) == {"model.engine.init_args.kv_cache_bytes", "model.gradient_checkpointing"}


AUTO = replace(PAPER, gradient_checkpointing="auto")


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("tokens", [512, 4352, 16384])
def test_every_rung_takes_less_memory_and_more_time_than_the_one_before(size, tokens):
    shape, run = SHAPES[size], replace(AUTO, micro_batch_tokens=tokens, engine=EngineMemory(sleep_level=1))
    offered = checkpointing_options(shape, run, 80 * GIB)
    assert [option.setting for option in offered] == [how.setting(shape.num_layers) for how in ladder(shape.num_layers)]
    for more, less in pairwise(offered):
        assert more.train >= less.train, less.setting
        assert more.time < less.time, less.setting


@pytest.mark.parametrize("size", SHAPES)
def test_with_dropout_keeping_all_takes_more_memory_and_selective_as_much_time_as_recomputing_blocks(size):
    shape, run = SHAPES[size], replace(AUTO, micro_batch_tokens=16384)
    without, dropped = (
        {option.setting: option for option in checkpointing_options(shape, replace(run, dropout=dropout), 80 * GIB)}
        for dropout in (False, True)
    )
    assert dropped["none"].train > 1.2 * without["none"].train
    assert dropped["none"].time == without["none"].time
    assert dropped["selective"].time == dropped["blocks"].time == without["blocks"].time
    assert dropped["selective"].train < without["selective"].train


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("gib", [16, 24, 32, 48, 64, 80, 141])
def test_no_setting_that_fits_trains_faster_than_the_one_that_is_chosen(size, gib):
    shape, card = SHAPES[size], gib * GIB
    result = fitted(shape, AUTO, card)
    chosen = result.run.gradient_checkpointing
    auto = replace(AUTO, engine=result.run.engine)
    offered = {option.setting: option for option in checkpointing_options(shape, auto, card)}
    larger = usual_micro_batch(shape) if result.keeps_cache else offered[chosen].tokens
    assert offered[chosen].tokens <= result.micro_batch_tokens <= larger
    for setting, option in offered.items():
        given_run = fitted(shape, replace(AUTO, gradient_checkpointing=setting), card)
        assert given_run.micro_batch_tokens == option.tokens or given_run.run.engine != result.run.engine
        assert not given_run.why
        if given_run.train <= usable(card):
            assert offered[chosen].time <= option.time
    if all(option.train > usable(card) for option in offered.values()):
        assert chosen == "offload"
    assert str(chosen) in result.why
    assert result.why in result.summary()


def test_the_choice_goes_from_everything_on_a_large_card_to_host_memory_on_a_small_one():
    chosen = [fitted(SHAPES["7B"], AUTO, gib * GIB).run.gradient_checkpointing for gib in (12, 20, 36, 141)]
    assert chosen[0] == "offload"
    assert chosen[-1] == "none"
    assert isinstance(chosen[1], int)
    assert chosen[2] == "selective"


def test_more_recomputed_blocks_than_there_are_cannot_be_planned():
    with pytest.raises(ValueError, match=r"gradient_checkpointing is 29.*0 to 28"):
        fitted(SHAPES["7B"], replace(PAPER, gradient_checkpointing=29), 80 * GIB)


def test_times_are_those_that_were_measured():
    measured = {  # tokens a second of a 7B on an H200: everything recomputed, and everything kept
        4096: (9873, 13070),
        8192: (10562, 13965),
        16384: (10934, 14491),
    }
    kept, recomputed = Recompute(), Recompute(selective=True, blocks=28)
    time = partial(time_per_token, SHAPES["7B"], PAPER)
    unit = 14491 * time(kept, 16384)
    for tokens, speeds in measured.items():
        for how, speed in zip((recomputed, kept), speeds, strict=True):
            assert unit / time(how, tokens) == pytest.approx(speed, rel=0.012)


def test_a_card_that_holds_no_base_cannot_be_helped():
    changes = advice(SHAPES["32B"], PAPER, 8 * GIB)
    assert "still takes" in advice_text(changes, 8 * GIB)


def test_eight_bit_optimizers_are_known_by_name():
    assert state_bytes("bitsandbytes.optim.AdamW8bit") == 2
    assert state_bytes("torch.optim.AdamW") == 8


@pytest.mark.parametrize("size", SHAPES)
def test_short_rows_are_checked_together_in_what_the_engine_needs_anyway(size):
    long, short = (
        plan(SHAPES[size], replace(HALVES, rows=16, completion_tokens=tokens, engine=EngineMemory(kv_cache_bytes=GIB)))
        for tokens in (6144 - 100, 412)
    )
    assert short.run.checked_tokens == long.run.checked_tokens == 6144
    assert replace(HALVES, rows=2).checked_tokens == 2 * 512, "a whole rollout"
    assert short.parts["engine's passes"] == long.parts["engine's passes"]
    assert short.parts["engine's passes"]["rollout"] == short.parts["engine's passes"]["start"]


def test_only_an_engine_that_speculates_needs_more():
    def parts_of(**engine: Any) -> Mapping[str, Mapping[str, int]]:
        return plan(SHAPES["7B"], replace(HALVES, engine=EngineMemory(kv_cache_bytes=GIB, **engine))).parts

    off, on, name = parts_of(), parts_of(speculates=True), "engine's state, CUDA graphs"
    assert parts_of(speculates=False) == off
    assert {part for part in off if off[part] != on[part]} == {name}
    assert all(on[name][moment] > size for moment, size in off[name].items())
    recurrent = config_shape(recurrent_config(3), NVFP4, torch.bfloat16)  # with which vLLM does not speculate
    engines = [EngineMemory(kv_cache_bytes=GIB, speculates=speculates) for speculates in (False, True)]
    without, asked = (plan(recurrent, replace(HALVES, engine=engine)).parts for engine in engines)
    assert without == asked


def test_experts_that_training_replays_are_counted_for_every_token():
    shape = config_shape(tiny_config("qwen3_moe", num_hidden_layers=4), NVFP4, torch.bfloat16)
    assert shape.experts.layers == 3
    run = replace(HALVES, engine=EngineMemory(kv_cache_bytes=2**20))
    without, given = (plan(shape, replace(run, router_replay=replay)) for replay in (False, True))
    added = {name: part for name, part in given.parts.items() if name not in without.parts}
    assert set(added) == {"engine's routes", "routes"}
    tokens, ids = HALVES.rows * HALVES.longest_row, torch.zeros(3, 2, dtype=torch.uint8)
    assert added["routes"] == dict.fromkeys(("teacher", *TRAINING), (tokens + 2 * 1024) * (ids.nbytes + 3))
    slots = 2**20 // kv_token_bytes(shape, 2)
    assert added["engine's routes"] == dict.fromkeys(MOMENTS, (slots + 1) * ids.to(torch.int16).nbytes)
    open_cache = replace(run, router_replay=True, engine=EngineMemory())
    tight = int(given.peak * 1.2)
    assert fitted(shape, open_cache, tight).peak <= usable(tight)
    dense = plan(SHAPES["3B"], replace(run, router_replay=True))
    assert dense.parts == plan(SHAPES["3B"], run).parts
