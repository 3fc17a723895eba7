"""A run's memory when it starts (what is refused or reported, and the settings that decide the engine's memory) and
when it ends."""

import json
import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from qerl_pl.memory.advice import plan_for
from qerl_pl.memory.fitting import USUAL_MICRO_BATCH, usable
from qerl_pl.memory.settings import EngineMemory, RunMemory
from qerl_pl.memory.shape import config_shape
from qerl_pl.module import QeRLModule
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from tests.random_models import model_config

GIB = 2**30
SHAPE = config_shape(model_config("7B"), NVFP4, torch.bfloat16)
RUN = RunMemory(rows=128, prompt_tokens=256, completion_tokens=4096, gradient_checkpointing=True, engine=EngineMemory())


def test_a_run_that_fits_starts_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_for(SHAPE, RUN, 80 * GIB).peak <= usable(80 * GIB)


def test_a_run_that_cannot_sample_one_sequence_is_refused_with_what_to_change():
    with pytest.raises(ValueError, match=r"rollouts take 1\d\.\d GiB.*more than 11\.5.*sleep_level: 1,"):
        plan_for(SHAPE, RUN, 12 * GIB)


def test_training_that_may_not_fit_is_told_and_tried():
    large = RunMemory(rows=8, prompt_tokens=256, completion_tokens=2048, micro_batch_tokens=16384)
    with pytest.warns(RuntimeWarning, match=r"training .* GiB, more than.*model.micro_batch_tokens: \d+"):
        plan = plan_for(SHAPE, large, 40 * GIB)
    assert plan.micro_batch_tokens == 16384


def test_an_engine_tells_what_its_memory_depends_on():
    engine = VLLMEngine(dtype="float32", max_num_seqs=7, kv_cache_dtype="fp8", sleep_level=1, enforce_eager=True)
    assert engine.memory == EngineMemory(
        dtype="float32", max_num_seqs=7, kv_cache_dtype="fp8", sleep_level=1, enforce_eager=True
    )
    engine.kv_cache_bytes = 5
    assert engine.memory.kv_cache_bytes == 5


def module_of(bases, **settings: Any) -> QeRLModule:
    """Make the LightningModule of a run that samples with transformers. Its ``setup``, which loads the model, has not
    been called."""
    rewards = [WeightedReward("format", think_answer_format)]
    return QeRLModule(TransformersEngine(), rewards, base=str(bases["dense"]), **settings)


@pytest.mark.parametrize(("longest", "expected"), [(100, USUAL_MICRO_BATCH), (20000, 20064)])
def test_micro_batches_without_a_plan_are_the_usual_or_hold_the_longest_row(longest, expected, bases, tmp_path):
    base = shutil.copytree(bases["dense"], tmp_path / "long")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}))
    sampling = Sampling(num_completions=2, max_tokens=longest)
    module = module_of({"dense": base}, sampling=sampling, max_prompt_tokens=64)
    assert module.micro_batch_tokens == expected


def test_rows_longer_than_the_models_positions_are_refused(bases):
    with pytest.raises(ValueError, match=r"may reach 20064 tokens and the model has \d+ positions"):
        module_of(bases, sampling=Sampling(num_completions=2, max_tokens=20000), max_prompt_tokens=64)


def test_rows_in_which_longrope_would_change_its_factors_are_refused(bases, tmp_path):
    base = shutil.copytree(bases["dense"], tmp_path / "longrope")
    config = json.loads((base / "config.json").read_text())
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 96, **factors}
    (base / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    short, long = (Sampling(num_completions=2, max_tokens=number) for number in (32, 33))
    module_of({"dense": base}, sampling=short, max_prompt_tokens=64)
    with pytest.raises(ValueError, match="may reach 97 tokens; expected at most 96"):
        module_of({"dense": base}, sampling=long, max_prompt_tokens=64)
    with pytest.raises(ValueError, match="may reach 97 tokens; expected at most 96"):
        module_of({"dense": base}, sampling=short, val_sampling=long, max_prompt_tokens=64)


@pytest.mark.parametrize("gib", [0.0, -1.0])
def test_a_limit_of_no_memory_is_refused(gib, bases):
    with pytest.raises(ValueError, match="gpu_memory"):
        module_of(bases, gpu_memory=gib)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_checkpointing": 99},
        {"gradient_checkpointing": -1},
    ],
    ids=str,
)
def test_what_cannot_be_recomputed_is_refused_before_anything_is_loaded(wrong, bases):
    with pytest.raises(ValueError, match=r"model\.gradient_checkpointing"):
        module_of(bases, **wrong)


def test_the_frozen_base_is_not_copied_to_the_host_when_a_run_ends(bases):
    module = module_of(bases, max_prompt_tokens=64)
    base, adapter = nn.Linear(4, 4, device="meta").requires_grad_(False), nn.Linear(4, 4)
    base.register_buffer("scales", torch.ones(4, device="meta"))
    module.policy = nn.Sequential(base, adapter)  # pyright: ignore[reportAttributeAccessIssue]
    adapter.weight.grad = torch.ones(4, 4)
    assert module.cpu() is module, "of a tensor on meta there can be no copy"
    assert {tensor.device.type for tensor in (base.weight, base.scales)} == {"meta"}
    assert {tensor.device.type for tensor in (adapter.weight, adapter.weight.grad)} == {"cpu"}
