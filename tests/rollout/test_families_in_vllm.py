"""vLLM samples from the trainer's policy with models of every family, with an adapter and with noise on the norms."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_pl.memory.parts import kv_cache
from qerl_pl.memory.shape import config_shape
from qerl_pl.model.layers import num_recurrent_layers
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.base import Sampling
from tests.families import NAMES, WHOLE, WINDOW, tiny_config, with_vision
from tests.rollout.conftest import BLOCK_SIZE, MAX_MODEL_LEN, Setup, save_dense, some_prompts, started_engine

QUICK = ("gemma3_text", "olmo3")  # one with vLLM's own code and one with transformers', both with windows
PROMPTS = some_prompts(2, WINDOW - 8, WINDOW + 20)
GAP = 1e-4  # nats

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.long]) for name in NAMES],
)
def test_vllm_samples_from_the_policy_of_a_family(family: str, tmp_path: Path):
    config = tiny_config(family)
    save_dense(tmp_path / "dense", with_vision(config) if family in WHOLE else config)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "nvfp4")
    policy = load_policy(str(tmp_path / "nvfp4"), dtype=torch.float32, lora=LoraSettings(rank=6, alpha=12), seed=0)
    with started_engine(policy) as setup:
        engine = setup.engine
        assert engine.fingerprint() == setup.expected_fingerprint()
        if num_recurrent_layers(config):
            assert cache_bytes(engine) == kv_cache(
                config_shape(config, None, torch.float32), 4, block=BLOCK_SIZE, length=MAX_MODEL_LEN, num_sequences=1
            )
        assert gap(setup, adapter=False) < GAP
        assert gap(setup) < GAP
        assert engine.set_norm_noise(NormNoise(0.1, 3)) == len(setup.norms)
        assert gap(setup) > 0.01
        with setup.noisy_policy(0.1, 3):
            assert engine.fingerprint() == setup.expected_fingerprint(norms=policy.norm_weights())
            assert gap(setup) < GAP


def cache_bytes(engine: Any) -> int:
    """Compute how many bytes vLLM's cache needs for one sequence of ``MAX_MODEL_LEN`` tokens, together with the one
    block that vLLM reserves for itself."""
    groups = engine._core().engine_core.scheduler.kv_cache_config.kv_cache_groups
    lengths = [group.kv_cache_spec.block_size for group in groups]  # of a state: the longest length
    blocks = sum(ceil(MAX_MODEL_LEN / length) for length in lengths)
    return (blocks + 1) * groups[0].kv_cache_spec.page_size_bytes * max(len(group.layer_names) for group in groups)


def gap(setup: Setup, *, adapter: bool = True) -> float:
    """Return the largest difference, in nats, between the log-probability that vLLM reports for a token it sampled and
    the policy's."""
    return gaps(setup, adapter=adapter).max().item()


def gaps(setup: Setup, *, adapter: bool = True) -> torch.Tensor:
    """Return the difference in nats for each sampled token."""
    groups = setup.engine.generate(PROMPTS, Sampling(2, max_tokens=WINDOW), seed=1, adapter=adapter)
    apart = [
        setup.logprobs(prompt, completion.tokens, adapter=adapter) - torch.tensor(completion.logprobs)
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for completion in group
    ]
    return torch.cat(apart).abs()
