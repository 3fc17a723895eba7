"""Laws of the comparison of answers, tested on random answers: writing an answer in another form makes no wrong answer
right and no right answer wrong."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse
from sympy import expand, factor, latex, together

from qerl_pl.rewards.answers import last_boxed
from qerl_pl.rewards.equivalence import judge
from qerl_pl.rewards.numbers import decimal_places, is_decimal_of, parse_number

FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=60)
FORMS = [
    lambda x: f"{x.numerator}/{x.denominator}",
    lambda x: f"\\frac{{{x.numerator}}}{{{x.denominator}}}",
    lambda x: f"\\dfrac{{{3 * x.numerator}}}{{{3 * x.denominator}}}",
    lambda x: f"x = {x}",
    lambda x: f"$\\boxed{{{x}}}$",
    lambda x: f"\\left({x}\\right)",
    lambda x: f"{x} \\text{{ apples}}",
    lambda x: f"{x + 1} - 1",
    lambda x: f"\\frac{{{2 * x.numerator}\\pi}}{{{2 * x.denominator}\\pi}}",
]
form = st.sampled_from(FORMS)
NOTHING = ["1=1", "1=0", "x=x", "0=0", "y=y", "2<3", "\\sin(x)=\\sin(x)", ""]


@settings(max_examples=40)
@given(FRACTIONS, form, form)
def test_equal_values_are_equal_in_every_notation_and_either_way_round(value, one, other):
    assert judge(str(value), one(value)).score == judge(str(value), other(value)).score == 1.0
    assert judge(other(value), str(value)).score == 1.0


@settings(max_examples=40)
@given(FRACTIONS, FRACTIONS.filter(bool), form, form)
def test_another_value_is_never_right_in_any_notation(value, error, one, other):
    assert judge(one(value), other(value + error)).score == 0.0


@settings(max_examples=15)  # each is five comparisons of equations, of 50 ms
@given(
    st.integers(-9, 9), st.integers(-9, 9).filter(bool), st.integers(1, 5), st.integers(1, 9), st.sampled_from(NOTHING)
)
def test_an_equation_equals_its_multiples_and_neither_others_nor_what_always_holds(a, b, factor, error, nothing):
    gold = f"x^2+{a}y={b}".replace("+-", "-")
    multiple = f"{factor}x^2+{factor * a}y={factor * b}".replace("+-", "-")
    assert judge(gold, multiple).score == 1.0
    assert judge(gold, f"{b}=x^2+{a}y".replace("+-", "-")).score == 1.0
    assert judge(gold, f"x^2+{a}y={b + error}".replace("+-", "-")).score == 0.0
    assert judge(gold, f"x^2+{a + error}y={b}".replace("+-", "-")).score == 0.0
    assert judge(gold, nothing).score == 0.0


@given(FRACTIONS, st.integers(0, 12), st.integers(-3, 3))
def test_a_decimal_is_right_if_it_is_exact_or_rounded_or_cut_off_at_six_digits_or_more(value, places, last):
    exact = abs(value) * 10**places
    digits = int(exact) + last
    written = f"{'-' if value < 0 else ''}{digits // 10**places}.{digits % 10**places:0{places}d}" if places else None
    if written is None or digits < 0:
        return
    decimal = Fraction(written)
    expected = decimal == value or is_decimal_of(decimal, value)
    assert judge(str(value), written).score == float(expected)
    assert judge(written, str(value)).score == float(expected)
    known, given_number = parse_number(str(value)), parse_number(written)
    assert known is not None
    assert given_number is not None
    assert known.equals(given_number) == given_number.equals(known) == expected
    assert not expected or abs(decimal - value) < Fraction(1, 10 ** (decimal_places(decimal) or 0))


@given(FRACTIONS, FRACTIONS)
def test_a_decimal_stands_for_no_value_that_has_finite_decimals(one, other):
    assert not (is_decimal_of(one, other) and is_decimal_of(other, one))
    assert not is_decimal_of(one, Fraction(one.numerator, 8))
    assert not is_decimal_of(one, one)


@settings(max_examples=25)
@given(st.integers(2, 999), st.sampled_from("abcknxy"), st.sampled_from(["hundred", "squared", "factorial", "halves"]))
def test_a_letter_or_a_factor_behind_a_number_changes_it(number, letter, factor):
    for written in (f"{number}{letter}", f"{number} {letter}", f"1+{number - 1}{letter}", f"{number} {factor}"):
        assert judge(str(number), written).score == 0.0
        assert judge(written, str(number)).score != 1.0


@given(st.permutations(["red", "green", "blue", "yellow"]), st.permutations(["red", "green", "blue", "yellow"]))
def test_words_are_compared_in_order(one, other):
    assert judge(" before ".join(one), " before ".join(other)).score == float(one == other)


def test_equations_whose_sides_vanish_where_they_are_tried_are_compared_all_the_same():
    for root in ("8/11", "10/11", "1", "15/11", "17/11"):
        assert judge(f"x={root}+y", f"2x-2y=2*{root}").score == 1.0
        assert judge(f"x^2=({root})^2", f"3x^2-3*({root})^2=0").score == 1.0
        assert judge(f"x^2=({root})^2", f"3x^2-2*({root})^2=0").score == 0.0


@settings(max_examples=30)
@given(base=st.integers(2, 9), power=st.integers(30, 3000), more=st.integers(1, 9), whole=st.integers(0, 9))
def test_fractions_are_compared_exactly_however_near_they_are(base, power, more, whole):
    gold = f"{whole}-\\frac{{1}}{{{base}^{{{power}}}}}"
    assert judge(gold, f"\\frac{{{whole}*{base}^{{{power}}}-1}}{{{base}^{{{power}}}}}").score == 1.0
    assert judge(gold, f"{whole}-\\frac{{1}}{{{base}^{{{power + more}}}}}").score == 0.0


@pytest.mark.parametrize("gold", ["1e3", "1E3", "1E+3", "1000", "10^3"])
def test_a_whole_exponent_behind_e_is_a_power_of_ten_and_a_bare_e_is_eulers_number(gold):
    assert [judge(gold, right).score for right in ("1e3", "10^3", "10^{3}", "1E+3")] == [1.0] * 4
    assert [judge(gold, wrong).score for wrong in ("3e", "10^2", "1e4", "1e999999999", "1e^3")] == [0.0] * 5
    assert judge("3e", "e \\cdot 3").score == judge("2000\\pi", "2e3\\pi").score == 1.0


FORMULAS = r"""
\frac{x^3}{3}+C ; C_1e^{x}+C_2e^{-x} ; N(N-1) ; P(1+r)^n ; mgh ; 3R^2 ; \frac{-b+\sqrt{b^2-4ac}}{2a} ; \ln 3-1
\arctan 2 ; (x-2)(x+3) ; \frac{1}{2}-\frac{\sqrt{3}}{2}i
"""


@pytest.mark.parametrize("gold", FORMULAS.replace("\n", ";").strip(";").split(";"))
def test_an_answer_that_a_computer_algebra_system_wrote_anew_is_the_same(gold):
    read = parse(f"${gold}$", fallback_mode="no_fallback", parsing_timeout=None)[0]  # pyright: ignore
    for form in (read, expand(read), factor(read), together(read)):
        for written in (latex(form), latex(form, mul_symbol="dot"), latex(form, fold_short_frac=True)):
            assert judge(gold, written).score == 1.0, written


@pytest.mark.parametrize(
    "text",
    [
        r"The answer is -\boxed{5}.",
        r"$x=-\boxed{5}$",
        r"$2\cdot\boxed{5}$",
        r"$\boxed{5}^2$",
        r"$\sqrt{\boxed{5}}$",
        r"The answer is minus \boxed{5}.",
        r"The answer is at least \boxed{5}.",
        r"The answer is half of \boxed{5}.",
        r"$1\boxed{5}$",
        r"$\boxed{5}0$",
        r"$\boxed{5}!$",
        r"$\boxed{5}x$",
        r"$\boxed{5}+1$",
        r"$\boxed{5} \cdot 3$",
        r"$\boxed{5}+\boxed{1}$",
        r"$2+\boxed{5}$",
        r"$\frac{\boxed{5}}{2}$",
        r"$\sqrt[3]{\boxed{5}}$",
        r"$\boxed{5}\times2$",
        r"$\boxed{5}\pi$",
        r"This rules out \boxed{5}.",
        r"We exclude \boxed{5}.",
        r"He wrongly answered \boxed{5}.",
        r"$\boxed{5}$ is ruled out.",
        r"$\boxed{5}$ or more",
        r"$\frac{1}{\boxed{5}}$",
        r"$\boxed{5}$ does not work.",
        r"$\log\boxed{5}$",
        r"We rule out \boxed{5}.",
        r"It differs from \boxed{5}.",
        r"I doubt it is \boxed{5}.",
        r"$\boxed{5}$? No.",
    ],
)
def test_a_box_within_a_formula_of_another_value_is_no_answer(text):
    assert last_boxed(text) != "5"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$-\boxed{5}$", "-5"),
        (r"$x = \boxed{5}\pi$.", r"5\pi"),
        (r"$\frac{\boxed{3}}{\boxed{8}}$", r"\frac{3}{8}"),
        (r"$\boxed{x+1}^2$", "(x+1)^2"),
        (r"The ratio is $\boxed{3}:\boxed{4}$.", "3:4"),
        (r"It takes \boxed{2} hours and 30 minutes.", "2 hours and 30 minutes"),
        (r"He sold $\boxed{5}$ dozen eggs.", "5 dozen"),
        (r"He sold \boxed{5} boxes and 3 bags.", "5"),
        (r"There are \boxed{5} third graders.", "5"),
        (r"The roots are $\boxed{4}$ and $6$.", "4, 6"),
        (r"It is \boxed{18}. Sorry, the correct answer is 16.", "16"),
    ],
)
def test_a_box_is_read_with_the_formula_and_the_amounts_around_it(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        r"- \boxed{5}",
        r"$3\times\boxed{5}=15$",
        r"$\boxed{5}^{th}$",
        r"She needs at least \boxed{5}.",
        r"$10 - \boxed{5} = 5$",
        r"The answer is: \boxed{5}",
        r"--\boxed{5}",
        r"$\boxed{5}$!",
        r"$n=3$\boxed{5}",
        r"4 is excluded, so it is \boxed{5}.",
        r"$\frac{10}{2}=\boxed{5}$",
        r"$\boxed{5}+1=6$",
        r"$6=1+\boxed{5}$",
        r"There is no doubt that it is \boxed{5}.",
        r"\boxed{5} - 2 of them are red",
        r"He gave \boxed{5} incorrect answers.",
        r"So it is \boxed{5}. It is not a multiple of 3.",
        r"Therefore \boxed{5} students disagree.",
        r"She should have \boxed{5} apples, and he should have 3.",
        r"Assuming that all are different we get \boxed{5}.",
        r"The eggs that she did not sell were \boxed{5}.",
    ],
)
def test_a_box_beside_marks_that_leave_its_value_is_the_answer(text):
    assert last_boxed(text) == "5"


@pytest.mark.parametrize("value", ["5", "6"])
def test_a_correction_counts_unless_the_text_ends_with_the_same_answer(value):
    check = "Wait, let me check this once more. " + "We add the two numbers again. " * 40
    text = f"So it is $\\boxed{{5}}$. {check}So it is ${value}$."
    assert last_boxed(text) == ("5" if value == "5" else "")


@pytest.mark.parametrize("length", range(270, 300))
def test_a_number_that_is_stated_again_is_read_whole(length):
    text = f"\\boxed{{240}}. {'a ' * (length // 2)}{'.' * (length % 2)}So the answer is 240."
    assert last_boxed(text) == "240"


@pytest.mark.parametrize("answer", [r"\text{No}", "no", r"\text{False}", r"\textbf{impossible}", "None of these"])
def test_an_answer_that_denies_is_explained_by_a_denial_and_taken_back_by_one_of_itself(answer):
    for reason in (
        ", it is not possible",
        ". It is impossible to tile the board",
        "$, that is not true for $n = 2",
        ": this is wrong in general",
        ", the claim is false",
    ):
        assert last_boxed(f"So \\boxed{{{answer}}}{reason}.") == answer, reason
    for reason in (" is wrong", " is not correct", ", which is not true", ", but that is wrong", ". I was wrong"):
        assert last_boxed(f"So \\boxed{{{answer}}}{reason}.") == "", reason
    assert last_boxed(f"So \\boxed{{{answer}}}. No, that answer is wrong.") == ""
    assert last_boxed("So \\boxed{\\text{Yes}}, it is not possible.") == ""
