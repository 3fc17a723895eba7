"""Where an answer is looked for: after the thoughts, outside of amounts of money, in several boxes, after hashes."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from qerl_pl.rewards.answers import last_boxed, last_hash
from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from qerl_pl.rewards.unmarked import last_math, own_turn

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


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


def test_a_solution_with_amounts_of_money_is_right_for_the_reward_of_formulas():
    path = DATA / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set QERL_DATA to the folder that holds the benchmark files")
    golds = [json.loads(line)["answer"] for line in path.open()]
    texts = [re.sub(r"<<.*?>>", "", gold.rpartition("####")[0]).strip() for gold in golds]
    rows = [(text, gold) for text, gold in zip(texts, golds, strict=True) if re.search(r"\$\d.*\$\d", text)]
    assert len(rows) > 200
    texts, golds = [text for text, _ in rows], [gold for _, gold in rows]
    numbers = NumericAnswer("any", "last_number").judge(texts, golds)
    formulas = MathAnswer(fallback="last_math", num_workers=1)
    verdicts = formulas.judge(texts, golds)
    formulas.close()
    lost = [row for row, one, other in zip(rows, numbers, verdicts, strict=True) if one.score and not other.score]
    assert not lost


@pytest.mark.parametrize("known", ["$\\frac{x^{2}}{2}-y^2=1$", "x+y=1", "x^2 = 1"])
def test_an_equation_of_unknowns_is_no_known_number(known):
    assert NumericAnswer("any").judge(["<answer>1</answer>"], [known])[0].cause == "known_answer"
    assert NumericAnswer("any").judge(["<answer>1</answer>"], ["x = 1"])[0].score == 1.0


@pytest.mark.parametrize("between", [" \\quad \\text{and} \\quad ", ", ", "$ and $", " \\text{ or } ", ",\\quad "])
def test_boxes_with_only_a_conjunction_between_them_are_one_answer(between):
    assert last_boxed(f"\\boxed{{4}}{between}\\boxed{{5}}") == "4, 5"


def test_a_letter_after_hashes_is_an_answer_and_a_heading_is_none():
    assert [last_hash(text) for text in ("#### C", "#### (B)\n", "#### **D**", "#### Step", "#### Case A")] == [
        "C",
        "(B)",
        "**D**",
        None,
        None,
    ]


def test_a_tag_before_the_turn_does_not_end_it():
    assert own_turn("<|im_end|>\nSo <answer>5</answer><|end|>6", "answer", stated=False).strip() == (
        "So <answer>5</answer>"
    )


@pytest.mark.parametrize("unit", ["$5 ", "$<<", "\\quad ", "</think>", "</s>", "<think>", "\\$", "$5$", "#### A ", "("])
def test_long_texts_of_what_is_searched_for_take_no_time(unit):
    text = unit * (300_000 // len(unit))
    start = time.process_time()
    assert len(MathAnswer(fallback="last_math")._span(text) or "") <= len(text)
    NumericAnswer("any", "last_number").judge([text], ["5"])
    assert time.process_time() - start < 0.6
