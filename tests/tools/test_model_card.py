"""The model card of an export says by what the policy was trained, and how the run asked its questions, which a server
does not know."""

import json
import re
from collections import defaultdict

import pytest
import yaml

from datamodules.messages import chat_of
from qerl_pl.common.types import Problem
from qerl_pl.tools.merge import CARD as MERGED
from qerl_pl.tools.model_card import CARD, prompts, training


@pytest.mark.parametrize("system", [None, "Think step by step."])
def test_the_messages_in_the_card_are_those_of_training(tmp_path, system):
    data = {"system_prompt": system, "question_template": "Q: {question} {x}"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    blocks = re.findall(r"```json\n(.*?)\n```", prompts(tmp_path), re.DOTALL)
    messages = json.loads(blocks[0].replace("{question}", "1+1=?"))
    problem = Problem(question="1+1=?", answer="2")
    assert messages == chat_of(problem, system_prompt=system, question_template="Q: {question} {x}")


def test_further_variables_of_the_template_and_stop_strings_are_in_the_card(tmp_path):
    data = {"template_arguments": {"enable_thinking": False}, "stop": ["</answer>"]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    assert '`{"enable_thinking": false}`' in prompts(tmp_path)
    assert '`["</answer>"]`' in prompts(tmp_path)


REWARD, LOGGED = {"name": "right", "weight": 1.0}, {"name": "length", "weight": 0.0}
DENSE, LARGER = {"base": "dense", "keep": "auto"}, {"base": "Qwen/Qwen2.5-7B"}


@pytest.mark.parametrize(
    ("model", "method", "tags"),
    [
        ({"rewards": [REWARD, LOGGED]}, "reinforcement learning", "reinforcement-learning"),
        ({"rewards": [REWARD], "teacher": None}, "reinforcement learning", "reinforcement-learning"),
        ({"rewards": [], "teacher": DENSE}, "distillation from the base before it was quantised", "distillation"),
        ({"rewards": [LOGGED], "teacher": LARGER}, "distillation from `Qwen/Qwen2.5-7B`", "distillation"),
        (
            {"rewards": [LOGGED, REWARD], "teacher": LARGER},
            "reinforcement learning and distillation from `Qwen/Qwen2.5-7B`",
            "reinforcement-learning, distillation",
        ),
    ],
)
def test_a_card_says_by_what_the_policy_was_trained(tmp_path, model, method, tags):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert training(tmp_path) == {"method": method, "tags": tags}
    for card in (CARD, MERGED):
        text = card.format_map(defaultdict(str, training(tmp_path), alpha=1))
        assert f"trained with {method} by qerl-pl" in text
        assert set(tags.split(", ")) <= set(yaml.safe_load(text.split("---")[1])["tags"])
