"""Each answer in the benchmarks AIME24, AMC23, GAOKAO and GSM8K counts as right in other notations, and a changed
answer counts as wrong."""

import json
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from qerl_pl.rewards.numbers import exact_number

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def other_forms(answer: str) -> list[str]:
    """Write three completions that give the same answer in other notations."""
    bare = re.sub(r"(?<!\\)\$", " ", answer.replace("$,", "$, ")).strip()
    number = exact_number(bare)
    if number is not None and not number.percent:
        value = number.value
        written = f"{value.numerator:,}" if value.denominator == 1 else f"{2 * value.numerator}/{2 * value.denominator}"
        fraction = f"\\dfrac{{{3 * value.numerator}}}{{{3 * value.denominator}}}"
        return [
            f"<answer>{written} units</answer>",
            f"So $x = \\boxed{{{fraction}}}$.",
            f"\\[ \\boxed{{x = {written}}} \\]",
        ]
    display = bare.replace("\\frac", "\\dfrac").replace("\\leq", "\\le")
    styled = re.sub(r"\\\{|\(", r"\\left\g<0>", re.sub(r"\\\}|\)", r"\\right\g<0>", bare))
    return [
        f"<answer>The answer is ${display}$.</answer>",
        f"Therefore \\(\\boxed{{\\displaystyle {styled}}}\\).",
        f"\\boxed{{1}} was a guess. <answer>\n\\[ {bare.replace(' ', '  ')} \\]\n</answer>",
    ]


def wrong_value(answer: str) -> str:
    """Write a completion whose answer is not the given one: the number plus 1; if it is no number, with another first
    digit; if it has no digit, another letter."""
    number = exact_number(answer.strip("$"))
    if number is not None:
        return f"\\boxed{{{number.value + Fraction(1)}}}"
    if re.search(r"\d", answer):
        return f"<answer>{re.sub(r'[0-9]', lambda digit: str((int(digit.group()) + 4) % 10), answer, count=1)}</answer>"
    return f"\\boxed{{{'B' if answer == 'A' else 'A'}}}"


@pytest.fixture(scope="module")
def formulas() -> Iterator[MathAnswer]:
    reward = MathAnswer(num_workers=2)
    yield reward
    reward.close()


def answers_of(name: str) -> list[str]:
    """Read the known answers of a benchmark."""
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set QERL_DATA to the folder that holds the benchmark files")
    return [str(json.loads(line)["answer"]) for line in path.open()]


@pytest.mark.parametrize(
    ("name", "every"),
    [("aime24", 1), ("amc23", 1), ("gaokao2023en", 4), pytest.param("gaokao2023en", 1, marks=pytest.mark.long)],
)
def test_every_answer_is_right_in_three_other_forms_and_a_wrong_value_is_not(formulas, name, every):
    answers = [answer for answer in answers_of(name) if answer.strip()][::every]
    texts = [text for answer in answers for text in (*other_forms(answer), wrong_value(answer))]
    golds = [answer for answer in answers for _ in range(4)]
    scores = [verdict.score for verdict in formulas.judge(texts, golds)]
    expected = [1.0, 1.0, 1.0, 0.0] * len(answers)
    unlike = [
        (gold, text, got) for gold, text, got, want in zip(golds, texts, scores, expected, strict=True) if got != want
    ]
    assert not unlike


def judged(reward: NumericAnswer, text: str, answer: str) -> float | None:
    return reward.judge([text], [answer])[0].score


@pytest.mark.parametrize(
    ("name", "rows"), [pytest.param("gsm8k_train", 7473, marks=pytest.mark.long), ("gsm8k_test", 1319)]
)
def test_every_gsm8k_answer_is_right_in_other_forms_and_wrong_values_are_not(name, rows):
    golds = answers_of(name)
    assert len(golds) == rows
    tag, every = NumericAnswer(), NumericAnswer(marker="any")
    for gold in golds:
        final = gold.rpartition("####")[2].strip()
        value = int(final.replace(",", ""))
        assert judged(every, gold, gold) == 1.0  # the whole solution, with its own #### line
        for form in (f"${value:,}.00", f"{2 * value}/2", f"x = {value} \\text{{ units}}", final):
            assert judged(tag, f"<think>{value + 1}</think><answer>{form}</answer>", gold) == 1.0, (gold, form)
        for wrong in (value + 1, -value or 7, 10 * value or 3):
            assert judged(tag, f"{final} <answer>{wrong:,}</answer> \\boxed{{{final}}}", gold) == 0.0, gold


def test_a_solution_with_amounts_of_money_is_right_for_the_reward_of_formulas(formulas):
    golds = answers_of("gsm8k_test")
    texts = [re.sub(r"<<.*?>>", "", gold.rpartition("####")[0]).strip() for gold in golds]
    rows = [(text, gold) for text, gold in zip(texts, golds, strict=True) if re.search(r"\$\d.*\$\d", text)]
    assert len(rows) > 200
    texts, golds = [text for text, _ in rows], [gold for _, gold in rows]
    numbers = NumericAnswer("any", "last_number").judge(texts, golds)
    reward = MathAnswer(fallback="last_math")
    reward.verifier = formulas.verifier
    verdicts = reward.judge(texts, golds)
    lost = [row for row, one, other in zip(rows, numbers, verdicts, strict=True) if one.score and not other.score]
    assert not lost
