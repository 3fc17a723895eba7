"""The model card of an export says how the run asked its questions, which a server does not know."""

import json
import re

import pytest
import yaml

from datamodules.messages import chat_of
from qerl_pl.common.types import Problem
from qerl_pl.tools.model_card import prompts


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
