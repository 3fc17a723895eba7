"""Engines start, stop and sleep without changing what the trainer uses in the same process."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import RolloutEngine, Sampling
from qerl_pl.rollout.vllm import VLLMEngine, patches
from tests.rollout.conftest import MAX_MODEL_LEN, make_engine, make_policy, some_prompts, started_engine

PROMPTS = some_prompts(1, 40)
SAMPLING = Sampling(num_completions=2, max_tokens=6)


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def started(request: pytest.FixtureRequest, checkpoints: dict[str, str]) -> Iterator[tuple[RolloutEngine, Policy]]:
    with started_engine(make_policy(checkpoints["dense"]), make_engine(request.param)) as setup:
        yield setup.engine, setup.policy


def seed_everything():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def global_state():
    """Return the process's global state that matters to a trainer."""
    draws = (random.random(), np.random.random(), torch.rand(()).item())  # noqa: NPY002
    settings = (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision())
    return draws, settings, torch.get_num_threads(), torch.set_num_threads, torch.is_grad_enabled()


def test_an_engine_without_memory_to_wake_up_stays_asleep():
    tries = iter([torch.OutOfMemoryError("no memory"), None])

    def wake_up() -> None:
        if (error := next(tries)) is not None:
            raise error

    llm: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True), wake_up=wake_up)
    engine = VLLMEngine()
    engine._llm, engine._asleep, engine._freed = llm, True, True
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.set_norm_noise(NormNoise())
    engine.wake()
    assert next(tries, "none is left") == "none is left"
    assert engine._running() is llm


@pytest.mark.vllm
def test_a_kept_cache_is_freed_once_and_then_in_every_sleep(checkpoints, monkeypatch):
    """vLLM cannot free memory on a CPU, so this test records the calls that would."""
    with started_engine(make_policy(checkpoints["dense"])) as setup:
        engine = setup.engine
        assert isinstance(engine, VLLMEngine)
        llm: Any = engine._llm
        calls: list[str] = []
        monkeypatch.setattr(llm.model_config, "enable_sleep_mode", True)
        monkeypatch.setattr(patches, "sleep_beside_other_processes", lambda given_back: nullcontext())
        monkeypatch.setattr(llm, "release_kv_cache_memory", lambda: calls.append("free"))
        wake_up = llm.wake_up
        monkeypatch.setattr(llm, "wake_up", lambda: calls.append("allocate") or wake_up())
        engine.plan_memory(replace(engine.memory, keeps_cache=True))
        before = engine.generate(PROMPTS, SAMPLING, seed=1)
        assert not engine.free_cache(), "while it samples, an engine needs its cache"
        engine.sleep()
        assert calls == []
        assert engine.free_cache()
        assert not engine.free_cache()
        assert calls == ["free"]
        with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
            engine.generate(PROMPTS, SAMPLING, seed=1)
        engine.wake()
        assert engine.generate(PROMPTS, SAMPLING, seed=1) == before
        engine.sleep()
        assert not engine.free_cache(), "nothing is left to free"
        assert calls == ["free", "allocate", "free"]


def test_starting_loads_the_policys_adapter_and_starting_again_changes_nothing(started):
    engine, policy = started
    engine.set_norm_noise(NormNoise(0.1, 5))
    before = engine.generate(PROMPTS, SAMPLING, seed=1)
    engine.start(policy, max_model_len=8)
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == before


def test_close_then_start_gives_the_same_tokens_and_leaves_global_state_alone(started):
    engine, policy = started
    engine.set_norm_noise(NormNoise())
    tokens, fingerprint = engine.generate(PROMPTS, SAMPLING, seed=1), engine.fingerprint()
    engine.set_norm_noise(NormNoise(0.1, 5))
    seed_everything()
    expected = global_state()
    seed_everything()
    engine.close()
    engine.close()
    for call in (lambda: engine.generate(PROMPTS, SAMPLING, seed=1), engine.fingerprint, engine.sleep):
        with pytest.raises(RuntimeError, match="not running: call start"):
            call()
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    assert engine.fingerprint() == fingerprint
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == tokens
    engine.set_norm_noise(NormNoise(0.1, 2))
    engine.score(PROMPTS)
    assert global_state() == expected


def test_an_engine_that_sleeps_says_so_and_wakes_as_it_was(started):
    engine, policy = started
    engine.set_norm_noise(NormNoise(0.1, 5))
    before = engine.generate(PROMPTS, SAMPLING, seed=1)
    engine.sleep()
    engine.sleep()
    assert not engine.free_cache(), "there is no cache that the memory plan has let stay allocated"
    adapter = policy.adapter_state()
    for call in (lambda: engine.generate(PROMPTS, SAMPLING, seed=1), lambda: engine.load_adapter(adapter)):
        with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
            call()
    engine.wake()
    engine.wake()
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == before
