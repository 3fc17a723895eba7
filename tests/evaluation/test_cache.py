"""What a kept evaluation is found by: engine, rewards, end tokens and tokenizer. Descriptions of engine and rewards are
equal in every process for what does the same, different for what does not, refused where unsure."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from qerl_pl.evaluation.cache import Indescribable, describe, described, evaluation_identity, open_cache
from qerl_pl.module import QeRLModule
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rewards.base import Reward, WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.tools.tiny import make_tiny

REWARD = """
def flat(prompts, completions):
    return [{value} for _ in prompts]

class Flat:
    def __call__(self, prompts, completions):
        return [{value} for _ in prompts]
"""
OURS = """
from qerl_pl.evaluation.cache import describe
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import MathAnswer
print(describe([MathAnswer(num_workers=1), think_answer_format, {"b", "a", "c"}]))
"""


class Listed:
    """A reward with a setting of any kind."""

    def __init__(self, setting: Any) -> None:
        self.setting = setting


def imported(path: Path) -> Any:
    """A module read from its file anew, as in a process of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


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


def identity_of(module: QeRLModule) -> dict[str, Any]:
    return evaluation_identity(module.policy, module.settings.evaluation, run=module._identity, built=module.built)


def identity(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """As JSON has it, because it is kept under a digest of that."""
    return json.loads(json.dumps(identity_of(module_of(*args, **kwargs))))


def test_engines_and_rewards_with_other_settings_find_nothing_of_each_other(base):
    engines = [VLLMEngine(), VLLMEngine("bfloat16"), VLLMEngine(kv_cache_dtype="fp8"), TransformersEngine()]
    engines.append(VLLMEngine(max_num_batched_tokens=64))
    found = [identity(base, engine) for engine in engines]
    found += [identity(base, reward=NumericAnswer(marker)) for marker in ("answer", "boxed")]
    assert all(one != other for index, one in enumerate(found) for other in found[:index])
    assert identity(base, VLLMEngine()) == found[0]


def test_the_cache_that_a_memory_plan_chose_and_a_started_engine_change_nothing(base):
    planned = module_of(base, VLLMEngine())
    planned.engine.plan_cache(12345)
    assert json.loads(json.dumps(identity_of(planned))) == identity(base, VLLMEngine())
    started = module_of(base)
    before = identity_of(started)
    started.engine.start(started.policy, max_model_len=16)
    assert identity_of(started) == before


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
        assert open_cache(tmp_path, identity_of(module)) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a"], ["b"]),
        ({"a": [1]}, {"a": [2]}),
        ({"a", "b"}, {"a", "c"}),
        (1, True),
        (Fraction(1, 2), Fraction(1, 3)),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (SimpleNamespace(inner=Listed([0.25])), SimpleNamespace(inner=Listed([0.75]))),
        (MathAnswer(time_limit=1.0), MathAnswer(time_limit=2.0)),
        (WeightedReward("a", think_answer_format), WeightedReward("a", think_answer_format, 0.5)),
        (think_answer_format, describe),
        (Listed(1).__init__, Listed(2).__init__),
    ],
)
def test_a_setting_of_any_kind_shows(one, other):
    assert describe(Listed(one)) == describe(Listed(one)) != describe(Listed(other))


@pytest.mark.parametrize("name", ["flat", "Flat"])
def test_an_edited_reward_is_another_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "edited_reward", None)
    found = []
    for value in ("0.25", "0.75", "0.25"):
        path = tmp_path / "edited_reward.py"
        path.write_text(REWARD.format(value=value))
        reward = getattr(imported(path), name)
        found.append(describe(reward() if name == "Flat" else reward))
    assert found[0] == found[2] != found[1]


def test_our_rewards_are_described_alike_in_every_process():
    environment = {**os.environ, "PYTHONHASHSEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", OURS], env=environment, capture_output=True, text=True, check=True)
    here = describe([MathAnswer(num_workers=1), think_answer_format, {"b", "a", "c"}])
    assert done.stdout == here + "\n"
    assert " at 0x" not in here


@pytest.mark.parametrize(
    "setting",
    [lambda: 1, threading.Lock(), torch.ones(2), sys, (each for each in "a"), type("Local", (), {})()],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_sure_description_is_refused(setting):
    with pytest.raises(Indescribable):
        describe(Listed([{"deep": setting}]))


def test_what_holds_itself_is_refused():
    listed = Listed([])
    listed.setting.append(listed)
    assert "Circular reference" in str(described(listed))
