"""The results of an evaluation are recorded, and used instead of a new evaluation only if settings, source code of
engine and rewards, end tokens and tokenizer are the same."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_pl.evaluation.cache import evaluation_identity
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rewards.base import Reward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine

REWARD = """
import functools

def flat(prompts, completions):
    return [{value} for _ in prompts]

class Flat:
    def __call__(self, prompts, completions):
        return [{value} for _ in prompts]

    @classmethod
    def of_class(cls, prompts, completions):
        return [{value} for _ in prompts]

def scaled(prompts, completions, scale):
    return [scale for _ in prompts]

partly = functools.partial(scaled, scale={value})
bound = Flat().__call__
of_class = Flat.of_class
kept = functools.lru_cache(flat)
"""


def imported(path: Path) -> Any:
    """Import a module from its file again, as a new process would."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def identity(
    base: str | Path, reward: Reward = think_answer_format, built: str = "", engine: Any = None
) -> dict[str, Any]:
    lora, parts = LoraSettings(2), [engine or TransformersEngine(), reward]
    policy = load_policy(str(base), dtype=torch.float32, lora=lora, seed=0)
    return evaluation_identity(policy, Sampling(), run={}, built=built, parts=parts)


def test_other_settings_another_engine_or_another_reward_find_nothing_of_each_other(base):
    found = [identity(base), identity(base, built="other"), identity(base, NumericAnswer())]
    found.append(identity(base, engine=VLLMEngine()))
    assert all(one != other for index, one in enumerate(found) for other in found[:index])
    assert identity(base) == found[0]


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


@pytest.mark.parametrize("name", ["flat", "Flat", "partly", "bound", "of_class", "kept"])
def test_an_edited_reward_is_another_one(name, base, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "edited_reward", None)
    found = []
    for value in ("0.25", "0.75", "0.25"):
        path = tmp_path / "edited_reward.py"
        path.write_text(REWARD.format(value=value))
        reward = getattr(imported(path), name)
        found.append(identity(base, reward() if name == "Flat" else reward))
    assert found[0] == found[2] != found[1]
