"""Tests of how an answer is found in completions without a mark, such as a box, around it: which part counts as the
answer, and from which point on text is ignored because it goes on with a new question."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.rewards import unmarked
from qerl_pl.rewards.answers import last_hash
from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from qerl_pl.rewards.numbers import last_number
from qerl_pl.rewards.unmarked import answer_alone, final_part, last_math, stated_answer

ANSWERED = ["The answer is 5.", "#### 5", "So \\boxed{5}", "<answer>5</answer>"]


def own_turn(text: str) -> str:
    return unmarked.own_turn(text, "any", stated=True)


@pytest.mark.parametrize("text", ANSWERED)
@pytest.mark.parametrize(
    "next_turn", ["\n\nQ: And 6?\nThe answer is 6.", "\n\nProblem:\n\\boxed{6}", "\nHuman: thanks"]
)
def test_another_question_after_the_answer_ends_the_turn(text, next_turn):
    assert own_turn(text + next_turn).strip() == text


@pytest.mark.parametrize("text", ANSWERED)
@pytest.mark.parametrize("token", ["</s>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>"])
def test_a_special_token_ends_the_turn(text, token):
    assert own_turn(f"{text}{token}\\boxed{{6}}") == text


@pytest.mark.parametrize(
    "text",
    [
        "Question: what is 2 + 3?\nThe answer is 5.",  # the question itself, said again
        "We add.\n\nProblem: there are two.\nThe answer is 5.",  # no answer stands before it
        "<think>The answer is 6.\nQuestion: is it?\nNo.</think>The answer is 5.",
        "The answer is 5. The question: why?",
        "<|begin_of_solution|>The answer is 5.<|end_of_solution|>",
    ],
)
def test_what_belongs_to_the_turn_stays(text):
    assert own_turn(text) == text


def test_the_end_of_the_turn_holds_for_marked_and_unmarked_answers_and_both_ways():
    score = NumericAnswer(marker="any", fallback="last_number")
    for text in ANSWERED:
        verdicts = score.judge(
            [f"{text}\n\nQ: Next?\n{other}" for other in ("#### 6", "The answer is 6.")] * 2, ["5"] * 4
        )
        assert [verdict.score for verdict in verdicts] == [1.0] * 4
        assert score.judge([f"{text}\n\nQ: Next?\n#### 6"], ["6"])[0].score == 0.0


def test_a_question_ends_the_turn_only_after_an_answer_of_the_kind_that_counts():
    text = "The answer is 5. \\boxed{5}\n\nQuestion: sure?\n<answer>5</answer>"
    assert unmarked.own_turn(text, "answer", stated=False) == text
    assert NumericAnswer().judge([text], ["5"])[0].score == 1.0


@pytest.mark.parametrize("guess", ["<answer>3</answer>", "\\boxed{3}", "#### 3", "The answer is 3."])
@pytest.mark.parametrize("heading", ["\nProblem: the total.\n", "Question: the total.\n"])
def test_a_guess_in_the_thoughts_is_not_the_answer_before_the_next_question(guess, heading):
    text = f"<think>maybe {guess}\n</think>{heading}<answer>5</answer>"
    assert own_turn(text) == text
    for marker in ("answer", "any"):
        assert NumericAnswer(marker=marker).judge([text], ["5"])[0].score == 1.0
    assert own_turn(f"{text}\nProblem: another.\n<answer>6</answer>").strip() == text


def test_thoughts_that_were_cut_off_have_no_final_part():
    assert final_part("<think>So $x = 5$. The answer is 5") == ""
    assert final_part("<think>4</think>5") == "5"
    assert final_part("4</think>5") == "5"
    assert NumericAnswer(fallback="last_number").judge(["<think>so 5"], ["5"])[0].score == 0.0


@given(text=st.text(alphabet="answer is:Q$*\\[]()<think/>5\n .", max_size=120))
def test_reading_never_fails(text):
    assert text.startswith(own_turn(text))
    for find in (stated_answer, last_math, answer_alone):
        assert find(text) is None or isinstance(find(text), str)


@pytest.mark.parametrize(
    "unit",
    ["Q:\n", "answer is ", "**", "$x$ and ", "( ", "<think>", "\\boxed{1}\nQ:\n", "#### 1\nQ: ", "#### The answer "],
)
@pytest.mark.timeout(100)  # a tenth of a second if time is linear in the text, several minutes if it is quadratic
def test_a_long_text_is_read_in_time(unit):
    text = unit * (300_000 // len(unit))
    for find in (own_turn, stated_answer, last_math, answer_alone, last_number, last_hash):
        find(text)


@pytest.mark.parametrize(
    ("line", "answer"),
    [(text, text) for text in ("C", "(B)", "**D**", "Ten apples", "Twenty-four.", "USD 5", "The answer is 5", "x = 5")]
    + [(text, None) for text in ("Step", "Case A", "3. Total", "One more step", "One last check", "Step 2: 3 more")],
)
def test_a_name_after_hashes_is_a_heading_and_a_letter_or_a_number_in_words_is_an_answer(line, answer):
    assert last_hash(f"#### {line}\n") == answer
    assert last_hash(f"#### 18\n#### {line}") == (answer or "18")


def test_a_tag_before_the_turn_does_not_end_it():
    assert unmarked.own_turn("<|im_end|>\nSo <answer>5</answer><|end|>6", "answer", stated=False).strip() == (
        "So <answer>5</answer>"
    )


@pytest.mark.parametrize("unit", ["$5 ", "$<<", "\\quad ", "</think>", "</s>", "<think>", "\\$", "$5$", "#### A ", "("])
def test_long_texts_of_what_is_searched_for_take_no_time(unit):
    text = unit * (150_000 // len(unit))
    start = time.process_time()
    assert len(MathAnswer(fallback="last_math")._span(text) or "") <= len(text)
    NumericAnswer("any", "last_number").judge([text], ["5"])
    assert time.process_time() - start < 3  # a search that is quadratic in the text takes minutes
