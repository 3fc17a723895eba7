"""Prompts are checked before any is queued; every end token of a checkpoint counts."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, Qwen2Config

from qerl_pl.rollout.common import check_prompts, end_tokens
from tests.rollout.conftest import END_TOKENS, VOCAB_SIZE


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty"),
        ([0, 10], "prompt 1 holds token 10; expected 0 to 9"),
        ([-3, 9], "prompt 1 holds token -3"),
        ([1] * 7, r"prompt 1 has 7 tokens and max_tokens is 4; .* max_model_len = 10"),
    ],
)
def test_a_bad_prompt_is_named(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompts([[0, 9], prompt], vocab_size=10, max_model_len=10, max_tokens=4)


def test_prompts_up_to_the_limits_pass():
    check_prompts([[0, 9], [1] * 6], vocab_size=10, max_model_len=10, max_tokens=4)
    check_prompts([], vocab_size=10, max_model_len=10)


def test_end_tokens_come_from_config_generation_config_and_tokenizer(checkpoints):
    config = AutoConfig.from_pretrained(checkpoints["dense"])
    assert end_tokens(checkpoints["dense"], config) == sorted(END_TOKENS)
    assert max(END_TOKENS) < VOCAB_SIZE


def test_files_that_are_missing_add_no_end_token(tmp_path):
    assert end_tokens(str(tmp_path), Qwen2Config(eos_token_id=[3, 1])) == [1, 3]
    assert end_tokens(str(tmp_path), Qwen2Config(eos_token_id=None)) == []
