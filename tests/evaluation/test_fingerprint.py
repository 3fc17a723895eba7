"""Descriptions: equal in every process for what does the same, different for what does not, refused where unsure."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_pl.evaluation.cache import Indescribable, describe, described
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from qerl_pl.rollout.vllm import VLLMEngine

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


def test_rewards_are_described_by_what_they_do():
    assert describe(NumericAnswer()) == describe(NumericAnswer())
    assert describe(NumericAnswer()) != describe(NumericAnswer(marker="boxed"))
    assert describe(MathAnswer(time_limit=1.0)) != describe(MathAnswer(time_limit=2.0)), "two objects deep"
    assert "think_answer_format" in describe(think_answer_format)
    assert describe(WeightedReward("a", think_answer_format)) != describe(WeightedReward("a", think_answer_format, 0.5))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a"], ["b"]),
        (("a",), ["a"]),
        ({"a": [1]}, {"a": [2]}),
        ({"a", "b"}, {"a", "c"}),
        (1, True),
        (Fraction(1, 2), Fraction(1, 3)),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (SimpleNamespace(inner=Listed([0.25])), SimpleNamespace(inner=Listed([0.75]))),
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


@pytest.mark.parametrize(
    "changed", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"max_num_batched_tokens": 64}], ids=str
)
def test_an_engine_is_described_by_its_settings(changed):
    assert describe(VLLMEngine()) == describe(VLLMEngine()) != describe(VLLMEngine(**changed))


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
    assert "holds itself" in str(described(listed))
