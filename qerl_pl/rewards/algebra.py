"""Compare mathematical expressions with math-verify and sympy, where the rules of ``equivalence.py`` leave it open.
Only the worker processes of ``verifier.py`` may import this, because sympy may hang or use unbounded memory."""

import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy import Add, Expr, Float, I, Mul, Pow, Rational, Set, UnevaluatedExpr, cancel, factorial, nsimplify, simplify
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.logic.boolalg import BooleanAtom

from qerl_pl.rewards.latex import SEPARATOR, letters, split_top
from qerl_pl.rewards.numbers import Number, decimal_places, is_decimal_of

# math-verify warns that its time limit is off, but the verifier sets one
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_BITS = 2**17  # bits; larger powers and factorials are not computed exactly (one of this size takes milliseconds)
MAX_PARTS = 24  # limit on the intervals or inequalities of an answer, because sympy takes 20 ms for each
MAX_PLACES = 100  # limit on the decimal places of an answer that is tested for being a rounded value
MAX_DIGITS = 2000  # limit on the digits computed for a comparison; comparing 1 + 2^{-2024} with 1 needs 610
MAX_PARSED_BITS = 2**22  # bits; a text with a larger power or factorial is not parsed
_POWER = re.compile(
    r"(?P<base>\d+)[)}\s]*(?:(?P<factorial>!)|\^\s*(?:(?P<digit>\d)|[{(\s]+(?P<exponent>\d+)\s*[)}][)}\s]*))"
)
# Matches a bracket that begins with a sum, difference, product or quotient of two whole numbers.
_SUM = re.compile(
    r"([({])[\s(]*(\d+)[\s)]*([-+*/]|\\(?:cdot|times|div)(?![A-Za-z]))[\s(]*(\d+)\s*\)*?(?=\s*(?:[-+*/)}]|\\))"
)
RELATION = re.compile(r"<|>|\\leq|\\geq|\\neq")
_SAME_RATIO = 1e-6  # two quotients, computed to 15 digits, are different if their relative difference is larger
# ``is_decimal_of`` accepts a rounded decimal only for a value with infinitely many decimals. An irrational number that
# was computed to some digits has finitely many, so this fraction, which has infinitely many, is added to it.
_ENDLESS = Fraction(1, 3**900)
_NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)


class Unreadable(ValueError):
    """Raised for a known answer that neither the rules of ``equivalence.py`` nor math-verify can read."""


def equal_expressions(gold: str, answer: str) -> bool:
    """Tell whether two expressions are equal: fractions are compared exactly, others by math-verify. Since math-verify
    has an absolute tolerance, numbers that it finds equal are computed to more digits, and count as different if these
    digits differ. Raises ``Unreadable`` if the known answer ``gold`` cannot be parsed."""
    known, given = _parse(gold), _parse(answer)
    if known is None:
        raise Unreadable(f"the known answer {gold!r} cannot be read, so {answer!r} cannot be compared with it")
    if given is None or isinstance(given, BooleanAtom) or isinstance(known, BooleanAtom):
        return False  # sympy reads 1=1 as True, which is no answer; equal_relations compares 2<3 as text
    fractions = _fraction(known), _fraction(given)
    if fractions[0] is not None and fractions[1] is not None:
        return Number(fractions[0], percent=False).equals(Number(fractions[1], percent=False))
    for decimal, value in ((fractions[0], given), (fractions[1], known)):
        if decimal is not None and decimal_places(decimal) and _is_rounded(decimal, value):
            return True
    same = verify(known, given, timeout_seconds=None, allow_set_relation_comp=True)
    return same and not _provably_different(known, given)


