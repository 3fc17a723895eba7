"""Compare answers with units, such as ``6\\text{ cm}`` and ``60 mm``, by the table of units in ``units.py``."""

import re
from fractions import Fraction
from typing import NamedTuple

from qerl_pl.rewards.latex import SEPARATOR, commands, join_thousands, split_top, unwrap
from qerl_pl.rewards.numbers import exact_number
from qerl_pl.rewards.units import TABLE, Unit, unit_of

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_QUANTITY = re.compile(r"(?P<value>.*?(?:[\d)}\]]|\\pi))\s*(?P<unit>(?:/\s*)?[A-Za-z][A-Za-z.^{}\d/ *'-]*)$", re.DOTALL)
_NEXT_UNIT = re.compile(r"(?<=[A-Za-z.])\s*,?\s+(?:and\s+)?(?=\d)")
_DEGREE, _RADIAN = TABLE["degree"], TABLE["radian"]
# Pairs of units that one word or sign may mean: degrees of an angle and of a temperature, pounds of mass and of money.
_ALIKE = [{_DEGREE, TABLE["celsius"]}, {_DEGREE, TABLE["fahrenheit"]}, {TABLE["pound"], TABLE["GBP"]}]
_CURRENCIES = {"$": "dollars", "\u20ac": "euros", "\u00a3": "GBP", "\u00a5": "yen", "\u20b9": "rupees", "\u20a9": "won"}
_SIGN = "|".join(map(re.escape, _CURRENCIES))
_MONEY = re.compile(  # an amount with a sign or code before it
    rf"^([-\s]*)(?:(?:\\text\s*\{{)?\s*(?:US)?[\s}}]*\\?(?P<sign>{_SIGN})"
    r"|(?:\\text\s*\{)?(?P<code>[A-Z]{3}\b|Rs\.?))[\s}]*(?=[\d.])(?P<amount>.*?)(?:\s*dollars)?$"
)


class Quantity(NamedTuple):
    """A value with a unit from the table in ``units``."""

    value: str
    unit: Unit
    certain: bool  # False if the unit may instead be a product of variables, as in ``2m`` and ``2mg``

    def times(self, ratio: Fraction, power_of_pi: int = 0) -> str:
        """Convert the value to a unit that is contained ``ratio * pi ** power_of_pi`` times in this quantity's unit,
        and return it as LaTeX."""
        if ratio == 1 and not power_of_pi:
            return self.value
        name, equals, value = self.value.rpartition("=")
        number = exact_number(value)
        if number:
            ratio, value = ratio * number.value, "1"
        scaled = f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
        scaled = scaled if number else f"{scaled}\\cdot ({value})"
        return f"{name}{equals}{scaled}" + (f"\\cdot \\pi^{{{power_of_pi}}}" if power_of_pi else "")


