"""The site's page of settings, made from type hints and docstrings, has what YAML may name, in YAML's words."""

import re

import pytest

from docs.reference import settings

OF_PYTHON = ("model.max_unscored_share", "reward")
"""Settings whose meaning speaks of what a Python function returns."""
NAMED = (
    "callbacks.aqn.AdaptiveQuantizationNoise",
    "datamodules.math_sets.big_math",  # a function that makes a source
    "datamodules.table.Table",
    "qerl_pl.rewards.math.MathAnswer",
    "qerl_pl.rollout.vllm.VLLMEngine",
)


@pytest.fixture(scope="module")
def page() -> str:
    return settings()


@pytest.mark.slow
def test_the_page_has_classes_and_functions_that_yaml_may_name(page):
    found = set(re.findall("^`class_path: (.*)`$", page, re.MULTILINE))
    assert set(NAMED) <= found


@pytest.mark.slow
def test_meanings_call_a_setting_without_a_value_null_as_yaml_does(page):
    rows = re.findall(r"^\| `(.*?)` \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) > 150
    said = [name for name, text in rows if re.search(r"\bNone\b", text)]
    assert not [name for name in said if name not in OF_PYTHON and not name.startswith("trainer.")]
    assert "leave it at null" in page  # the other words about the section trainer are Lightning's
