"""What counts as the answer of a completion that marks none, and where its own text ends."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.rewards import unmarked
from qerl_pl.rewards.answers import last_boxed, last_hash
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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer to the problem is 5.", "5"),
        ("The answer is indeed 5.", "5"),
        ("The answer is 5, because 2 + 3 = 5.", "5"),
        ("The answer is 1/3 (one third).", "1/3"),
        ("**Answer: 0.6 (or 60%)**", "0.6 (or 60%)"),
        ("The answer is (3, 4).", "(3, 4)"),
        ("Hence option **(B)** is correct.", "B"),
        ("# Answer\n\n\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"),
        ("The answer is 4. Wait: the answer is 5.", "5"),
        ("No word of it.", None),
    ],
)
def test_a_stated_answer_goes_to_the_end_of_its_sentence_without_reasons(text, answer):
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So $x = 4$ and thus $y = 5$.", "y = 5"),
        ("The solutions are $x=3$, $x=5$, and $x = 7$.", "x=3, x=5, x = 7"),
        ("So the value of $x$ is 9.", "9"),
        ("So \\(AB\\) is equal to 9 cm.", "9 cm"),
        ("Hence $f$ is even.", "even"),
        ("So $x$ = 9.", "9"),
        ("So $9$ is the least of them.", "9"),
        ("Since $x = 9$ is 1 more than $8$, it is $x = 9$.", "x = 9"),
        ("So $x = 9$ is 1 of them.", "x = 9"),
        ("It is $1 + 4$, so the day is **Tuesday**.", "Tuesday"),
        ("It is **5** or, in full, $5.0$.", "5.0"),
        ("**Step 1**\n\nIt is $5$.", "5"),
        ("It is $5$.\n\n**Note:** mind the sign.", "5"),
        ("It is $5$, and **this is the value that we wanted**.", "5"),
        ("Nothing at all.", None),
    ],
)
def test_the_last_expression_counts_in_math_or_bold(text, answer):
    assert last_math(text) == answer


@pytest.mark.parametrize("text", ["(D)", "x^2 + 2x", "June 20", "2sqrt(3)", "[0, 1)", "\\frac{1}{2}"])
def test_a_line_that_says_nothing_else_is_the_answer(text):
    assert answer_alone(f" {text}\n") == text


@pytest.mark.parametrize("text", ["So it is five.", "Total: 5", "5\n6", "\\boxed{5", "", "x" * 100])
def test_other_text_is_not_an_answer_alone(text):
    assert not answer_alone(text)


@pytest.mark.parametrize(
    "text",
    [
        "They need 10 cars (since 9.5 is rounded up).",
        "They need 10 cars.\n\nNote: 4 people fit into one.",
        "Check: 5 + 5 = 10",
        "It costs (10)",
    ],
)
def test_the_last_number_is_not_one_in_an_aside_or_a_remark(text):
    number = last_number(text)
    assert number is not None
    assert number.value == 10


def test_two_stated_numbers_are_no_answer():
    score = NumericAnswer(fallback="last_number")
    for text in ("The answer is 10 or 12.", "The answer is 10 to 12.", "The answer is $10 or $12."):
        assert [verdict.score for verdict in score.judge([text, text], ["10", "12"])] == [0.0, 0.0]


@given(text=st.text(alphabet="answer is:Q$*\\[]()<think/>5\n .", max_size=120))
def test_reading_never_fails(text):
    assert text.startswith(own_turn(text))
    for find in (stated_answer, last_math, answer_alone):
        assert find(text) is None or isinstance(find(text), str)


@pytest.mark.parametrize(
    "unit",
    ["Q:\n", "answer is ", "**", "$x$ and ", "( ", "<think>", "\\boxed{1}\nQ:\n", "#### 1\nQ: ", "#### The answer "],
)
@pytest.mark.timeout(100)  # a second if time is linear in the text, an hour if it is quadratic
def test_a_long_text_is_read_in_time(unit):
    text = unit * (1_000_000 // len(unit))
    for find in (own_turn, stated_answer, last_math, answer_alone, last_number, last_hash):
        find(text)


@pytest.mark.parametrize(
    ("text", "after", "anywhere"),
    [
        ("<think><answer>5</answer></think>So it is 7.", 0, 1),
        ("<think>5?</think><answer>5</answer>", 1, 1),
        ("5?</think><answer>5</answer>", 1, 1),
        ("<answer>5</answer></think>7", 0, 1),
        ("<think><answer>5</answer>", 0, 1),
        ("<think>6</think><answer>5</answer><think><answer>6</answer>", 0, 0),
        ("<answer>5</answer>", 1, 1),
    ],
)
def test_an_answer_in_the_thoughts_counts_only_where_that_is_asked_for(text, after, anywhere):
    assert NumericAnswer().judge([text], ["5"])[0].score == after
    assert NumericAnswer(after_thoughts=False).judge([text], ["5"])[0].score == anywhere


@pytest.mark.parametrize(
    "text",
    [
        "She has $5 and pays $3 a day, so $<<5*3=15>>15 in total",
        "$18 + $20 = $38",
        "It was $x = 5$ at first. She pays $40.",
        "That is $12-$7=$5 a day for 3 days",
        "$1,200.50/month",
        "at 20$, she earns 20*65 = $1300 a year",
    ],
)
def test_amounts_of_money_are_no_formulas(text):
    assert last_math(text) is None


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("is $5$ and $6$", "5, 6"),
        ("so $\\$40$", "\\$40"),
        ("costs $3 and it is $2x + 3$", "2x + 3"),
        ("it is $ 5 + 6 $", "5 + 6"),
        ("$0.5x$", "0.5x"),
    ],
)
def test_formulas_beside_money_are_still_read(text, formula):
    assert last_math(text) == formula


@pytest.mark.parametrize("known", ["$\\frac{x^{2}}{2}-y^2=1$", "x+y=1", "x^2 = 1"])
def test_an_equation_of_unknowns_is_no_known_number(known):
    assert NumericAnswer("any").judge(["<answer>1</answer>"], [known])[0].cause == "known_answer"
    assert NumericAnswer("any").judge(["<answer>1</answer>"], ["x = 1"])[0].score == 1.0


@pytest.mark.parametrize("between", [" \\quad \\text{and} \\quad ", ", ", "$ and $", " \\text{ or } ", ",\\quad "])
def test_boxes_with_only_a_conjunction_between_them_are_one_answer(between):
    assert last_boxed(f"\\boxed{{4}}{between}\\boxed{{5}}") == "4, 5"


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
    text = unit * (300_000 // len(unit))
    start = time.process_time()
    assert len(MathAnswer(fallback="last_math")._span(text) or "") <= len(text)
    NumericAnswer("any", "last_number").judge([text], ["5"])
    assert time.process_time() - start < 0.6
