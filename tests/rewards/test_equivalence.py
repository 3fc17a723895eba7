"""Ways of writing an answer that mean the same, and near ones that do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_verify import parse
from sympy import expand, factor, latex, together

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
    # a decimal of six significant digits or more, rounded or cut off
    ("\\pi", ["3.14159265", "3.141592", "3.141593"]),
    ("1/3", ["0.333333", "0.3333333333"]),
    ("2/3", ["0.666667", "0.6666666"]),
    ("0.333333", ["\\frac{1}{3}"]),
    ("1000\\pi", ["3141.59"]),
    ("2.5\\pi", ["\\frac{5\\pi}{2}"]),
    # equations
    ("x^2+y^2=4", ["y^2+x^2=4", "4=x^2+y^2", "x^2+y^2-4=0", "2x^2+2y^2=8"]),
    ("y=2x+1", ["2x-y+1=0"]),
    ("f(2)=7", ["7"]),
    ("V_1:V_2=11:21", ["11:21"]),
    ("11:21", ["V_1:V_2=11:21"]),
    # several values, sums, thousands
    ("\\sqrt[3]{2},\\sqrt[3]{3}", ["\\sqrt[3]{3}, \\sqrt[3]{2}"]),
    ("55", ["\\sum_{k=1}^{10} k"]),
    ("\\sum_{k=1}^{n} k", ["\\sum_{j=1}^{n} j"]),
    ("1234", ["1,\\! 234", "1,\\!234"]),
    ("-1812", ["(b) -1812"]),
    ("-1./3", ["-\\frac{1}{3}"]),
    ("\\approx 24.33", ["24.33"]),
    ("2E_1+1", ["1+2E_1", "2 E_1 + 1"]),
    ("-1<x\\leq1:(-1,1]", ["(-1,1]", "-1<x\\leq 1"]),
    # words, units and numbers in words
    ("5", ["5 apples", "5 apples a basket", "5 per basket", "5\\text{ apples}"]),
    ("500", ["5 hundred"]),
    ("\\text{Red}", ["red", "RED"]),
    ("\\text{cat}", ["cat", "The cat"]),
    ("2ab", ["2ba", "ab+ba"]),
    ("x^2+C", ["x^2+c"]),
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
    # decimals: rounded wrongly, too short, or of a value that has an end
    ("\\pi", ["3.14", "3.141594", "-3.141593", "22/7"]),
    ("1/3", ["0.33", "0.333334", "-0.333333"]),
    ("1/2", ["0.500001", "0.4999999"]),
    ("2.5\\pi", ["7.85"]),
    # equations that say nothing, or something else
    ("x^2+121=0", ["1=1", "1=0", "x=x", "0=0", "x^2=121", "x^2+121", "0", "x=0"]),
    ("\\log_6(216)=3", ["1=1", "1=0", "x=x", "\\log_6(36)=2"]),
    ("\\ln(e^5)=5", ["\\ln(e^5)=8", "1=1"]),
    ("x<y", ["1=1", "1<2", "x=x"]),
    ("y=2x+1", ["y=2x", "0=0", "y=y", "2x+1=2x+1"]),
    ("\\sin(x)=c", ["\\cos(x)=c", "c=c"]),
    ("f(2)=7", ["g(3)=7", "g(2)=7", "f(3)=7"]),
    ("f(x)=x+1", ["g(x)=x+1"]),
    ("4", ["4 \\approx 5.5 \\text{ or } 5.5", "5.5 \\approx 4"]),
    ("5.5", ["4 \\approx 5.5"]),
    ("2E_1+1", ["2E_2+1", "2F_1+1"]),
    ("-1<x\\leq1:(-1,1]", ["[-1,1]", "1=1"]),
    ("\\$36", ["36\\%"]),
    # letters and words that are no units
    ("5a", ["5"]),
    ("5", ["5a", "3+2a", "5 m^2x", "5 hundred", "5 squared", "5 factorial", "5 halves", "5\\text{ hundred}", "5abcd"]),
    ("3+2a", ["5", "3"]),
    ("\\text{cat}", ["tac", "act"]),
    ("aA", ["AA", "aa"]),  # a letter in both cases names two variables
    ("2 greater than 1", ["1 greater than 2"]),
    ("52", ["5_2", "5_{2}"]),
    ("\\sum_{k=1}^{10} k", ["k", "10k", "\\sum_{k=1}^{11} k"]),
    ("\\sqrt[3]{2},\\sqrt[3]{3}", ["\\sqrt[3]{2}", "\\sqrt[3]{2},\\sqrt[3]{5}"]),
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


@pytest.mark.parametrize(
    "gold",
    [
        "\\frac{x^3}{3}+C",
        "C_1e^{x}+C_2e^{-x}",
        "N(N-1)",
        "P(1+r)^n",
        "mgh",
        "3R^2",
        "\\frac{-b+\\sqrt{b^2-4ac}}{2a}",
        "\\ln 3-1",
        "\\arctan 2",
        "(x-2)(x+3)",
        "\\frac{1}{2}-\\frac{\\sqrt{3}}{2}i",
    ],
)
def test_an_answer_that_a_computer_algebra_system_wrote_anew_is_the_same(gold):
    read = parse(f"${gold}$", fallback_mode="no_fallback", parsing_timeout=None)[0]  # pyright: ignore
    for form in (read, expand(read), factor(read), together(read)):
        for written in (latex(form), latex(form, mul_symbol="dot"), latex(form, fold_short_frac=True)):
            assert judge(gold, written).score == 1.0, written
