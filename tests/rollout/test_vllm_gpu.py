"""Tests of the vLLM engine that need a GPU. All but the last one share one engine, because an engine takes long to
start."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from qerl_pl.hopper import driver
from qerl_pl.memory.retry import MicroBatchBudget
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import memory as vllm_memory
from qerl_pl.rollout.vllm import worker as vllm_worker
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    random_adapter,
    some_prompts,
)
from tests.rollout.leaks import held_in_vllms_pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm_gpu"),  # one process has the engine
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CACHE_BYTES = 2**30
PROMPTS = some_prompts(1, 40, 70)
SAMPLING = Sampling(num_completions=2, max_tokens=12)


needs_hopper = pytest.mark.skipif(not driver.is_available(torch.device("cuda", 0)), reason="needs Hopper")


@pytest.fixture(scope="module")
def engine(unpadded) -> Iterator[VLLMEngine]:
    policy = make_policy(str(unpadded), dtype=torch.bfloat16)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=CACHE_BYTES, max_num_seqs=256)
    engine.start(policy.cuda(), max_model_len=MAX_MODEL_LEN)
    yield engine
    engine.close()


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.alone
@pytest.mark.parametrize("level", [0, 1])
def test_sleep_gives_memory_back_and_waking_gives_the_same_policy(engine, level):
    engine.sleep_level = level
    engine.set_norm_noise(NormNoise(0.05, 3))
    held, samples = engine.fingerprint(), engine.generate(PROMPTS, SAMPLING, 5)
    awake = used()
    engine.sleep()
    assert awake - used() >= 0.95 * CACHE_BYTES
    assert vllm_memory.given_back() >= 0.95 * CACHE_BYTES
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(PROMPTS, SAMPLING, 5)
    engine.wake()
    assert vllm_memory.given_back() == 0
    assert engine.fingerprint() == held
    assert engine.generate(PROMPTS, SAMPLING, 5) == samples
    assert abs(used() - awake) < 2**26


@pytest.mark.alone
def test_a_kept_cache_stays_allocated_while_the_engine_sleeps_until_the_trainer_needs_memory(engine):
    engine.sleep_level = 0
    engine.plan_memory(replace(engine.memory, keeps_cache=True))
    try:
        samples, awake = engine.generate(PROMPTS, SAMPLING, 5), used()
        engine.sleep()
        assert abs(used() - awake) < 2**26
        assert vllm_memory.given_back() == 0
        with pytest.raises(RuntimeError, match="asleep"):
            engine.generate(PROMPTS, SAMPLING, 5)
        engine.wake()
        assert engine.generate(PROMPTS, SAMPLING, 5) == samples
        engine.sleep()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()

        def work(tokens: int) -> int:
            torch.empty(free + CACHE_BYTES // 2, dtype=torch.uint8, device="cuda")
            return tokens

        with pytest.warns(RuntimeWarning, match="KV cache"):
            assert MicroBatchBudget(16).run(work, longest=1, free_cache=engine.free_cache) == 16
        assert awake - used() >= 0.95 * CACHE_BYTES
        engine.wake()
        assert engine.generate(PROMPTS, SAMPLING, 5) == samples
        engine.sleep()
        assert vllm_memory.given_back() >= 0.95 * CACHE_BYTES
        assert not engine.free_cache()
        engine.wake()
    finally:
        engine.plan_memory(engine.memory)


def test_an_engine_sleeps_beside_a_process_that_takes_and_frees_memory(engine):
    other = subprocess.Popen([sys.executable, "-m", "tests.memory_hog"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"started\n"
        samples = engine.generate(PROMPTS, SAMPLING, 5)
        for _ in range(30):
            engine.sleep()
            assert vllm_memory.given_back() >= 0.95 * CACHE_BYTES
            engine.wake()
        assert engine.generate(PROMPTS, SAMPLING, 5) == samples
    finally:
        other.kill()
        other.wait()


@pytest.mark.alone
def test_a_hundred_nights_leave_no_memory_behind(engine):
    engine.sleep_level = 0
    engine.generate(PROMPTS, SAMPLING, 0)
    engine.sleep()
    before = used()
    for night in range(100):
        engine.wake()
        engine.generate(PROMPTS, SAMPLING, night)
        engine.sleep()
    assert used() - before < 2**26
    engine.wake()


def test_embeddings_and_head_exist_once(engine):
    parameters = engine._call(lambda worker: dict(worker.get_model().named_parameters()))
    for name, weight in engine._policy.embedding_weights().items():
        assert parameters[name].data_ptr() == weight.data_ptr()


def assert_any_number_of_tokens_is_sampled_by_the_policy(engine: VLLMEngine) -> None:
    engine.set_norm_noise(NormNoise())
    for copies in (1, 8, 20, 40, 80):  # 3 to 240 tokens at a time
        assert_sampled_by_its_policy(engine, PROMPTS, Sampling(num_completions=copies, max_tokens=12))


def test_what_is_sampled_is_what_the_trainer_says(engine):
    assert_any_number_of_tokens_is_sampled_by_the_policy(engine)


@torch.no_grad()
def test_noise_below_the_spacing_of_bf16_acts(engine):
    """Noise smaller than the distance of neighbouring bf16 values changes vLLM's norms, because the engine keeps them
    in fp32. With large noise, the engine's scores change as much as those of a transformers engine, which is the
    reference."""
    clean = {name: weight.float() for name, weight in engine._policy.norm_weights().items()}
    assert engine.set_norm_noise(NormNoise(5e-4, 3)) == len(clean)
    noise = [weight - clean[name] for name, weight in engine._call(vllm_worker.live_norms).items()]
    assert torch.cat(noise).square().mean().sqrt().item() == pytest.approx(5e-4, rel=0.05)
    oracle = TransformersEngine()
    oracle.start(engine._policy, max_model_len=MAX_MODEL_LEN)
    found = {}
    for sigma in (0.0, 0.5):
        for one in (engine, oracle):
            one.set_norm_noise(NormNoise(sigma, 3))
        found[sigma] = [torch.tensor(one.score([PROMPTS[-1]])[0]) for one in (engine, oracle)]
        assert (found[sigma][0] - found[sigma][1]).abs().mean() < 0.1
    assert (found[0.5][0] - found[0.0][0]).abs().mean() > 0.1
    engine.set_norm_noise(NormNoise())


@torch.no_grad()
def test_logits_are_not_rounded(engine):
    head = engine._policy.causal_lm.get_output_embeddings().weight
    hidden = torch.randn(5, head.shape[1], device="cuda").bfloat16()
    logits = engine._call(lambda worker: worker.get_model().compute_logits(hidden))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (hidden.double() @ head.double().T).float(), rtol=1e-5, atol=1e-4)


@needs_hopper
def test_linears_have_our_kernels_on_hopper(engine):
    assert engine._call(vllm_worker.linear_kernels) == {"NativeLinear": 8}


STARTED = """
import sys
import torch
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy

engine = VLLMEngine(kv_cache_bytes=2**30, max_num_seqs=256)
engine.start(make_policy(sys.argv[1], dtype=torch.bfloat16).cuda(), max_model_len=MAX_MODEL_LEN)
engine.close()
"""


@pytest.mark.slow
def test_a_second_start_takes_the_graph_that_the_first_compiled(engine, unpadded):
    more = {"VLLM_FORCE_AOT_LOAD": "1"}  # a graph that cannot be loaded is an error
    more["PYTHONPATH"] = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", STARTED, str(unpadded)], env={**os.environ, **more}, check=True)


def test_an_engine_that_was_closed_leaves_room_for_another_one(engine):
    policy = engine._policy
    engine.close()
    left, holders = vllm_memory.left(), held_in_vllms_pool()
    another = VLLMEngine(kv_cache_bytes=CACHE_BYTES, max_num_seqs=256, enforce_eager=True)
    another.start(policy, max_model_len=MAX_MODEL_LEN)
    assert_any_number_of_tokens_is_sampled_by_the_policy(another)
    another.close()
    assert not left, holders
    assert not vllm_memory.left(), held_in_vllms_pool()
