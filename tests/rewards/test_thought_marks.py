"""Each model family marks the beginning and the end of its thoughts differently, e.g. by <think>. Rewards treat all
these marks alike, even if they are special tokens of the tokenizer."""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.format import check_format_can_be_met, think_answer_format
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.thoughts import assistant_turn, in_one_form, thoughts_of
from qerl_pl.rewards.unmarked import after_thoughts, final_part, own_turn
from qerl_pl.rollout.decode import as_sampled, completion_texts
from qerl_pl.tools.tiny import make_tokenizer

TOKENS = {
    "qwen3": ("<think>", "</think>"),
    "ministral3": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "kimi": ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "sky": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "jais": ("<|think_start|>", "<|think_end|>"),
    "slash": ("<|thinking|>", "</|thinking|>"),
}
# In these families a mark ends a thought only if a thought was begun. Otherwise it means something else: an unused
# token, or the header of an ordinary turn.
ONLY_OPENED = {
    "medgemma": ("<unused94>thought\n", "<unused95>"),
    "granite": ("<|start_of_role|>thinking<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>"),
    "llama": ("<|start_header_id|>thinking<|end_header_id|>\n\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "s1": ("<|im_start|>think\n", "<|im_start|>answer\n"),
    "gemma": ("<start_of_turn>thinking\n", "<start_of_turn>model\n"),
}
SPELT = {
    "thinking": ("<thinking>", "</thinking>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
    "thought": ("<thought>", "</thought>"),
    "case": ("<THINK>", "</Think>"),
    "blanks": ("<think >", "</ think>"),
    "attribute": ('<think budget="4">', "</think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "process": ("<thought_process>", "</thought_process>"),
    "working": ("<start_working_out>", "<end_working_out>"),
    "begin": ("<begin_of_thought>", "<end_of_thought>"),
    "scratch": ("<scratchpad>", "</scratchpad>"),
}
EVERY = {**TOKENS, **ONLY_OPENED, **SPELT}
PROMPT = Prompt((1,), "4", text="<|im_start|>assistant\n")


def score(text: str, prompt: Prompt = PROMPT) -> float | None:
    return NumericAnswer(marker="boxed")([prompt], [Completion((), (), True, text=text)])[0]


@pytest.mark.parametrize("family", EVERY)
def test_an_answer_within_thoughts_does_not_count_and_one_after_them_does(family):
    opens, closes = EVERY[family]
    assert score(f"{opens}is it \\boxed{{4}}? not sure{closes}I cannot say.") == 0
    assert score(f"{opens}perhaps \\boxed{{4}}") == 0, "the completion was cut off within its thoughts"
    assert score(f"{opens}or \\boxed{{5}}?{closes}It is \\boxed{{4}}.") == 1
    assert score(f"it is \\boxed{{4}}{closes}I cannot say.") == (family in ONLY_OPENED)
    assert final_part(f"{opens}4") == ""
    assert final_part(f"{opens}4{closes}5") == after_thoughts(f"{opens}4{closes}5") == "5"
    turn = in_one_form(f"{opens}The answer is 6.\nQuestion: is it?\nNo.{closes}The answer is 5.")
    assert own_turn(turn, "any", stated=True) == turn


@pytest.mark.parametrize("family", EVERY)
def test_thoughts_that_the_prompt_opened_are_thoughts(family):
    opens, closes = EVERY[family]
    prompt = PROMPT._replace(text=f"<|im_start|>assistant\n{opens}\n")
    assert score("perhaps \\boxed{4}", prompt) == 0
    assert score(f"or \\boxed{{5}}?{closes}\\boxed{{4}}", prompt) == 1
    closed = PROMPT._replace(text=f"<|im_start|>assistant\n{opens}\n\n{closes}\n\n")
    assert score("\\boxed{4}", closed) == 1


@pytest.mark.parametrize("family", [*TOKENS, *ONLY_OPENED])
def test_the_format_may_be_written_with_the_familys_tokens(family):
    opens, closes = EVERY[family]
    texts = [
        f"{opens}a{closes}<answer>4</answer>",
        f"{opens}a{closes}b<answer>4</answer>",
        f"{opens}a<answer>4</answer>",
    ]
    for text, expected in zip(texts, (1.0, 0.0, 0.0), strict=True):
        assert think_answer_format([PROMPT], [Completion((), (), True, text=text)]) == [expected]
    assert assistant_turn(PROMPT, Completion((), (), True, text=texts[0])) == "<think>a</think><answer>4</answer>"


@pytest.mark.parametrize("family", SPELT)
def test_tags_of_ordinary_text_reach_rewards_as_they_were_written(family):
    opens, closes = SPELT[family]
    completion = Completion((), (), True, text=f"{opens}a{closes}<answer>4</answer>")
    assert assistant_turn(PROMPT, completion) == completion.text
    assert think_answer_format([PROMPT], [completion]) == [0.0]


def test_marks_of_another_kind_within_thoughts_do_not_end_them():
    nested = "<think>First <reasoning>\\boxed{5}</reasoning> then \\boxed{4}"
    assert score(nested) == 0
    assert score(nested + "</think>") == 0
    assert score(nested + "</think>\\boxed{4}") == 1
    assert score("<think>a</think><reasoning>b</reasoning>\\boxed{4}") == 1
    assert score("<think><think>a</think>\\boxed{4}") == 1, "the template and the model opened them"


UNMARKED = "x < think > y;a[think;<reason;2 < 3 > 1;<thinker>;[reason];<|im_start|>;</no_think>;<|im_start|>assistant\n"


@pytest.mark.parametrize("text", UNMARKED.split(";"))
def test_text_without_marks_is_left_alone(text):
    assert in_one_form(text) == text
    if text != "x < think > y":
        assert thoughts_of(text) == (0, False)


UNITS = "<;< ;[;<|;<|channel|>;<|channel>;\u25c1 ;<a:;<|end|>;<think>;<unused1>;< \n;<a_;<|im_start|> "


@pytest.mark.parametrize("unit", UNITS.split(";"))
def test_marks_are_found_in_linear_time(unit):
    text = unit * (100_000 // len(unit))
    begin = time.process_time()
    thoughts_of(text)
    in_one_form(text)
    assert time.process_time() - begin < 3


ENDS = (
    "<turn|>;<|turn>user\n;<|end_of_role|>;<|im_start|>user\n;<start_of_turn>user\n;[INST];[/INST];<|user|>;<|hy_eos|>"
)
ENDS += (
    ";<|start_header_id|>user<|end_header_id|>;<\uff5cUser\uff5c>;<\uff5chy_User\uff5c>;<|END_OF_TURN_TOKEN|>;<|eot|>"
)
ENDS += ";<|eos|>;<eot>;[EOS];<end_of_utterance>;<|call|>"


@pytest.mark.parametrize("token", ENDS.split(";"))
def test_a_token_that_ends_a_turn_or_begins_another_ends_the_answer(token):
    assert own_turn(f"\\boxed{{5}}{token}\n\\boxed{{4}}", "boxed", stated=False) == "\\boxed{5}"


@pytest.mark.parametrize("token", ["<|begin_of_box|>", "<|end_of_box|>", "<|end_of_solution|>", "<|message|>", "[END]"])
def test_a_token_within_a_turn_ends_nothing(token):
    text = f"It is {token}\\boxed{{4}}"
    assert own_turn(text, "boxed", stated=False) == text


# ---- decoding --------------------------------------------------------------------------------------------------------


def special_tokenizer():
    tokenizer = make_tokenizer()
    marks = [mark for pair in TOKENS.values() for mark in re.findall(r"<[^<>]+>|\S+", "".join(pair)) if mark[0] != "t"]
    tokenizer.add_tokens([*dict.fromkeys(marks), "<think>", "</think>", "</answer>"], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("family", TOKENS)
def test_special_tokens_that_mark_thoughts_reach_rewards(family):
    opens, closes = TOKENS[family]
    tokenizer = special_tokenizer()
    for text, expected in (
        (f"{opens}is it \\boxed{{4}}? not sure{closes}I cannot say.", 0),
        (f"{opens}perhaps \\boxed{{4}}", 0),
        (f"{opens}or \\boxed{{5}}?{closes}It is \\boxed{{4}}.", 1),
    ):
        tokens = tokenizer(text + str(tokenizer.eos_token), add_special_tokens=False).input_ids
        completion = Completion(tuple(tokens), (), True)
        (seen,) = completion_texts(tokenizer, [completion])
        assert seen == text, "a reward sees the marks, and no end token"
        assert NumericAnswer(marker="boxed")([PROMPT], [replace(completion, text=seen)]) == [expected]


def test_what_ended_a_completion_is_left_out_unless_it_is_a_stop_string():
    tokenizer = special_tokenizer()
    tokenizer.add_tokens(["<|eot_id|>"], special_tokens=True)

    def seen(text: str, *, finished: bool = True, stop: tuple[str, ...] = ()) -> str:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        return completion_texts(tokenizer, [Completion(tuple(tokens), (), finished)], stop=stop)[0]

    assert seen("5<|eot_id|>") == "5"
    assert seen("5<|eot_id|>", finished=False) == "5<|eot_id|>"
    assert seen("<answer>5</answer>", stop=("</answer>",)) == "<answer>5</answer>"
    assert seen(f"5{tokenizer.pad_token}{tokenizer.pad_token}") == "5"
    assert seen("") == ""


@pytest.mark.parametrize("stop", [(), ("</answer>",), ("</think>",), ("<answer>",)])
@pytest.mark.parametrize("text", ["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
def test_a_format_that_no_completion_can_have_is_refused_at_the_start(stop, text):
    terms = [WeightedReward("format", think_answer_format, 0.5)]
    written = partial(as_sampled, special_tokenizer(), stop=stop)
    refused = pytest.raises(ValueError, match=r"reward 'format' can only give 0: .*data\.stop")
    with nullcontext() if stop in ((), ("</answer>",)) else refused:
        check_format_can_be_met(terms, [PROMPT._replace(text=text)], written)
