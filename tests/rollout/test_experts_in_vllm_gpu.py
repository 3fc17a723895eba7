"""A mixture of experts in vLLM on a GPU, by vLLM's own kernels: it samples from the trainer's distribution, and changed
weights of experts and routers are detected although vLLM has rearranged them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_change_is_noticed,
    assert_sampled_by_its_policy,
    random_adapter,
    save_mixture,
    some_prompts,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("experts"),  # one process has the engine
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "head_dim": 64}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder, "qwen3_moe", **SIZES, initializer_range=0.05)
    lora = LoraSettings(rank=6, alpha=12)
    policy = load_policy(str(folder / "nvfp4"), dtype=torch.bfloat16, lora=lora, seed=0, device="cuda")
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=2**28, max_num_seqs=16)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    yield engine
    engine.close()


def test_it_samples_by_its_policy(engine):
    assert_sampled_by_its_policy(engine, some_prompts(1, 40, 70), Sampling(num_completions=2, max_tokens=12))


def flip(weight: Tensor) -> None:
    weight.view(torch.int32).flatten()[7] ^= 1 << 5


def exchange(weight: Tensor) -> None:
    scales = weight.view(torch.uint8)
    scales[[2, 6]] = scales[[6, 2]]


FAULTS: dict[str, tuple[str, Callable[[Tensor], object], str]] = {
    "a code": ("w13_weight", flip, r"layers\.0\.mlp\.experts"),
    "two experts' scales": ("w2_weight_scale", exchange, r"layers\.0\.mlp\.experts"),
    "a row of the router": ("mlp.gate.weight", lambda weight: weight[3].mul_(1.1), r"mlp\.gate\.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_an_expert_or_the_router_stops_the_rollout(engine, fault):
    held = engine.fingerprint()
    assert_change_is_noticed(engine, *FAULTS[fault])
    assert engine.fingerprint() == held


@pytest.mark.parametrize("level", [0, 1])
def test_weights_and_samples_are_the_same_after_a_sleep(engine, level):
    held, prompts, sampling = engine.fingerprint(), some_prompts(3, 20), Sampling(num_completions=1, max_tokens=4)
    engine.sleep_level = level
    engine.sleep()
    engine.wake()
    assert engine.fingerprint() == held
    assert_sampled_by_its_policy(engine, prompts, sampling)
