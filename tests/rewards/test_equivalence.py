"""Ways of writing an answer that mean the same, and near ones that do not."""

import pytest

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
]


@pytest.mark.parametrize(("gold", "written"), [(gold, form) for gold, forms in SAME for form in forms])
def test_it_is_the_same_answer(gold, written):
    assert judge(gold, written).score == 1.0


@pytest.mark.parametrize(("gold", "written"), [(gold, form) for gold, forms in OTHER for form in forms])
def test_it_is_another_answer(gold, written):
    assert judge(gold, written).score == 0.0
