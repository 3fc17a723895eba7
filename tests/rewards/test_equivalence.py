"""Ways of writing an answer that mean the same, and near ones that do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.rewards.equivalence import judge

SAME = [
    # formulas typed without LaTeX
    ("\\frac{\\pi}{2}", ["pi/2", "1/2 pi"]),
    ("9\\sqrt{3}", ["9 sqrt(3)", "9sqrt3", "9*sqrt(3)", "sqrt(243)"]),
    ("\\frac{1}{2}x + 3", ["1/2 x + 3", "(1/2)x + 3", "x/2 + 3"]),
    ("e^{-x}", ["e^-x", "e^(-x)"]),
    ("\\tan^2 x", ["tan^2(x)"]),
    ("\\sin 2x", ["sin(2x)"]),
    ("|x|", ["abs(x)"]),
    ("x \\geq 2", ["x >= 2"]),
    ("\\pm 4", ["+/- 4", "4, -4"]),
    ("(-\\infty,0)\\cup(2,3]", ["(-infinity, 0) U (2, 3]", "(-inf, 0) union (2, 3]"]),
    ("\\binom{5}{2}", ["5 choose 2"]),
    ("\\emptyset", ["empty set", "the empty set"]),
    # a modulus that the question may have said
    ("3", ["3 \\pmod{5}", "3 (mod 5)", "n \\equiv 3 \\pmod{5}"]),
    ("3 \\pmod{5}", ["3"]),
    # what is set around it
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", ["\\begin{pmatrix}1\\\\[4pt]2\\end{pmatrix}"]),
    ("7", ["n \\geq 7 \\Rightarrow n_{\\min} = 7", "2x = 14 \\implies x = 7"]),
    ("7", ["x = 7 \\text{ (since } x > 0)", "7, because 3 + 4 = 7", "7^{\\text{th}}", "7th"]),
    # words
    ("4", ["four solutions", "There are four of them"]),
    ("\\text{Yes}", ["Yes, it is", "yes"]),
    ("2:30 \\text{ p.m.}", ["2{:}30 \\text{ PM}"]),
    ("108", ["108 \\checkmark"]),
    ("6", ["6 sq. units"]),
    ("a=1,b=2", ["1, 2", "b=2, a=1", "(1,2)"]),
    ("6+9i", ["6+9\\textit{i}", "6+9\\mathrm{i}"]),
    ("\\lg 2", ["\\log_{10} 2"]),
    ("5", ["5 (five)", "5(Five)"]),
    # tiny numbers, and numbers that all but cancel
    ("1-\\frac{1}{2^{2023}}", ["\\frac{2^{2023}-1}{2^{2023}}"]),
    ("\\frac{1}{2023!}", ["\\frac{2024}{2024!}"]),
    ("\\sqrt{3}^{-200}", ["3^{-100}"]),
    ("\\sqrt{2}+\\sqrt{3}", ["\\sqrt{5+2\\sqrt{6}}"]),
    ("\\sin^2(1)+\\cos^2(1)", ["1"]),
    ("\\frac{\\sqrt{2}}{2}", ["0.707107"]),
    ("2^{10^{10}}", ["2^{10^{10}}"]),
]
OTHER = [
    ("\\frac{1}{2}x", ["1/(2x)", "1/2 y"]),
    ("\\frac{\\pi}{2}", ["p/2", "pi", "2 pi"]),
    ("(-\\infty,0)\\cup(2,3]", ["(-inf, 0) U (2, 3)", "U(2, 3]"]),
    ("3 \\pmod{5}", ["3 \\pmod{7}"]),
    ("3", ["2 \\pmod{3}", "3 (mod 5), 4 (mod 5)", "(mod 3)"]),
    ("\\text{Yes}", ["No, yes", "yesterday", "no"]),
    ("\\text{No}", ["No solution, yes"]),
    ("4", ["forty", "four or five"]),
    ("a=1,b=2", ["2, 1", "(2, 1)", "a=2, b=1"]),
    ("x=1,x=2", ["1, 3"]),
    ("7", ["7 \\implies 8", "8, because 7 is odd", "7^t", "7^{th+1}"]),
    ("5", ["5 (six)", "5 (x)"]),
    ("\\lg 2", ["\\ln 2"]),
    ("5k", ["5000"]),
    # tiny numbers, and numbers that differ by one
    ("\\frac{1}{2^{2023}}", ["\\frac{1}{2^{2024}}", "0", "0.0", "0.0000001"]),
    ("1-\\frac{1}{2^{2023}}", ["1-\\frac{1}{2^{2024}}", "1-\\frac{1}{10^{9999}}"]),
    ("2-\\frac{2025}{2^{2023}}", ["2-\\frac{2025}{2^{2024}}"]),
    ("\\frac{1}{2023!}", ["\\frac{1}{2024!}"]),
    ("(2/3)^{100}", ["(2/3)^{101}"]),
    ("\\frac{1}{3^{100}}", ["\\frac{2}{3^{100}}"]),
    ("\\frac{\\sqrt{2}}{3^{100}}", ["\\frac{\\sqrt{3}}{3^{100}}"]),
    ("1-e^{-1000}", ["1-e^{-1001}"]),
    ("\\sin(10)", ["\\sin(10)+10^{-30}"]),
    ("1+i", ["1+i+\\frac{i}{10^{30}}"]),
]


@pytest.mark.parametrize(("gold", "written"), [(gold, form) for gold, forms in SAME for form in forms])
def test_it_is_the_same_answer(gold, written):
    assert judge(gold, written).score == 1.0


@pytest.mark.parametrize(("gold", "written"), [(gold, form) for gold, forms in OTHER for form in forms])
def test_it_is_another_answer(gold, written):
    assert judge(gold, written).score == 0.0


@given(base=st.integers(2, 9), power=st.integers(30, 3000), more=st.integers(1, 9), whole=st.integers(0, 9))
def test_fractions_are_compared_exactly_however_near_they_are(base, power, more, whole):
    gold = f"{whole}-\\frac{{1}}{{{base}^{{{power}}}}}"
    assert judge(gold, f"\\frac{{{whole}*{base}^{{{power}}}-1}}{{{base}^{{{power}}}}}").score == 1.0
    assert judge(gold, f"{whole}-\\frac{{1}}{{{base}^{{{power + more}}}}}").score == 0.0
