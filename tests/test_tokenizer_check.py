"""Tokenizers and chat templates that would train on nonsense are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_pl.base.folder import check_base
from qerl_pl.base.tokenizer import check_chat_template, check_text_survives, load_tokenizer
from qerl_pl.pretraining.policy import CHAT_TEMPLATE
from qerl_pl.tools.tiny import VOCAB_SIZE, make_tiny, make_tokenizer

CONFIG = {"vocab_size": VOCAB_SIZE}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "base", sft_steps=0)
    return tmp_path / "base"


def test_a_whole_base_is_taken(base):
    assert check_base(base)["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer.json", "{", "the tokenizer cannot be read"),
        ("tokenizer.json", "{}", "the tokenizer cannot be read"),
        ("tokenizer.json", "", "the tokenizer cannot be read"),
        ("tokenizer_config.json", "[]", "the tokenizer cannot be read"),
    ],
)
def test_a_base_without_a_usable_tokenizer_is_refused(base, file, text, said):
    if text is None:
        (base / file).unlink()
    else:
        (base / file).write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        check_base(base)
    assert "\n" not in str(refused.value)


def test_an_embedding_smaller_than_the_tokenizer_is_refused(base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": 260}))
    with pytest.raises(ValueError, match=r"token 26\d and config\.json says vocab_size 260"):
        check_base(base)


def test_text_that_does_not_come_back_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(2 tokens\) loses text"):
        check_text_survives(load_tokenizer(tmp_path, CONFIG), tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        ("hello", "leaves out the question"),
        ("{% if %}", "fails: TemplateSyntaxError"),
        ("{{ messages[7].content }}", "fails: UndefinedError"),
        ("{{ raise_exception('no') }}", "fails: TemplateError: no"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", "has no generation prompt"),
    ],
)
def test_a_chat_template_that_does_not_ask_the_question_is_refused(template, said):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=said) as refused:
        check_chat_template(tokenizer)
    assert "\n" not in str(refused.value)


def test_a_system_prompt_that_the_template_refuses_or_drops_is_told_before_the_data_is_read():
    tokenizer = make_tokenizer()
    check_chat_template(tokenizer, system_prompt="Be brief.")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    tokenizer.chat_template = refusing
    check_chat_template(tokenizer)
    with pytest.raises(ValueError, match=r"fails with a system turn \(data\.system_prompt\): TemplateError: no system"):
        check_chat_template(tokenizer, system_prompt="Be brief.")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("in messages", "in messages if message.role != 'system'")
    with pytest.raises(ValueError, match="leaves out the system turn"):
        check_chat_template(tokenizer, system_prompt="Be brief.")
