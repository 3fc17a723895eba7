"""What the vLLM engine does on a GPU alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    random_adapter,
    some_prompts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CACHE_BYTES = 2**30
PROMPTS = some_prompts(1, 40, 70)
SAMPLING = Sampling(num_completions=2, max_tokens=12)


@pytest.fixture(scope="module")
def engine(checkpoints):
    policy = make_policy(checkpoints["nvfp4"], dtype=torch.bfloat16)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    policy.cuda()
    engine = VLLMEngine(kv_cache_bytes=CACHE_BYTES, max_num_seqs=64)
    engine.start(policy, max_model_len=MAX_MODEL_LEN, seed=0)
    yield engine
    engine.close()


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("level", [0, 1])
def test_sleep_gives_memory_back_and_waking_gives_the_same_policy(engine, level):
    engine.sleep_level = level
    engine.set_norm_noise(0.05, 3)
    held, samples = engine.fingerprint(), engine.generate(PROMPTS, SAMPLING, 5)
    awake = used()
    engine.sleep()
    assert awake - used() >= 0.95 * CACHE_BYTES
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(PROMPTS, SAMPLING, 5)
    engine.wake()
    assert engine.fingerprint() == held
    assert engine.generate(PROMPTS, SAMPLING, 5) == samples
    assert abs(used() - awake) < 2**26


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


def test_what_is_sampled_is_what_the_trainer_says(engine):
    engine.set_norm_noise(0.0, 0)
    assert_sampled_by_its_policy(engine, PROMPTS, SAMPLING)


STARTED = """
import sys
import torch
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy

engine = VLLMEngine(kv_cache_bytes=2**30, max_num_seqs=8)
engine.start(make_policy(sys.argv[1], dtype=torch.bfloat16).cuda(), max_model_len=MAX_MODEL_LEN, seed=0)
engine.close()
"""


@pytest.mark.slow
def test_a_second_start_takes_the_graph_that_the_first_compiled(checkpoints, tmp_path):
    folders = {"VLLM_CACHE_ROOT": str(tmp_path), "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    for more in ({}, {"VLLM_FORCE_AOT_LOAD": "1"}):  # where it is set, a graph that cannot be loaded is an error
        command = [sys.executable, "-c", STARTED, str(checkpoints["nvfp4"])]
        subprocess.run(command, env={**os.environ, **folders, **more}, check=True)
