"""Trainer and vLLM on a CPU share one copy of an NVFP4 base, with the linear layers that vLLM uses on Hopper.

This project's CUDA kernels do not run on a CPU, so these layers dequantise their weights in every step, which they do
on Hopper only for steps with more than 2048 tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from qerl_pl.hopper import driver, nvfp4_batch, nvfp4_decode
from qerl_pl.hopper.tile_order import is_in_tile_order
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import worker as vllm_worker
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    out_of_memory,
    random_adapter,
    rewrite,
    some_prompts,
)

one_copy = pytest.importorskip("qerl_pl.hopper.one_copy")
base_weights = pytest.importorskip("qerl_pl.rollout.vllm.base_weights")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(torch.cuda.is_available(), reason="needs vLLM's CPU platform")]
PROMPTS = some_prompts(1, 40, 70)
SAMPLING = Sampling(num_completions=2, max_tokens=6)


@contextmanager
def hoppers_linears(policy: Policy) -> Iterator[None]:
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4

    from qerl_pl.hopper import engine, native_linear
    from qerl_pl.rollout.vllm import cpu, loader

    register = loader.register_loader
    with pytest.MonkeyPatch.context() as patch, ExitStack() as linears:
        patch.setattr(BaseLinearLayerWithLoRA, "_apply_sync", BaseLinearLayerWithLoRA._apply_sync)  # put back
        patch.setattr(driver, "start_compiling", lambda kernels: None)
        linears.enter_context(engine.loading(policy))
        scheme: Any = compressed_tensors_w4a4_nvfp4.CompressedTensorsW4A4Fp4
        patch.setattr(cpu, "NVFP4Scheme", lambda: scheme(use_a16=True))
        patch.setattr(native_linear, "prepare", lambda *shape: None)
        patch.setattr(nvfp4_decode, "choose_schedule", lambda *shape: None)
        patch.setattr(nvfp4_batch, "choose_schedule", lambda *shape, **which: None)
        # Here the engine's own kernels for a CPU add the adapter, to the output of gate and up.
        patch.setattr(one_copy, "move_activations", lambda model: None)
        patch.setattr(
            loader,
            "register_loader",
            lambda shared, unpacked, packed, *_: register(shared, unpacked, packed, one_copy),
        )
        yield


@pytest.fixture(scope="module")
def policy(unpadded) -> Policy:
    policy = make_policy(str(unpadded))
    policy.load_adapter_state(random_adapter(policy, seed=1))
    return policy


@pytest.fixture(scope="module")
def row_order(policy) -> dict[str, torch.Tensor]:
    return {name: linear.dense(torch.bfloat16) for name, linear in policy.packed_linears().items()}


@pytest.fixture(scope="module")
def engine(policy, row_order) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(block_size=32, max_num_seqs=64, kv_cache_bytes=2**20)
    one_copy.put_in_tile_order(policy.packed_linears())
    assert all(is_in_tile_order(linear.packed) for linear in policy.packed_linears().values())
    with hoppers_linears(policy):
        engine.start(policy, max_model_len=MAX_MODEL_LEN)
        yield engine
        engine.close()


@pytest.fixture(autouse=True)
def _check_trainers(engine, policy, row_order) -> Iterator[None]:
    """Check after each test that the trainer's base weights have not changed and have not moved in memory."""
    places = [linear.codes.data_ptr() for linear in policy.packed_linears().values()]
    yield
    assert all(torch.equal(policy.packed_linears()[name].dense(torch.bfloat16), row_order[name]) for name in row_order)
    assert [linear.codes.data_ptr() for linear in policy.packed_linears().values()] == places


def assert_shared(engine: VLLMEngine, policy: Policy) -> None:
    codes = {linear.codes.untyped_storage().data_ptr() for linear in policy.packed_linears().values()}
    parameters = engine._call(lambda worker: dict(worker.get_model().named_parameters()))
    words = [weight for weight in parameters.values() if weight.dtype == torch.int32]
    assert {weight.data_ptr() for weight in words} == codes
    assert len(words) == len(codes) == 8
    assert not [name for name, weight in parameters.items() if weight.dtype == torch.uint8]
    assert engine._call(base_weights.check_rows, policy.packed_linears()) == 8


def test_vllm_computes_with_the_trainers_memory(engine, policy):
    assert_shared(engine, policy)
    assert engine._call(vllm_worker.linear_kernels) == {"NativeLinear": 8}
    assert_sampled_by_its_policy(engine, PROMPTS, SAMPLING)


def test_a_repeated_call_gives_equal_bits_before_and_after_sleep(engine):
    held, samples = engine.fingerprint(), engine.generate(PROMPTS, SAMPLING, 5)
    engine.generate(PROMPTS[1:], SAMPLING, 6)
    assert engine.generate(PROMPTS, SAMPLING, 5) == samples
    engine.sleep()
    engine.wake()
    assert engine.fingerprint() == held
    assert engine.generate(PROMPTS, SAMPLING, 5) == samples


def test_a_base_that_is_overwritten_is_seen(engine, policy):
    codes = policy.packed_linears()["model.layers.1.mlp.up_proj"].codes
    codes[3, 5] ^= 1
    with pytest.raises(RuntimeError, match=r"1 of 8 linears.*gate_up_proj"):
        engine.fingerprint()
    codes[3, 5] ^= 1
    engine.fingerprint()


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.long), True])
def test_closing_and_failed_starts_leave_the_trainers_base_where_it_is(engine, policy, monkeypatch, fails):
    samples = engine.generate(PROMPTS, SAMPLING, 5)
    engine.close()
    if fails:
        with monkeypatch.context() as patch:
            patch.setattr(vllm_worker, "write_adapter", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                engine.start(policy, max_model_len=MAX_MODEL_LEN)
        with pytest.raises(ValueError, match=r"(?i)cache"):
            VLLMEngine(kv_cache_bytes=1024, block_size=8).start(policy, max_model_len=MAX_MODEL_LEN)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert_shared(engine, policy)
    assert engine.generate(PROMPTS, SAMPLING, 5) == samples


@pytest.mark.parametrize("changes", [("weight_packed", "weight_scale"), ("weight_global_scale",)], ids=str)
def test_of_the_trainers_linears_the_engine_reads_the_tensor_scales_alone(engine, unpadded, tmp_path, changes):
    engine.close()
    shutil.copytree(unpadded, tmp_path / "base")
    other = make_policy(str(tmp_path / "base"))
    one_copy.put_in_tile_order(other.packed_linears())
    for name in changes:
        rewrite(
            tmp_path / "base", f"model.layers.1.mlp.up_proj.{name}", lambda values: values.view(torch.uint8).zero_()
        )
    another = VLLMEngine(block_size=32, max_num_seqs=8, kv_cache_bytes=2**20)
    if "weight_global_scale" in changes:
        with pytest.raises(ValueError, match=r"base has changed.*layers\.1\.mlp\.gate_up_proj"):
            another.start(other, max_model_len=MAX_MODEL_LEN)
        return
    another.start(other, max_model_len=MAX_MODEL_LEN)
    assert_shared(another, other)
    assert_sampled_by_its_policy(another, PROMPTS, SAMPLING)
    another.close()