def equal_equations(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Tell whether two equations, given as lists of their sides, are equal: their sides are equal in the same or in
    reversed order, or left - right of one is a constant multiple of left - right of the other. Raises ``Unreadable`` if
    the known answer ``gold`` cannot be parsed."""
    known, given = [_parse(side) for side in gold], [_parse(side) for side in answer]
    if None in known:
        raise Unreadable(f"the known answer {'='.join(gold)!r} cannot be read")
    if None in given or len(known) != len(given):
        return False
    symbols, others = (
        {str(symbol) for side in sides for symbol in getattr(side, "free_symbols", ())} for sides in (known, given)
    )
    if symbols != others:
        return False
    if any(all(map(equal_expressions, gold, order)) for order in (answer, answer[::-1])):
        return True
    if len(known) != 2 or not symbols or not all(isinstance(side, Expr) for side in (*known, *given)):
        return False
    left, right = known[0] - known[1], given[0] - given[1]
    if right == 0:
        return False
    unknowns = sorted((left / right).free_symbols, key=str)
    points = [{unknown: Rational(7 * step + at, 11) for step, unknown in enumerate(unknowns, 1)} for at in (1, 3)]
    first, second = ((left / right).subs(point).evalf(15) for point in points)
    if first.is_finite and second.is_finite and abs(first - second) > abs(first) * _SAME_RATIO:
        return False  # numbers at two points decide much faster than algebra
    ratio = cancel(left / right)
    ratio = ratio if ratio.is_number else simplify(ratio)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def is_readable(text: str) -> bool:
    """Tell whether a known answer (expression, interval, relation or equation) can be parsed."""
    try:
        equal_expressions(text, "1")
    except Unreadable:
        return False
    return True


def equal_relations(gold: str, answer: str) -> bool:
    """Tell whether two inequalities or intervals have the same solutions. Raises ``Unreadable`` if the known answer
    ``gold`` cannot be parsed."""
    gold, answer = _ascending(gold), _ascending(answer)
    if letters(gold) == letters(answer):
        return True
    symbols = [set(re.findall(r"(?<![\\A-Za-z])[a-z](?![A-Za-z])", side)) for side in (gold, answer)]
    if all(symbols) and len(symbols[0] | symbols[1]) > max(map(len, symbols)):
        return False  # inequalities of other variables
    known, given = _solution_set(gold), _solution_set(answer)
    if known is not None and given is not None:
        return bool(known == given or known.symmetric_difference(given).is_empty)
    return equal_expressions(gold, answer)


def _fraction(number: object) -> Fraction | None:
    """Compute the exact value of a sympy number, if it is rational and has at most ``MAX_BITS`` bits, else None."""
    if isinstance(number, Rational):
        return Fraction(int(number.p), int(number.q))
    if not isinstance(number, (Add, Mul, Pow, factorial)):
        return None
    parts = list(map(_fraction, number.args))
    values = [part for part in parts if part is not None]
    bits = sum(value.numerator.bit_length() + value.denominator.bit_length() for value in values)
    if len(values) < len(parts) or bits > MAX_BITS:
        return None
    if isinstance(number, Add):
        return sum(values, Fraction(0))
    if isinstance(number, Mul):
        return math.prod(values, start=Fraction(1))
    base, exponent = values[0], values[-1]
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:  # n! has fewer bits than n times those of n
        return None
    if isinstance(number, Pow):
        return None if base == 0 and exponent <= 0 else base ** int(exponent)
    return Fraction(math.factorial(int(exponent))) if exponent >= 0 else None


def _provably_different(known: object, given: object) -> bool:
    """Compute two sympy numbers to many digits and tell whether they differ; False if they cannot be computed, or if
    computing them could take long."""
    if not isinstance(known, Expr) or not isinstance(given, Expr) or known == given:
        return False
    if not (known.is_number and given.is_number):
        return False
    if known.has(ExprWithLimits, UnevaluatedExpr) or given.has(ExprWithLimits, UnevaluatedExpr):
        return False  # integrals and series take long; UnevaluatedExpr marks a percentage: 50% may equal 50
    difference = _magnitude(known - given)
    return difference is not None and difference != 0


def _is_rounded(decimal: Fraction, value: object) -> bool:
    """Tell whether the number ``decimal`` equals the sympy expression ``value``, a real number, rounded or truncated as
    ``numbers.is_decimal_of`` allows. Returns False if ``value`` is not a real number, or is too expensive to
    compute."""
    if not (isinstance(value, Expr) and value.is_number and value.is_real) or value.has(ExprWithLimits):
        return False
    places, size = decimal_places(decimal), _magnitude(value)
    if places is None or places > MAX_PLACES or size is None or size > 10**MAX_PLACES:
        return False
    exact = value.evalf(places + len(str(int(size))) + 20, maxn=MAX_DIGITS)
    return exact.is_Float and is_decimal_of(decimal, Fraction(str(Rational(exact))) + _ENDLESS)


def is_rounded(exact: str, decimal: str) -> bool:
    """Tell whether the number ``decimal`` is the expression ``exact`` rounded or truncated at the decimal's last digit.
    Returns True if ``exact`` contains variables, because it then has no value to compare with."""
    value, near = _parse(exact), _parse(decimal)
    if not isinstance(value, Expr) or not isinstance(near, Expr):
        return False
    if value.free_symbols:
        return True
    digits = re.fullmatch(r"-?(\d+)(?:\.(\d+))?", decimal.strip())
    if not digits or value.has(ExprWithLimits) or not near.is_number:
        return False
    zeros = len(digits[1]) - len(digits[1].rstrip("0"))
    step = Rational(1, 10 ** len(digits[2])) if digits[2] else Rational(10 ** min(zeros, len(digits[1]) - 1))
    difference = _magnitude(value - near)
    if difference is None or difference > step:
        return False
    return bool(difference <= step / 2 or abs(near) <= abs(value.evalf(15)))


def _magnitude(number: Expr) -> Expr | None:
    """Compute the absolute value of a sympy number to two digits; None if that fails."""
    try:
        value = abs(number.evalf(2, maxn=MAX_DIGITS, strict=True))
    except (ArithmeticError, NotImplementedError, TypeError, ValueError):  # ArithmeticError: precision exhausted
        return None
    return value if value.is_Number and value.is_finite else None


def _ascending(chain: str) -> str:
    """Rewrite ``b > a > c`` as ``c<a<b``."""
    parts = re.split(r"(>|\\geq)", chain)
    if len(parts) == 1 or re.search(r"<|\\leq|,", chain):
        return chain
    return "".join({">": "<", "\\geq": "\\leq "}.get(part, part.strip()) for part in reversed(parts))


def _solution_set(text: str) -> Set | None:
    """Return the real solutions of intervals, or of inequalities in one variable; None if that is not possible."""
    # "x is not 1 and not 2" excludes both numbers, also if a comma or "or" joins the two
    conjunction = re.search(r"\band\b", text) is not None or text.count("\\neq") > 1
    union, parts = None, split_top(text, SEPARATOR)
    if len(parts) > MAX_PARTS:
        return None
    for part in parts:
        part = re.sub(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*", "", part)
        parsed = _parse(part)
        if parsed is None:
            return None
        if RELATION.search(part):
            if len(parsed.free_symbols) != 1:
                return None
            try:
                parsed = parsed.as_set()
            except (NotImplementedError, TypeError, ValueError):  # no polynomial, or not over the real numbers
                return None
        if not isinstance(parsed, Set):
            return None
        union = parsed if union is None else union.intersect(parsed) if conjunction else union.union(parsed)
    return union


def _is_huge(text: str) -> bool:
    """Tell whether a text has a power or factorial of whole numbers, such as ``9^{9^9}``, that sympy could not compute
    in a second; sympy computes them while it parses. For this test, an inner power is replaced by its value, or by
    2^128 if its value has 128 or more bits, because no power with so large an exponent can be computed. A calculation
    in brackets such as ``(9^9 - 1)`` is replaced by a number that is not smaller."""
    while (part := _SUM.search(text)) or (power := _POWER.search(text)):
        if part:
            first, second = int(part[2]), int(part[4])
            value = first if part[3] in ("-", "/") else first + second if part[3] == "+" else first * second
            text = f"{text[: part.start()]}{part[1]}{min(value, 2**128)}{text[part.end() :]}"
            continue
        base, exponent = int(power["base"]), int(power["exponent"] or power["digit"] or 0)
        bits = 0 if base < 2 else base.bit_length() * (base if power["factorial"] else exponent)
        if bits > MAX_PARSED_BITS:
            return True
        value = 2**128 if bits >= 128 else math.factorial(base) if power["factorial"] else base**exponent
        text = f"{text[: power.start()]}({value}){text[power.end() :]}"
    return re.search(r"\^[{(\s]*\d{39}", text) is not None  # of another base, such as e


def _parse(text: str) -> Any:
    """Parse a whole text as one expression with math-verify's parser; None if that fails."""
    # The parser takes the e of 1e3 for Euler's number, and computes 1E999999999.
    text = re.sub(r"(?<=\d)(?:e|E\+?)(\d+)(?![\w.])", r"\\cdot 10^{\1}", text)
    if _is_huge(text):
        return None
    text = re.sub(r"(?<![\\A-Za-z])E_", r"\\mathcal{E}_", text)  # the parser takes E for Euler's number
    try:
        parsed: Any = latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            normalization_config=_NORMALIZATION,
            conversion_config=_CONVERSION,
        )
        if isinstance(parsed, Expr) and parsed.has(Float):
            parsed = nsimplify(parsed, rational=True)  # decimals are exact
        units = {symbol: I for symbol in getattr(parsed, "free_symbols", ()) if str(symbol) == "i"}
        return parsed.subs(units) if units else parsed
    except Exception:  # the parser raises errors of many kinds, and sympy at inequalities of imaginary numbers
        return None
