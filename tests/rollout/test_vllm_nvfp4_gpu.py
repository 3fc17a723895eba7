"""An engine on a Hopper GPU has our kernels, and samples from its policy with any number of tokens at a time.

A module of its own: vLLM lets one engine that can sleep live in a process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from qerl_pl.kernels import hopper
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout import vllm_worker
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_sampled_by_its_policy,
    make_policy,
    random_adapter,
    save_dense,
    some_prompts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not hopper.is_available(torch.device("cuda", 0)), reason="needs Hopper"),
]


@pytest.fixture(params=[True, False], ids=["eager", "graphs"])
def engine(request: pytest.FixtureRequest, tmp_path) -> Iterator[VLLMEngine]:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}  # none is padded
    save_dense(tmp_path / "dense", initializer_range=0.05, **sizes)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "nvfp4")
    policy = make_policy(str(tmp_path / "nvfp4"), dtype=torch.bfloat16)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=2**30, max_num_seqs=256, enforce_eager=request.param)
    engine.start(policy.cuda(), max_model_len=MAX_MODEL_LEN, seed=0)
    yield engine
    engine.close()


def test_what_is_sampled_is_what_the_trainer_says(engine):
    assert engine._call(vllm_worker.linear_kernels) == {"nvfp4_decode and HummingNvFp4LinearKernel": 8}
    for copies in (1, 8, 20, 40, 80):  # 3 to 240 tokens at a time
        assert_sampled_by_its_policy(engine, some_prompts(1, 40, 70), Sampling(num_completions=copies, max_tokens=12))
