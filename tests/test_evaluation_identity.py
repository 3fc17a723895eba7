"""What a kept evaluation is found by: engine, rewards, end tokens, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from qerl_pl.evaluation.cache import open_cache
from qerl_pl.module import QeRLModule
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rewards.base import Reward, WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.tools.tiny import make_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("identity") / "tiny"
    make_tiny(folder, seed=0, sft_steps=0)
    return folder


def module_of(base: Path, engine: RolloutEngine | None = None, reward: Reward = think_answer_format) -> QeRLModule:
    lora, rewards = LoraSettings(2), [WeightedReward("it", reward)]
    module = QeRLModule(engine or TransformersEngine(), rewards, base=str(base), lora=lora, dtype="float32")
    module.policy = load_policy(str(base), dtype=torch.float32, lora=lora, seed=0)
    return module


def identity(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """As JSON has it, because it is kept under a digest of that."""
    return json.loads(json.dumps(module_of(*args, **kwargs)._evaluation_identity()))


def test_engines_and_rewards_with_other_settings_find_nothing_of_each_other(base):
    engines = [VLLMEngine(), VLLMEngine("bfloat16"), VLLMEngine(kv_cache_dtype="fp8"), TransformersEngine()]
    found = [identity(base, engine) for engine in engines]
    found += [identity(base, reward=NumericAnswer(marker)) for marker in ("answer", "boxed")]
    assert all(one != other for index, one in enumerate(found) for other in found[:index])
    assert identity(base, VLLMEngine()) == found[0]


def test_the_cache_that_a_memory_plan_chose_and_a_started_engine_change_nothing(base):
    planned = module_of(base, VLLMEngine())
    planned.engine.plan_cache(12345)
    assert json.loads(json.dumps(planned._evaluation_identity())) == identity(base, VLLMEngine())
    started = module_of(base)
    before = started._evaluation_identity()
    started.engine.start(started.policy, max_model_len=16)
    assert started._evaluation_identity() == before


@pytest.mark.parametrize(
    ("name", "change"),
    [("generation_config.json", {"eos_token_id": [5, 7]}), ("tokenizer_config.json", {"chat_template": "other"})],
)
def test_other_end_tokens_or_another_tokenizer_find_nothing(name, change, base, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    assert identity(other) == identity(base), "a copy elsewhere is the same base"
    path = other / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    assert identity(other) != identity(base)


def test_an_evaluation_with_a_reward_that_cannot_be_described_is_not_kept_and_says_so(base, tmp_path):
    module = module_of(base, reward=lambda prompts, completions: [0.0 for _ in prompts])
    module.trainer = Trainer(default_root_dir=tmp_path, logger=False, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="starts anew if it is interrupted.*lambda"):
        assert open_cache(tmp_path, module._evaluation_identity()) is None
