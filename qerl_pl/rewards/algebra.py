"""Algebra on two expressions: math-verify and sympy behind the rules of ``equivalence.py``.

For the verifier's worker processes only: what a model wrote may hang here or eat memory.
"""

from __future__ import annotations

import logging
import re

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import I, Set

from qerl_pl.rewards.latex import SEPARATOR, letters, split_top

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off; ours is on

RELATION = re.compile(r"<|>|\\leq|\\geq|\\neq")
_NORMALIZATION = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)]


class Unreadable(ValueError):
    """A known answer that neither the rules nor math-verify can read."""


def equal_expressions(gold: str, found: str) -> bool:
    """Whether math-verify finds two expressions equal.

    Raises:
        Unreadable: it cannot read the known one.
    """
    known = _parse(gold)
    if known is None:
        raise Unreadable(f"the known answer {gold!r} cannot be read, so {found!r} cannot be compared with it")
    given = _parse(found)
    return given is not None and verify(known, given, timeout_seconds=None, allow_set_relation_comp=True)


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
