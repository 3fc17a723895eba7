"""Algebra on two expressions: math-verify and sympy behind the rules of ``equivalence.py``.

For the verifier's worker processes only: what a model wrote may hang here or eat memory.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Expr, Float, I, Mul, Pow, Rational, Set, UnevaluatedExpr, factorial
from sympy.concrete.expr_with_limits import ExprWithLimits

from qerl_pl.rewards.latex import SEPARATOR, letters, split_top

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is on

MAX_BITS = 2**17  # of a power or factorial that is written out: milliseconds
MAX_DIGITS = 2000  # with which a difference is looked for: 2^{-2024} beside 1 needs 610
RELATION = re.compile(r"<|>|\\leq|\\geq|\\neq")
_NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)]


class Unreadable(ValueError):
    """A known answer that neither the rules nor math-verify can read."""


def equal_expressions(gold: str, found: str) -> bool:
    """Whether two fractions are equal, and of other expressions whether math-verify finds them so.

    Its test is absolute, so that all tiny numbers are equal; what it accepts must not be provably different.

    Raises:
        Unreadable: it cannot read the known one.
    """
    known = _parse(gold)
    if known is None:
        raise Unreadable(f"the known answer {gold!r} cannot be read, so {found!r} cannot be compared with it")
    given = _parse(found)
    if given is None:
        return False
    fractions = _fraction(known), _fraction(given)
    if None not in fractions:
        return fractions[0] == fractions[1]
    same = verify(known, given, timeout_seconds=None, allow_set_relation_comp=True)
    return same and not _provably_different(known, given)


def equal_relations(gold: str, found: str) -> bool:
    """Inequalities against inequalities or against the intervals they describe.

    Raises:
        Unreadable: the known one cannot be read.
    """
    gold, found = _ascending(gold), _ascending(found)
    if letters(gold) == letters(found):
        return True
    known, given = _solution_set(gold), _solution_set(found)
    if known is not None and given is not None:
        return bool(known == given or known.symmetric_difference(given).is_empty)
    return equal_expressions(gold, found)


def _fraction(number: object) -> Fraction | None:
    """The value of fractions, sums, products, whole powers and factorials of moderate size; else None."""
    if isinstance(number, Rational):
        return Fraction(int(number.p), int(number.q))
    if not isinstance(number, (Add, Mul, Pow, factorial)):
        return None
    parts = [_fraction(part) for part in number.args]
    values = [part for part in parts if part is not None]
    if len(values) < len(parts):
        return None
    bits = sum(value.numerator.bit_length() + value.denominator.bit_length() for value in values)
    if bits > MAX_BITS:
        return None
    if isinstance(number, Add):
        return sum(values, Fraction(0))
    if isinstance(number, Mul):
        return math.prod(values, start=Fraction(1))
    if values[-1].denominator != 1:
        return None
    base, exponent = values[0], int(values[-1])
    if abs(exponent) * bits > MAX_BITS:  # n! has fewer bits than n times those of n
        return None
    if isinstance(number, Pow):
        return None if base == 0 and exponent <= 0 else base**exponent
    return Fraction(math.factorial(exponent)) if exponent >= 0 else None


def _provably_different(known: object, given: object) -> bool:
    """Whether digits show that two numbers are not the same, or that a decimal is nowhere near the other number."""
    if not all(isinstance(side, Expr) and side.is_number for side in (known, given)) or known == given:
        return False
    assert isinstance(known, Expr)
    assert isinstance(given, Expr)
    if known.has(ExprWithLimits, UnevaluatedExpr) or given.has(ExprWithLimits, UnevaluatedExpr):
        return False  # digits of integrals and series are slow; a percentage may be equal to the number that it shows
    difference = _magnitude(known - given)
    if difference is None or difference == 0:
        return False
    if not (known.has(Float) or given.has(Float)):
        return True
    size = _magnitude(known)
    return size is not None and bool(2 * difference > size)


def _magnitude(number: Expr) -> Expr | None:
    """Two digits of an absolute value, or None where they cannot be told."""
    try:
        value = abs(number.evalf(2, maxn=MAX_DIGITS, strict=True))
    except (ArithmeticError, NotImplementedError, TypeError, ValueError):  # the first: digits ran out
        return None
    return value if value.is_Number and value.is_finite else None


def _ascending(chain: str) -> str:
    """``b > a > c`` as ``c<a<b``."""
    parts = re.split(r"(>|\\geq)", chain)
    if len(parts) == 1 or "<" in chain or "\\leq" in chain or "," in chain:
        return chain
    flipped = [{">": "<", "\\geq": "\\leq "}.get(part, part.strip()) for part in reversed(parts)]
    return "".join(flipped)


def _solution_set(text: str) -> Set | None:
    """The reals that inequalities or intervals in one unknown describe, or None."""
    conjunction = re.search(r"\band\b", text) is not None
    union = None
    for part in split_top(text, SEPARATOR):
        part = re.sub(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*", "", part)
        parsed = _parse(part)
        if parsed is None:
            return None
        if RELATION.search(part):
            if len(parsed.free_symbols) != 1:
                return None
            try:
                parsed = parsed.as_set()
            except (NotImplementedError, TypeError, ValueError):  # not a polynomial, or not of real numbers
                return None
        if not isinstance(parsed, Set):
            return None
        union = parsed if union is None else union.intersect(parsed) if conjunction else union.union(parsed)
    return union


def _parse(text: str):
    """math-verify's reading of one expression, or None. Its own time limit needs signals: the worker has a better."""
    found = parse(f"${text}$", _EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore
    if not found:
        return None
    units = {symbol: I for symbol in getattr(found[0], "free_symbols", ()) if str(symbol) == "i"}
    try:
        return found[0].subs(units) if units else found[0]
    except (TypeError, ValueError):  # an inequality or interval of imaginary numbers
        return None