def quantity(text: str) -> Quantity | None:
    """Read ``6\\text{ cm}`` or ``$5`` as a value with a unit of the table; ``2 hours 30 minutes`` is a value in hours,
    the first of its units. Returns None for any other text, such as a list of quantities."""
    if re.search(r"\bper\s?cent\b", text):
        return None
    text = unwrap(text)
    money = _MONEY.sub(lambda found: f"{found[1]}{found['amount']} {found['code'] or _CURRENCIES[found['sign']]}", text)
    money = re.sub(rf"(?<=\d)\s*\\?({_SIGN})$", lambda found: f" {_CURRENCIES[found[1]]}", money)
    money = re.sub(r"(?<=\d)\s*(?:\u00a2|\\text\s*\{\s*\u00a2\s*\}|\\cents?(?![A-Za-z]))", " cents", money)
    money = re.sub(r"\bUS (?=dollars?\b)", "", money)
    money = re.sub(r"\u2030|\\(?:text)?permil(?![A-Za-z])|\\textperthousand", " permille", money)
    plain = commands(re.sub(r"\bbasis points?\b", "bp", money))
    certain = money != text or "\\circ" in plain or "degrees" in plain or "\\text" in plain
    plain = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\\text)?\s*\{?\s*([CF]\b)?\s*\}?", r" degrees \1", plain)
    plain = re.sub(r"degrees (?=C|F|[Cc]elsius|[Ff]ahrenheit)", "", plain)
    plain = re.sub(
        r"(?<=[\d})])\s*\\frac\s*\{\s*([A-Za-z][^{}\\]*)\}\s*\{\s*([A-Za-z][^{}\\]*)\}",
        r" \1/\2",
        _TEXT.sub(r" \1 ", plain),
    )
    plain = re.sub(r"\\mu\s*(?=[A-Za-z])", "u", re.sub(r"\\Omega(?![A-Za-z])", "ohm", plain))
    plain = re.sub(r"(?<=[A-Za-z])\s*\\cdot\s*(?=[A-Za-z])", " ", re.sub(r"(?<!\\)\$|\\[()]", " ", plain)).strip(" .")
    parts = [_QUANTITY.match(join_thousands(part.strip())) for part in _NEXT_UNIT.split(plain)]
    units = [unit_of(part["unit"]) if part else None for part in parts]
    first, unit = parts[0], units[0]
    if first is None or unit is None or None in units:
        return None
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)[^()]*\d$", first["value"].strip()):
        return None  # in \sin 30^\circ the unit is that of the angle
    if len(parts) == 1:
        certain = certain or re.search(r"\s+[A-Za-z]{2}|[A-Za-z]{4}", plain[first.end("value") :]) is not None
        value = first["value"].strip()
        single = len(split_top(value, SEPARATOR)) == 1 and value.count("{") == value.count("}")
        return Quantity(value, unit, certain) if single else None
    total = Fraction(0)
    for part, other in zip(parts, units, strict=True):
        number, ratio = exact_number(part["value"]) if part else None, other.per(unit) if other else None
        if number is None or ratio is None or ratio[1]:
            return None
        total += number.value * ratio[0]
    sizes, value = [other.size for other in units if other], f"\\frac{{{total.numerator}}}{{{total.denominator}}}"
    return Quantity(value, unit, True) if sizes == sorted(set(sizes))[::-1] else None


def in_one_unit(gold: str, answer: str) -> tuple[str, str] | None:
    """Convert the known answer ``gold`` and a completion's answer to the unit of the known answer, and return both
    values without the unit; None if the units measure different things, or if one answer has a unit (and no letter that
    may be a variable) and the other is a percentage.

    If only the known answer has a unit, the completion's answer is taken to be in this unit, and both are returned as
    they are; only a known answer in several units, such as ``2 hours 30 minutes``, is converted to its value in the
    first of them. If only the completion's answer has a unit and the known answer is a number, the unit is dropped. A
    value without dimension, such as ``5 permille``, counts as a number without a unit. All other answers are returned
    as they are, such as those with units that are not in the table of ``units.py``, or two whose units may both be
    variables, as in ``5 m`` and ``5 s``.
    """
    known, given = (_shared_out(quantity(side), side) for side in (gold, answer))
    for one, other in ((known, answer), (given, gold)):
        if isinstance(one, Quantity) and one.certain and re.search(r"%|\bper\s?cent\b", other):
            return None
    if isinstance(known, str) and isinstance(given, Quantity):
        if given.unit == _DEGREE and "\\pi" in known:
            known = Quantity(known, _RADIAN, certain=True)
        elif "\u00a2" not in answer and not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", known)):
            return known, given.value
    if not (isinstance(known, Quantity) and isinstance(given, Quantity)):
        compound = isinstance(known, Quantity) and known.value not in gold
        return (
            known if isinstance(known, str) else known.value if compound else gold,
            given if isinstance(given, str) else answer,
        )
    if not (known.certain or given.certain):
        return gold, answer
    ratio = given.unit.per(known.unit)
    if {known.unit, given.unit} in _ALIKE:
        ratio = Fraction(1), 0
    return None if ratio is None else (known.value, given.times(*ratio))


def _shared_out(measured: Quantity | None, text: str) -> Quantity | str:
    """Return ``measured``, the quantity that was read from ``text``. If this quantity has no dimension, such as ``5
    permille``, return its value as a plain number in LaTeX instead; if ``measured`` is None, because ``text`` is no
    quantity, return ``text``."""
    if measured is None:
        return text
    return measured if measured.unit.dimension else measured.times(measured.unit.size)
