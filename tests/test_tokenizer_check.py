"""Tokenizers and chat templates with which training would be meaningless are refused."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from datamodules.arithmetic import Arithmetic
from datamodules.prompts import PromptDataModule
from qerl_pl.base.folder import base_folder, check_base
from qerl_pl.base.prepared import prepared_base
from qerl_pl.model.tokenizer import (
    check_chat_template,
    check_same_vocabulary,
    check_text_survives,
    load_tokenizer,
    read_tokenizer,
    render,
)
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.common import end_tokens
from qerl_pl.tools.tiny import CHAT_TEMPLATE, VOCAB_SIZE, make_tiny, make_tokenizer
from tests.quant.published import edit_config

CONFIG = {"vocab_size": VOCAB_SIZE}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "base", sft_steps=0)
    return tmp_path / "base"


def test_a_whole_base_is_taken(base):
    assert check_base(base)["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer.json", "{", "the tokenizer cannot be read"),
        ("tokenizer.json", "{}", "the tokenizer cannot be read"),
        ("tokenizer.json", "", "the tokenizer cannot be read"),
        ("tokenizer_config.json", "[]", "the tokenizer cannot be read"),
    ],
)
def test_a_base_without_a_usable_tokenizer_is_refused(base, file, text, message):
    if text is None:
        (base / file).unlink()
    else:
        (base / file).write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        check_base(base)
    assert "\n" not in str(refused.value)


def test_a_base_in_the_home_folder_may_be_written_with_a_tilde(base, monkeypatch):
    monkeypatch.setenv("HOME", str(base.parent))
    assert base_folder("~/base", None) == prepared_base("~/base") == str(base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initializer_range": "x"}, r"config\.json describes no model .*initializer_range"),
        ({"vocab_size": 260}, r"token 26\d and config\.json says vocab_size 260"),
    ],
)
def test_a_config_that_does_not_fit_the_tokenizer_or_transformers_is_named(base, change, message):
    edit_config(base, **change)
    with pytest.raises(ValueError, match=message):
        check_base(base)


def test_text_that_does_not_come_back_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\(2 tokens\) loses text"):
        check_text_survives(load_tokenizer(tmp_path, CONFIG), tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
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
def test_a_chat_template_that_does_not_ask_the_question_is_refused(template, message):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message) as refused:
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


def test_a_system_prompt_that_only_switches_thoughts_is_accepted():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('/no_think', '')")
    assert tokenizer.chat_template != CHAT_TEMPLATE
    check_chat_template(tokenizer, system_prompt="/no_think")


ASKED = "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %}"


@pytest.mark.parametrize(
    ("template", "right"),
    [
        (ASKED + " {{ message.content }}</s>{% endif %}{% endfor %}", True),  # Mistral's
        (ASKED + "[A]{{ message.content }}{% endif %}{% endfor %}", False),
        (CHAT_TEMPLATE.replace("add_generation_prompt", "false"), False),
    ],
)
def test_a_generation_prompt_is_needed_only_where_something_comes_before_an_answer(template, right):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with nullcontext() if right else pytest.raises(ValueError, match="has no generation prompt"):
        check_chat_template(tokenizer)


# ---- added tokens above the embedding --------------------------------------------------------------------------------


@pytest.fixture
def with_added(base: Path) -> Path:
    """Folder of a base whose tokenizer has two tokens with numbers from vocab_size on, for which the model has no
    embedding. config.json names one as the padding token and the other as an end token."""
    config = json.loads((base / "config.json").read_text())
    tokenizer = read_tokenizer(base)
    size = config["vocab_size"]
    tokenizer.add_tokens([f"<unused{number}>" for number in range(size - len(tokenizer))])
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": "<|PAD_TOKEN|>"})
    assert tokenizer.pad_token_id == size + 1
    tokenizer.save_pretrained(base)
    config |= {"pad_token_id": size + 1, "eos_token_id": [config["eos_token_id"], size]}
    (base / "config.json").write_text(json.dumps(config))
    return base


def test_added_tokens_may_have_no_embedding(with_added):
    config = check_base(with_added)
    model = load_base(with_added, dtype=torch.float32, device="cpu")
    assert model.get_input_embeddings().num_embeddings == config["vocab_size"]
    assert max(end_tokens(str(with_added), model.config)) < config["vocab_size"], "the model has no such logit"


def test_a_prompt_with_a_token_without_embedding_is_refused_before_the_model_is_loaded(with_added):
    settings = {"batch_size": 1, "source": Arithmetic(num_train=4, num_validation=2)}
    PromptDataModule(tokenizer=str(with_added), **settings).setup("fit")
    data = PromptDataModule(tokenizer=str(with_added), system_prompt="See <image_soft_token>", **settings)
    with pytest.raises(ValueError, match=r"validation prompt of .* holds token \d+, '<image_soft_token>', for which"):
        data.setup("fit")


# ---- where chat templates are stored ---------------------------------------------------------------------------------


SEVERAL = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "{{ own }}"}]


def as_folder(base: Path, name: str = "chat_templates") -> None:
    (base / name).mkdir()
    for entry in SEVERAL:
        (base / name / f"{entry['name']}.jinja").write_text(entry["template"])


def as_setting(base: Path, file: str, template: object) -> None:
    settings = json.loads((base / file).read_text()) if (base / file).exists() else {}
    (base / file).write_text(json.dumps({**settings, "chat_template": template}))


PLACES = {
    "chat_template.json": lambda base: as_setting(base, "chat_template.json", CHAT_TEMPLATE),
    "several in chat_template.json": lambda base: as_setting(base, "chat_template.json", SEVERAL),
    "processor_config.json": lambda base: as_setting(base, "processor_config.json", CHAT_TEMPLATE),
    "several in tokenizer_config.json": lambda base: as_setting(base, "tokenizer_config.json", SEVERAL),
    "chat_templates": as_folder,
    "the folder of transformers": lambda base: as_folder(base, CHAT_TEMPLATE_DIR),
}


def question(folder: Path) -> str:
    return render(read_tokenizer(folder), [{"role": "user", "content": "hi"}], date=None)


@pytest.mark.parametrize("place", PLACES)
def test_a_chat_template_is_found_wherever_loaders_look_for_it_also_in_a_quantised_copy(base, tmp_path, place):
    expected = question(base)
    (base / "chat_template.jinja").unlink()
    PLACES[place](base)
    quantize_checkpoint(base, tmp_path / "packed", format="nf4")
    for folder in (base, tmp_path / "packed"):
        assert question(folder) == expected
        check_chat_template(read_tokenizer(folder))
        with pytest.raises(ValueError, match=r"\['own'\], which the chat template"):
            check_chat_template(read_tokenizer(folder), arguments={"own": 1})  # only another template reads it


def test_templates_of_which_none_is_the_default_are_named_and_a_single_one_is_taken_whatever_its_name(base):
    expected = question(base)
    (base / "chat_template.jinja").unlink()
    as_folder(base)
    (base / "chat_templates" / "default.jinja").rename(base / "chat_templates" / "rag.jinja")
    with pytest.raises(ValueError, match=r"chat templates rag, tool_use, and none .*chat_template\.jinja"):
        check_chat_template(read_tokenizer(base))
    (base / "chat_templates" / "tool_use.jinja").unlink()
    check_chat_template(read_tokenizer(base))
    assert question(base) == expected


def test_a_damaged_chat_template_json_is_named(base):
    (base / "chat_template.jinja").unlink()
    (base / "chat_template.json").write_text("{")
    with pytest.raises(ValueError, match=r"chat_template\.json is not JSON"):
        check_base(base)


def test_a_teacher_may_have_more_tokens_and_must_know_those_of_the_policy():
    policy, teacher = make_tokenizer(), make_tokenizer()
    check_same_vocabulary(policy, teacher, base="models/teacher")
    teacher.add_tokens(["<tool>"])
    check_same_vocabulary(policy, teacher, base="models/teacher")
    with pytest.raises(ValueError, match=r"models/teacher.*is '<tool>', which does not exist there, and 0 more differ"):
        check_same_vocabulary(teacher, policy, base="models/teacher")
    policy.add_tokens(["<call>", "<tool>"])
    with pytest.raises(ValueError, match=r"'<call>', which does not exist there, and 1 more differ"):
        check_same_vocabulary(policy, teacher, base="models/teacher")


def test_ids_that_a_gguf_file_names_because_its_embeddings_are_padded_need_no_match():
    policy, teacher = make_tokenizer(), make_tokenizer()
    unused = len(policy)
    policy.add_tokens([f"[PAD{unused}]", f"[PAD{unused + 1}]"])
    check_same_vocabulary(policy, teacher, base="models/teacher")
    teacher.add_tokens(["<tool>"])
    check_same_vocabulary(policy, teacher, base="models/teacher")
    policy.add_tokens(["[PAD7]"])  # a token of its own, whose name is not that of its id
    with pytest.raises(ValueError, match=r"'\[PAD7\]', which does not exist there, and 0 more differ"):
        check_same_vocabulary(policy, teacher, base="models/teacher")


def test_a_file_in_place_of_a_folder_is_refused_with_what_makes_a_folder_of_it(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model\.gguf is a file; expected a checkpoint's folder .*prepared_base"):
        read_tokenizer(file)
