"""Trainer and engine share one copy of an NVFP4 base on Hopper, and the engine never frees or moves this memory, which
belongs to the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qerl_pl.hopper import driver
from qerl_pl.memory.retry import MicroBatchBudget
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import memory as vllm_memory
from qerl_pl.rollout.vllm import worker as vllm_worker
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    out_of_memory,
    random_adapter,
    some_prompts,
)
from tests.rollout.leaks import held_in_vllms_pool, is_inside

base_weights = pytest.importorskip("qerl_pl.rollout.vllm.base_weights")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("one_copy"),  # one process has the engine
    pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper"),
]
PROMPTS = some_prompts(1, 40, 70)
SAMPLING = Sampling(num_completions=2, max_tokens=12)


@pytest.fixture(scope="module")
def engine(unpadded) -> Iterator[VLLMEngine]:
    policy = make_policy(str(unpadded), dtype=torch.bfloat16).cuda()
    policy.load_adapter_state(random_adapter(policy, seed=1))
    row_order = {name: linear.dense(torch.bfloat16) for name, linear in policy.packed_linears().items()}
    engine = VLLMEngine(kv_cache_bytes=2**30, max_num_seqs=64, enforce_eager=True)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert_unchanged(engine, row_order)
    yield engine
    engine.close()
    assert not vllm_memory.left(), held_in_vllms_pool()
    assert_unchanged(engine, row_order, policy)


def assert_unchanged(engine: VLLMEngine, row_order: dict[str, torch.Tensor], policy=None) -> None:
    linears = (policy or engine._policy).packed_linears()
    assert all(torch.equal(linears[name].dense(torch.bfloat16), dense) for name, dense in row_order.items())


def test_vllm_computes_with_the_trainers_memory(engine):
    codes = {linear.codes.untyped_storage().data_ptr() for linear in engine._policy.packed_linears().values()}
    parameters = engine._call(lambda worker: dict(worker.get_model().named_parameters()))
    words = [weight for weight in parameters.values() if weight.dtype == torch.int32]
    assert {weight.data_ptr() for weight in words} == codes
    assert len(words) == len(codes) == 8
    assert engine._call(base_weights.check_rows, engine._policy.packed_linears()) == 8
    assert not any(is_inside(weight) for weight in words)


@pytest.mark.parametrize("level", [0, 1])
def test_the_trainer_computes_the_same_while_the_engine_sleeps(engine, level):
    engine.sleep_level = level
    dense = {name: linear.dense(torch.bfloat16) for name, linear in engine._policy.packed_linears().items()}
    held = engine.fingerprint()
    engine.sleep()
    assert_unchanged(engine, dense)
    engine.wake()
    assert engine.fingerprint() == held
    assert_unchanged(engine, dense)


def test_a_closed_engine_and_a_start_that_fails_leave_the_trainers_base_alone(engine):
    policy = engine._policy
    dense = {name: linear.dense(torch.bfloat16) for name, linear in policy.packed_linears().items()}
    engine.close()
    assert not vllm_memory.left(), held_in_vllms_pool()
    assert_unchanged(engine, dense, policy)
    with pytest.raises(ValueError, match=r"(?i)cache"):
        VLLMEngine(kv_cache_bytes=1024, enforce_eager=True).start(policy, max_model_len=MAX_MODEL_LEN)
    assert_unchanged(engine, dense, policy)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert engine._call(base_weights.check_rows, policy.packed_linears()) == 8
    assert_sampled_by_its_policy(engine, PROMPTS, SAMPLING)


def test_a_start_that_fails_after_the_base_was_adopted_leaves_nothing_behind(engine, monkeypatch):
    policy = engine._policy
    dense = {name: linear.dense(torch.bfloat16) for name, linear in policy.packed_linears().items()}
    engine.close()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_worker, "write_adapter", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert not vllm_memory.left(), held_in_vllms_pool()
    assert_unchanged(engine, dense, policy)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert_sampled_by_its_policy(engine, PROMPTS, SAMPLING)


@pytest.mark.parametrize("level", [0, 1])
def test_a_pass_that_runs_out_of_memory_while_the_engine_sleeps_harms_neither_side(engine, level):
    """Before a pass that ran out of memory is repeated, torch gives back all memory that it has cached. Here other
    tensors then overwrite this memory, to show that neither the engine nor the base still uses it."""
    engine.sleep_level = level
    dense = {name: linear.dense(torch.bfloat16) for name, linear in engine._policy.packed_linears().items()}
    held, samples = engine.fingerprint(), engine.generate(PROMPTS, SAMPLING, 5)
    engine.sleep()

    def work(tokens: int) -> int:
        if tokens > 4:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        other = [torch.full((2**22,), -1, dtype=torch.int32, device="cuda") for _ in range(16)]
        assert_unchanged(engine, dense)
        return len(other)

    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert MicroBatchBudget(16).run(work, longest=1) == 16
    engine.wake()
    assert engine.fingerprint() == held
    assert_unchanged(engine, dense)
    assert [len(each) for each in engine.generate(PROMPTS, SAMPLING, 5)] == [len(each) for each in samples]


def test_a_base_that_is_overwritten_is_seen(engine):
    codes = engine._policy.packed_linears()["model.layers.1.mlp.up_proj"].codes
    codes[3, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"1 of 8 linears.*gate_up_proj"):
        engine.fingerprint()
    codes[3, 5] ^= 1
    engine.fingerprint()
